"""Collect a rollout: sample, score, compare. Runs without a Trainer."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lightning.advantage import replace_nan
from grpo_lightning.loss import k1, k3
from grpo_lightning.policy import Policy
from grpo_lightning.reward import RewardSpec
from grpo_lightning.rollout.scoring import Scorer, StepContext
from grpo_lightning.sampler.token_sampling import MAX_SUPPORT
from grpo_lightning.types import Prompts, Rollout, Sampled, Sampling, SamplingSupport, Scored, by_source

if TYPE_CHECKING:
    from grpo_lightning.environment import Environment

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_ROUNDING = 1e-6  # of float32 sums over up to some thousand completions

GroupFilter = Callable[[Tensor], Tensor]
"""Outcome rewards [P, G] -> which groups to train on, [P] (bool)."""
ADVANTAGE_INPUTS = ("rewards", "scores", "weights", "steps")
"""Parameters that an advantage function may have."""
Advantage = Callable[..., Tensor]
"""Takes those of rewards [P, G], scores [K, P, G], weights [K] and steps [P, G, T] that its parameters name, and
returns [P, G] or [P, G, T]."""
Downsample = Callable[[Tensor], Tensor]
"""Rewards [P, G] -> indices [P, n] of the completions to train on."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """One rollout and its metrics."""

    rollout: Rollout
    scored: Scored
    """The rows of ``rollout``."""
    metrics: Mapping[str, Tensor]
    carried: Scored | None
    """Surplus groups of dynamic sampling, for the next rollout."""
    num_tokens: int
    """Tokens sampled for it, whether or not they are trained on."""
    flops: float
    """Floating-point operations of sampling and of the reference, at least, see ``Policy.flops``."""
    is_fresh: bool
    """Whether all rows were sampled by the policy as it is now."""


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Collects rollouts: ``group_size`` completions per prompt, compared with one another.

    The fields are the keys of conf/rollout. Numbers may vary with the step, see `grpo_lightning.schedule`.
    """

    reward: Mapping[str, RewardSpec]
    """Name -> function and weight."""
    environment: "Environment | None" = None
    """Environment for multi-turn rollouts, or None for single-turn."""
    advantage: Advantage
    outcome: str | None
    """The reward that decides whether a completion is right, as in `Scorer`."""
    threshold: float
    """Its least score that counts as right."""
    group_size: int
    """Completions per prompt, G >= 2."""
    temperature: float
    """Divides the logits; this, the next five and ``kv_cache_gib`` are the fields of `Sampling`."""
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    stop: Sequence[str]
    kv_cache_gib: float | None = None
    kl_penalty: float = 0.0
    """k1 to the reference, summed over the completion, is taken off the total reward times this."""
    teacher_coef: float = 0.0
    """The log-ratio of the reference to the policy at a token is added to its advantage times this."""
    group_filter: GroupFilter | None = None
    """Says by the outcome rewards which groups to train on; None for all."""
    max_tries: int = 1
    """How often to sample, as many prompts each time, until enough groups pass the filter."""
    downsample: Downsample | None = None
    """Says by the rewards which completions of a group to train on; None for all."""
    mask_truncated: bool = False
    """Whether completions cut at the length limit are left out of the loss; they stay in their group's mean."""
    top_entropy: float = 1.0
    """Fraction of the tokens, those of highest entropy, that have an advantage."""

    def __post_init__(self) -> None:
        for parameter in inspect.signature(self.advantage).parameters.values():
            is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.default is parameter.empty and not is_variadic and parameter.name not in ADVANTAGE_INPUTS:
                raise ValueError(
                    f"advantage: its parameter {parameter.name!r} is none of {', '.join(ADVANTAGE_INPUTS)}"
                )

    @property
    def uses_reference(self) -> bool:
        """Whether rewards or advantages need log-probabilities of the reference."""
        return bool(self.kl_penalty or self.teacher_coef)

    @property
    def sampling(self) -> Sampling:
        """How completions are drawn."""
        return Sampling(**{field.name: getattr(self, field.name) for field in fields(Sampling)})

    @property
    def scorer(self) -> Scorer:
        """Generates completions and scores them."""
        return Scorer(self.reward, self.outcome, self.threshold, self.environment)

    @torch.no_grad()
    def collect(
        self,
        policy: Policy,
        reference: Policy | None,
        prompts: Prompts,
        *,
        context: StepContext,
        carried: Scored | None = None,
    ) -> Collected:
        """Sample, score, compare.

        Args:
            policy: Samples.
            reference: Gives log-probabilities of the samples, once; None for no KL term.
            prompts: [P * max_tries] those of each try.
            context: The step's seed, sampler, clock and processes. All processes return the whole rollout.
            carried: Surplus groups of the last rollout, which come first; their old log-probabilities are those of the
                policy that sampled them. Dropped if they have another size or other rewards.

        Returns:
            A rollout of P prompts, whose old log-probabilities are the sampler's.

        Raises:
            ValueError: The prompts cannot be divided among the tries.
        """
        if len(prompts) % self.max_tries:
            raise ValueError(f"{len(prompts)} prompts: rollout.max_tries={self.max_tries} needs as many for each try")
        expected = (self.group_size, {*self.reward, "total"})
        if carried and (carried.group_size, {*carried.rewards}) != expected:
            log.warning("%d groups of the last rollout have another size or rewards: left out", len(carried.prompts))
            carried = None
        groups, sampled, metrics = self._sample_groups(policy, prompts, carried, context)
        wanted = len(prompts) // self.max_tries
        scored, surplus = groups.groups(range(wanted)), groups.groups(range(wanted, len(groups.prompts)))
        if self.downsample is not None:
            rewards = scored.rewards["total"].view(wanted, -1)  # [B] -> [P, G]
            members = self.downsample(rewards)  # [P, n]
            scored = scored.rows((torch.arange(wanted).unsqueeze(-1) * self.group_size + members).flatten())
        with context.clock("score"):
            ref_logprobs = self.ref_logprobs(reference, scored.sampled, context)
        rollout = self.compare(scored, ref_logprobs)
        passes = 2 if "sampler/support_miss_rate" in metrics else 1  # the support of an engine's samples takes one, too
        flops = policy.flops(sampled.sampled) * passes
        return Collected(
            rollout=rollout,
            scored=scored,
            metrics=sampled_metrics(sampled)
            | token_metrics(scored, ref_logprobs, has_reference=reference is not None)
            | advantage_metrics(rollout.completion_advantages)
            | metrics,
            carried=surplus if len(surplus.prompts) else None,
            num_tokens=int(sampled.sampled.mask.sum()),
            flops=flops + (reference.flops(scored.sampled) if reference else 0.0),
            is_fresh=carried is None,
        )

    def _sample_groups(
        self, policy: Policy, prompts: Prompts, carried: Scored | None, context: StepContext
    ) -> tuple[Scored, Scored, dict[str, Tensor]]:
        """At least P groups, those carried over first, then those that pass the filter; all that were sampled; metrics.

        DAPO's dynamic sampling, arXiv:2503.14476, section 3.2. If too few pass, refused ones fill up the rollout.
        """
        wanted = len(prompts) // self.max_tries
        fresh: list[Scored] = []
        passed: list[Scored] = [carried] if carried else []
        refused: list[Scored] = []
        by_try: list[dict[str, float]] = []
        # at least once, though the last rollout may have been of more prompts and have left enough over
        while not fresh or (_count(passed) < wanted and len(fresh) < self.max_tries):
            scored, metrics = self.scorer.generate_and_score(
                policy,
                prompts[range(len(fresh) * wanted, (len(fresh) + 1) * wanted)],
                group_size=self.group_size,
                sampling=self.sampling,
                context=replace(context, seed=context.seed + len(fresh)),
            )
            sampled, support_metrics = with_support(policy, scored.sampled, self.sampling, context)
            scored = replace(scored, sampled=sampled)
            passes = [True] * wanted
            if self.group_filter is not None:
                passes = self.group_filter(scored.rewards[self.scorer.outcome_name].view(wanted, -1)).tolist()
            fresh.append(scored)
            passed.append(scored.groups([group for group in range(wanted) if passes[group]]))
            refused.append(scored.groups([group for group in range(wanted) if not passes[group]]))
            by_try.append(metrics | support_metrics)
        means = {name: torch.tensor([one[name] for one in by_try]).mean() for name in by_try[0]}
        kept = _count(passed)
        if self.group_filter is not None:
            means |= {
                "group/tries": torch.tensor(float(len(fresh))),
                "group/kept": torch.tensor(kept / (len(fresh) * wanted)),
                "group/carried": torch.tensor(len(carried.prompts) / wanted if carried else 0.0),
            }
        if kept < wanted:
            message = "%d of %d groups passed rollout.group_filter after %d tries (rollout.max_tries): filled up with "
            log.warning(message + "others, which have no gradient", kept, wanted, self.max_tries)
            filling = Scored.concatenate([part for part in refused if len(part.prompts)])
            passed.append(filling.groups(range(wanted - kept)))
        groups = Scored.concatenate([part for part in passed if len(part.prompts)])
        return groups, Scored.concatenate(fresh), means

    def ref_logprobs(self, reference: Policy | None, sampled: Sampled, context: StepContext) -> Tensor:
        """[B, T] under the reference, of the whole vocabulary; zeros without one. Processes divide the work."""
        logprobs = torch.zeros_like(sampled.logprobs)
        if reference is None:
            return logprobs
        sampled = sampled.without_support
        parts, _ = reference.local_microbatches(sampled, context.microbatch_tokens, context.ranks)
        with reference.on_device(logprobs.device):
            for rows in parts:
                logprobs[rows] = reference.logprobs(sampled[rows], temperature=self.temperature)
        if context.ranks.size == 1:
            return logprobs
        local = torch.cat(parts).unique()
        for rows, values in context.ranks.gather((local.cpu(), logprobs[local].cpu())):
            logprobs[rows.to(logprobs.device)] = values.to(logprobs.device)
        return logprobs

    def compare(self, scored: Scored, ref_logprobs: Tensor) -> Rollout:
        """The completions with their advantages; ``ref_logprobs`` [B, T] are zeros where no reference is used."""
        sampled, groups = scored.sampled, (len(scored.prompts), scored.group_size)
        total = scored.rewards["total"]
        if unscored := int(total.isnan().sum()):
            log.warning("%d completions got None from every reward: their advantage is 0", unscored)
        if self.kl_penalty:
            total = total - self.kl_penalty * (k1(sampled.logprobs, ref_logprobs) * sampled.mask).sum(-1).cpu()
        available = {
            "rewards": total.view(groups),  # [B] -> [P, G]
            "scores": scored.scores.T.reshape(-1, *groups),  # [B, K] -> [K, P, G]
            "weights": self.scorer.weights,
            "steps": scored.steps.view(*groups, -1),  # [B, T] -> [P, G, T]
        }
        parameters = inspect.signature(self.advantage).parameters
        advantages = self.advantage(**{name: available[name] for name in parameters if name in available})
        mask = sampled.mask
        if not isinstance(advantages, Tensor) or advantages.shape not in (groups, (*groups, mask.shape[1])):
            found = tuple(advantages.shape) if isinstance(advantages, Tensor) else type(advantages).__name__
            raise ValueError(
                f"advantage: returned {found}; expected a tensor of shape {groups} or {(*groups, mask.shape[1])}"
            )
        if self.mask_truncated:
            mask = mask & torch.tensor(sampled.finished, device=mask.device).unsqueeze(-1)
        has_advantage = mask
        if self.top_entropy < 1:
            has_advantage = top_entropy_mask(sampled.entropy, mask, fraction=self.top_entropy)
        advantages = advantages.to(mask.device).reshape(len(mask), -1)  # [P, G] -> [B, 1], or [P, G, T] -> [B, T]
        if self.teacher_coef:
            advantages = advantages + self.teacher_coef * (ref_logprobs - sampled.logprobs)
        return Rollout(
            ids=sampled.ids,
            attention_mask=sampled.attention_mask,
            mask=mask,
            old_logprobs=sampled.logprobs,
            ref_logprobs=ref_logprobs,
            advantages=advantages * has_advantage,
            support=sampled.support,
        )


