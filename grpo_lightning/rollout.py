"""Prompts -> samples -> rewards -> advantages. Runs without a Trainer."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_lightning.batch import Prompts, Rollout, Sampled, Sampling
from grpo_lightning.clock import Clock
from grpo_lightning.group import top_entropy
from grpo_lightning.judge import Judge, Judged, judge
from grpo_lightning.loss import k1, k3
from grpo_lightning.policy import Policy, Poll
from grpo_lightning.ranks import ALONE, Ranks
from grpo_lightning.reward import Weighted

log = logging.getLogger(__name__)

Advantage = Callable[..., Tensor]
"""What it names of rewards [P, G], scores [K, P, G], weights [K] and steps [P, G, T] -> [P, G] or [P, G, T]."""
GroupFilter = Callable[[Tensor], Tensor]
"""Outcome rewards [P, G] -> which groups to train on, [P] (bool)."""
Downsample = Callable[[Tensor], Tensor]
"""Rewards [P, G] -> indices [P, n] of the completions to train on."""


@dataclass(frozen=True)
class Collected:
    """One rollout and what there is to say about it."""

    rollout: Rollout
    judged: Judged
    """The rows of ``rollout``."""
    advantages: Tensor
    """[B] mean over each row's tokens."""
    metrics: Mapping[str, Tensor]
    surplus: Judged | None
    """Groups that passed the filter and were too many; for the next rollout."""
    num_tokens: int
    """Sampled for it, whether or not they are trained on."""
    work: float
    """Floating-point operations that sampling and the reference take at least, see ``Policy.work``."""
    is_fresh: bool
    """Whether all rows were sampled by the policy as it is now."""