def _count(parts: Sequence[Scored]) -> int:
    return sum(len(part.prompts) for part in parts)


def with_support(
    policy: Policy, sampled: Sampled, sampling: Sampling, context: StepContext
) -> tuple[Sampled, dict[str, float]]:
    """Completions of truncated sampling with their `SamplingSupport`, where an engine drew them and does not return it.

    That takes a forward pass of the policy, divided over the processes; its seconds count as ``score``. The metric
    ``sampler/support_miss_rate`` is the fraction of the tokens that are not in the policy's own support and were added
    to it. Where there is nothing to do, the rows are returned as they are, and no metric.
    """
    is_truncated = sampling.truncated and sampling.temperature > 0
    if not context.sampler.is_engine or not is_truncated or sampled.support is not None:
        return sampled, {}
    ranks = context.ranks
    with context.clock("score"):
        batches, idle = policy.local_microbatches(sampled, context.microbatch_tokens, ranks)
        found = [(rows, policy.support(sampled[rows], sampling)) for rows in batches]
        found = found[: len(found) - idle]
        local = [(rows.to(_CPU), one.support.to(_CPU), int(one.outside.sum())) for rows, one in found]
        parts = list(chain.from_iterable(ranks.gather(local)))
    order = torch.cat([rows for rows, _, _ in parts]).argsort()
    support = SamplingSupport.concatenate([one for _, one, _ in parts])[order].to(sampled.mask.device)
    outside = sum(count for _, _, count in parts) / int(sampled.mask.sum())
    return replace(sampled, support=support), {"sampler/support_miss_rate": outside}