@dataclass(frozen=True)
class Collector:
    """One rollout: ``group_size`` completions per prompt, judged against one another.

    Numbers may vary with the step, see `grpo_lightning.varying`.
    """

    judge: Judge
    advantage: Advantage
    group_size: int
    """Completions per prompt, G >= 2."""
    sampling: Sampling
    kl_penalty: float = 0.0
    """Of the reward: k1 to the reference, summed over the completion, is taken off the total times this."""
    group_filter: GroupFilter | None = None
    """Says by the outcome rewards which groups to train on; None for all."""
    max_tries: int = 1
    """How often to sample, as many prompts each time, until enough groups pass the filter."""
    downsample: Downsample | None = None
    """Says by the rewards which completions of a group to train on; None for all."""
    mask_truncated: bool = False
    """Whether completions cut at the length limit are left out of the loss; they stay in their group's mean."""
    top_entropy: float = 1.0
    """Share of the tokens, those of highest entropy, that have an advantage."""

    @torch.no_grad()
    def __call__(
        self,
        policy: Policy,
        reference: Policy | None,
        prompts: Prompts,
        *,
        microbatch_tokens: int,
        seed: int,
        clock: Clock,
        poll: Poll | None = None,
        carried: Judged | None = None,
        ranks: Ranks = ALONE,
    ) -> Collected:
        """Sample, score, compare.

        Args:
            policy: Samples.
            reference: Scored once on the samples; None for no KL term.
            prompts: [P * max_tries] those of each try.
            microbatch_tokens: Most tokens in one forward pass of the reference.
            seed: Of the samples.
            clock: Counts the phases rollout, reward and score.
            poll: As in ``Policy.sample``.
            carried: The last rollout's surplus, which comes first; its old log-probabilities are those of the policy
                that sampled it.
            ranks: The processes that share the work; all of them return the whole rollout.

        Returns:
            A rollout of P prompts, whose old log-probabilities are the sampler's.
        """
        fresh: list[Judged] = []
        failed: list[dict[str, float]] = []
        kept = [carried] if carried else []
        wanted = len(prompts) // self.max_tries
        while sum(len(part.prompts) for part in kept) < wanted and len(fresh) < self.max_tries:
            chunk = prompts[range(len(fresh) * wanted, (len(fresh) + 1) * wanted)]
            judged, failures = self.judge(
                policy,
                chunk,
                group_size=self.group_size,
                sampling=self.sampling,
                seed=seed + len(fresh),
                clock=clock,
                poll=poll,
                ranks=ranks,
            )
            fresh.append(judged)
            failed.append(failures)
            kept.append(judged.groups(self._teaching(judged)))
        chosen, surplus = self._chosen(kept, fresh, wanted)
        if self.downsample is not None:
            rewards = chosen.rewards["total"].view(len(chosen.prompts), -1)
            inside = self.downsample(rewards)
            chosen = chosen.rows((torch.arange(len(rewards)).unsqueeze(-1) * rewards.shape[-1] + inside).flatten())
        with clock("score"):
            ref_logprobs = self._reference(reference, chosen.sampled, microbatch_tokens, ranks)
        rollout = self._rollout(chosen, ref_logprobs)
        advantages = rollout.advantages.sum(-1) / rollout.mask.sum(-1).clamp(min=1)
        everything = Judged.concatenate(fresh)
        metrics = _sampled_metrics(everything) | _scored_metrics(chosen, ref_logprobs, reference)
        metrics |= {"advantage/mean": advantages.mean(), "advantage/std": advantages.std()}
        metrics |= {
            f"failure/{name}": torch.tensor([failures[name] for failures in failed]).mean() for name in failed[0]
        }
        if self.group_filter is not None:
            metrics |= {
                "group/tries": torch.tensor(float(len(fresh))),
                "group/kept": torch.tensor(sum(len(part.prompts) for part in kept) / (len(fresh) * wanted)),
                "group/carried": torch.tensor(len(carried.prompts) / wanted if carried else 0.0),
            }
        num_tokens = int(everything.sampled.mask.sum())
        work = policy.work(everything.sampled) + (reference.work(chosen.sampled) if reference else 0.0)
        return Collected(rollout, chosen, advantages, metrics, surplus, num_tokens, work, is_fresh=carried is None)

    def _teaching(self, judged: Judged) -> list[int]:
        """Numbers of the groups that pass the filter."""
        if self.group_filter is None:
            return list(range(len(judged.prompts)))
        outcomes = judged.rewards[self.judge.outcome].view(len(judged.prompts), -1)
        passed: list[int] = self.group_filter(outcomes).nonzero().flatten().tolist()
        return passed

    def _chosen(self, kept: Sequence[Judged], fresh: Sequence[Judged], wanted: int) -> tuple[Judged, Judged | None]:
        """``wanted`` groups, and those beyond; filled up with groups that the filter refused if they are too few."""
        parts = [part for part in kept if len(part.prompts)]
        if (missing := wanted - sum(len(part.prompts) for part in parts)) > 0:
            everything = Judged.concatenate(fresh)
            passed = {number * wanted + group for number, part in enumerate(fresh) for group in self._teaching(part)}
            refused = [group for group in range(len(everything.prompts)) if group not in passed]
            parts = [*parts, everything.groups(refused[:missing])]
            log.warning(
                "%d of %d groups passed rollout.group_filter after %d tries (rollout.max_tries): filled up with "
                "others, which teach nothing",
                wanted - missing,
                wanted,
                self.max_tries,
            )
        together = Judged.concatenate(parts)
        if len(together.prompts) == wanted:
            return together, None
        return together.groups(range(wanted)), together.groups(range(wanted, len(together.prompts)))

    def _reference(self, reference: Policy | None, sampled: Sampled, microbatch_tokens: int, ranks: Ranks) -> Tensor:
        found = torch.zeros_like(sampled.logprobs)
        if reference is None:
            return found
        parts, _ = reference.shares(sampled, microbatch_tokens, ranks)
        with reference.present(found.device):
            for rows in parts:
                found[rows] = reference.logprobs(sampled[rows], temperature=self.sampling.temperature)
        if ranks.size == 1:
            return found
        mine = torch.cat(parts).unique()
        for rows, logprobs in ranks.gather((mine.cpu(), found[mine].cpu())):
            found[rows.to(found.device)] = logprobs.to(found.device)
        return found

    def _rollout(self, judged: Judged, ref_logprobs: Tensor) -> Rollout:
        sampled, groups = judged.sampled, (len(judged.prompts), judged.group_size)
        total = judged.rewards["total"]
        if unscored := int(total.isnan().sum()):
            log.warning("%d completions got None from every reward: their advantage is 0", unscored)
        if self.kl_penalty:
            total = total - self.kl_penalty * (k1(sampled.logprobs, ref_logprobs) * sampled.mask).sum(-1).cpu()
        known = {
            "rewards": total.view(groups),
            "scores": judged.scores.T.reshape(-1, *groups),
            "weights": self.judge.weights,
            "steps": judged.steps.view(*groups, -1),
        }
        named = [name for name in inspect.signature(self.advantage).parameters if name in known]
        advantages = self.advantage(**{name: known[name] for name in named}).to(sampled.mask.device)
        mask = sampled.mask
        if self.mask_truncated:
            mask = mask & torch.tensor(sampled.finished, device=mask.device).unsqueeze(-1)
        counts = top_entropy(sampled.entropy, mask, share=self.top_entropy) if self.top_entropy < 1 else mask
        return Rollout(
            ids=sampled.ids,
            attention_mask=sampled.attention_mask,
            mask=mask,
            old_logprobs=sampled.logprobs,
            ref_logprobs=ref_logprobs,
            advantages=advantages.reshape(len(mask), -1) * counts,
        )