def sampled_metrics(scored: Scored) -> dict[str, Tensor]:
    """Metrics of all sampled completions, also of those that are not trained on."""
    rewards = scored.rewards["total"].view(len(scored.prompts), -1)  # [B] -> [P, G]
    right = scored.right.view_as(rewards).float().mean(-1)
    lengths = scored.sampled.mask.sum(-1).float()
    metrics = {f"reward/{name}": values.nanmean() for name, values in scored.rewards.items()}
    for source, groups in by_source(scored.prompts).items():
        metrics[f"reward/{source}/total"] = rewards[groups].nanmean()
    metrics |= {
        "reward/std": replace_nan(rewards).std(-1).mean(),
        "group/all_right": (right == 1).float().mean(),
        "group/all_wrong": (right == 0).float().mean(),
        "group/mixed": ((right > 0) & (right < 1)).float().mean(),
        "completion/length_mean": lengths.mean(),
        "completion/length_max": lengths.max(),
        "completion/truncated_fraction": 1 - torch.tensor(scored.sampled.finished).float().mean(),
    }
    support = scored.sampled.support
    if support is not None and len(support.ids):
        sizes = support.sizes[support.sizes > 0].float()
        metrics["completion/set_size_mean"] = sizes.mean()
        metrics["completion/set_full_fraction"] = (sizes >= MAX_SUPPORT).float().mean()
    if scored.sampled.turns is not None:
        turns = torch.tensor([len(texts) for texts in scored.sampled.turns], dtype=torch.float)
        completion_mask = scored.sampled.mask
        replied = scored.sampled.attention_mask[:, -completion_mask.shape[1] :] & ~completion_mask
        metrics["episode/turns"], metrics["episode/turns_max"] = turns.mean(), turns.max()
        metrics["episode/reply_tokens"] = replied.sum(-1).float().mean()
    return metrics