def _sampled_metrics(judged: Judged) -> dict[str, Tensor]:
    """Of everything that was sampled, whether or not it is trained on."""
    rewards = judged.rewards["total"].view(len(judged.prompts), -1)
    right = judged.right.view_as(rewards).float().mean(-1)
    lengths = judged.sampled.mask.sum(-1).float()
    return {f"reward/{name}": values.nanmean() for name, values in judged.rewards.items()} | {
        "reward/std": replace_nan(rewards).std(-1).mean(),
        "group/all_right": (right == 1).float().mean(),
        "group/all_wrong": (right == 0).float().mean(),
        "group/mixed": ((right > 0) & (right < 1)).float().mean(),
        "completion/length_mean": lengths.mean(),
        "completion/length_max": lengths.max(),
        "completion/truncated_fraction": 1 - torch.tensor(judged.sampled.finished).float().mean(),
    }


def _scored_metrics(judged: Judged, ref_logprobs: Tensor, reference: Policy | None) -> dict[str, Tensor]:
    """Of the tokens that are trained on, under the policy that sampled them."""
    sampled = judged.sampled
    metrics = {"policy/entropy": sampled.entropy[sampled.mask].mean()}
    if reference is not None:
        metrics["policy/kl_divergence"] = k3(sampled.logprobs, ref_logprobs)[sampled.mask].mean()
    return metrics


def collector(
    *,
    reward: Mapping[str, Weighted],
    advantage: Advantage,
    outcome: str | None,
    threshold: float,
    group_size: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    max_new_tokens: int,
    stop: Sequence[str],
    kl_penalty: float,
    group_filter: GroupFilter | None,
    max_tries: int,
    downsample: Downsample | None,
    mask_truncated: bool,
    top_entropy: float,
) -> Collector:
    """A ``Collector`` from the keys of conf/rollout, which ``Judge``, ``Collector`` and ``Sampling`` explain."""
    return Collector(
        judge(reward, outcome, threshold),
        advantage,
        group_size,
        Sampling(temperature, top_p, top_k, min_p, max_new_tokens, tuple(stop)),
        kl_penalty=kl_penalty,
        group_filter=group_filter,
        max_tries=max_tries,
        downsample=downsample,
        mask_truncated=mask_truncated,
        top_entropy=top_entropy,
    )


def on_policy(rows: Rollout, logprobs: Tensor) -> Rollout:
    """``rows`` with the policy's own log-probabilities as the old ones: the ratio is exactly 1."""
    return replace(rows, old_logprobs=logprobs.detach())


def replace_nan(rewards: Tensor) -> Tensor:
    """[P, G] with every NaN replaced by the mean of its group's other rewards; 0 in a group of NaN."""
    return torch.where(rewards.isnan(), rewards.nanmean(-1, keepdim=True).nan_to_num(0.0), rewards)