def advantage_metrics(advantages: Tensor) -> dict[str, Tensor]:
    """Mean and deviation of advantages [B]; a mean that is 0 but for rounding, below 1e-6 of the deviation, is 0."""
    mean, deviation = advantages.mean(), advantages.std()
    is_noise = mean.abs() < _ROUNDING * deviation
    return {"advantage/mean": torch.where(is_noise, 0.0, mean), "advantage/std": deviation}


def token_metrics(scored: Scored, ref_logprobs: Tensor, *, has_reference: bool) -> dict[str, Tensor]:
    """Metrics of the tokens that are trained on, under the policy that sampled them."""
    sampled = scored.sampled
    metrics = {"policy/entropy": sampled.entropy[sampled.mask].mean()}
    if has_reference:
        metrics["policy/kl_divergence"] = k3(sampled.logprobs, ref_logprobs)[sampled.mask].mean()
    return metrics


def mixed(outcomes: Tensor) -> Tensor:
    """[P] (bool) the groups whose outcomes differ: in the others every advantage is zero.

    The filter of DAPO's dynamic sampling, arXiv:2503.14476, section 3.2. It sees the outcome reward as its function
    gave it, never the clipped total: a length bonus would make every group look as if it taught something.

    Args:
        outcomes: [P, G] NaN where the outcome reward does not apply.
    """
    highest = outcomes.nan_to_num(-torch.inf).amax(-1)
    lowest = outcomes.nan_to_num(torch.inf).amin(-1)
    return highest > lowest


def max_variance(rewards: Tensor, *, size: int) -> Tensor:
    """The ``size`` completions of each group whose rewards vary most: some of the highest and some of the lowest.

    Max-variance down-sampling of PODS, arXiv:2504.13818, Algorithm 2: of all splits into highest and lowest the best.

    Args:
        rewards: [P, G]; NaN counts as the group's mean.
        size: How many are kept, from 2 to G.

    Returns:
        [P, size] indices into each group, increasing.
    """
    group_size = rewards.shape[-1]
    known = replace_nan(rewards)
    order = known.sort(dim=-1, stable=True).indices
    splits = torch.stack(
        [torch.cat([order[:, :low], order[:, group_size - (size - low) :]], -1) for low in range(1, size)]
    )  # [size - 1, P, size]: each has the lowest and the highest
    variances = known.expand(len(splits), -1, -1).gather(-1, splits).var(-1, correction=0)
    chosen: Tensor = splits[variances.argmax(0), torch.arange(len(rewards))]
    return chosen.sort(-1).values


def top_entropy_mask(entropy: Tensor, mask: Tensor, *, fraction: float) -> Tensor:
    """[B, T] (bool) the fraction, in (0, 1], of a rollout's tokens that have the highest entropy [B, T].

    There a completion could have gone another way: arXiv:2506.01939, section 5.
    """
    values = entropy[mask]
    if not len(values):
        return mask
    least = values.topk(max(1, round(fraction * len(values)))).values[-1]
    return mask & (entropy >= least)
