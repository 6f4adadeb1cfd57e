"""One rollout: prompts in, completions judged against one another out. Runs without a Trainer."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.environment import Environment
from grpo_lightning.loss import k1
from grpo_lightning.policy import Policy
from grpo_lightning.reward import RewardSpec
from grpo_lightning.rollout.judge import Judge
from grpo_lightning.rollout.metrics import advantage_metrics, sampled_metrics, token_metrics
from grpo_lightning.rollout.selection import top_entropy
from grpo_lightning.rollout.step_context import StepContext
from grpo_lightning.rollout.tries import GroupFilter, Tries
from grpo_lightning.types import Prompts, Rollout, Sampled, Sampling, Scored

log = logging.getLogger(__name__)

_COMPARED = ("rewards", "scores", "weights", "steps")
"""What an advantage may name."""
Advantage = Callable[..., Tensor]
"""What it names of rewards [P, G], scores [K, P, G], weights [K] and steps [P, G, T] -> [P, G] or [P, G, T]."""
Downsample = Callable[[Tensor], Tensor]
"""Rewards [P, G] -> indices [P, n] of the completions to train on."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """One rollout and what there is to say about it."""

    rollout: Rollout
    scored: Scored
    """The rows of ``rollout``."""
    advantages: Tensor
    """[B] mean over each row's tokens."""
    metrics: Mapping[str, Tensor]
    carried: Scored | None
    """Groups that are not trained on yet; for the next rollout."""
    num_tokens: int
    """Sampled for it, whether or not they are trained on."""
    flops: float
    """Floating-point operations that sampling and the reference take at least, see ``Policy.flops``."""
    is_fresh: bool
    """Whether all rows were sampled by the policy as it is now."""


@dataclass(frozen=True, kw_only=True)
class Collector:
    """One rollout: ``group_size`` completions per prompt, judged against one another.

    The fields are the keys of conf/rollout. Numbers may vary with the step, see `grpo_lightning.schedule`.
    """

    reward: Mapping[str, RewardSpec]
    """Name -> function and weight."""
    environment: Environment | None = None
    """Whom the model talks to; None: completions have one turn."""
    advantage: Advantage
    outcome: str | None
    """The reward that says whether a completion is right, as in `Judge`."""
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
        for one in inspect.signature(self.advantage).parameters.values():
            is_needed = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            if is_needed and one.name not in _COMPARED:
                raise ValueError(f"advantage: its parameter {one.name!r} is none of {', '.join(_COMPARED)}")

    @property
    def sampling(self) -> Sampling:
        """How completions are drawn."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_new_tokens=self.max_new_tokens,
            stop=tuple(self.stop),
            kv_cache_gib=self.kv_cache_gib,
        )

    @property
    def judge(self) -> Judge:
        """What samples completions and scores them."""
        return Judge(self.reward, self.outcome, self.threshold, self.environment)

    @torch.no_grad()
    def collect(
        self,
        policy: Policy,
        reference: Policy | None,
        prompts: Prompts,
        *,
        microbatch_tokens: int,
        context: StepContext,
        carried: Scored | None = None,
    ) -> Collected:
        """Sample, score, compare.

        Args:
            policy: Samples.
            reference: Gives log-probabilities of the samples, once; None for no KL term.
            prompts: [P * max_tries] those of each try.
            microbatch_tokens: Most tokens in one forward pass that scores.
            context: The step's seed and what watches over it. All its processes return the whole rollout.
            carried: What the last rollout has left, which comes first; its old log-probabilities are those of the
                policies that sampled it. Left out where it does not fit any more, see `Tries`.

        Returns:
            A rollout of P prompts, whose old log-probabilities are the sampler's.
        """
        tries = Tries(self.judge, self.group_filter, self.max_tries, microbatch_tokens)
        found = tries.choose(
            policy, prompts, carried, group_size=self.group_size, sampling=self.sampling, context=context
        )
        chosen = found.scored
        if self.downsample is not None:
            rewards = chosen.rewards["total"].view(len(chosen.prompts), -1)
            inside = self.downsample(rewards)
            chosen = chosen.rows((torch.arange(len(rewards)).unsqueeze(-1) * rewards.shape[-1] + inside).flatten())
        with context.clock("score"):
            ref_logprobs = self._ref_logprobs(reference, chosen.sampled, microbatch_tokens, context)
        rollout = self.compared(chosen, ref_logprobs)
        advantages = rollout.mean_advantages
        metrics = sampled_metrics(found.judged)
        metrics |= token_metrics(chosen, ref_logprobs, has_reference=reference is not None)
        metrics |= advantage_metrics(advantages) | dict(found.metrics)
        return Collected(
            rollout=rollout,
            scored=chosen,
            advantages=advantages,
            metrics=metrics,
            carried=found.left_over,
            num_tokens=found.num_tokens,
            flops=found.flops + (reference.flops(chosen.sampled) if reference else 0.0),
            is_fresh=found.is_fresh,
        )

    def _ref_logprobs(
        self, reference: Policy | None, sampled: Sampled, microbatch_tokens: int, context: StepContext
    ) -> Tensor:
        """[B, T] under the reference, which is not truncated; each process does its portion and gathers the others'."""
        logprobs = torch.zeros_like(sampled.logprobs)
        if reference is None:
            return logprobs
        sampled = sampled.without_support
        parts, _ = reference.local_microbatches(sampled, microbatch_tokens, context.ranks)
        with reference.on_device(logprobs.device):
            for rows in parts:
                logprobs[rows] = reference.logprobs(sampled[rows], temperature=self.temperature)
        if context.ranks.size == 1:
            return logprobs
        own = torch.cat(parts).unique()
        for rows, values in context.ranks.gather((own.cpu(), logprobs[own].cpu())):
            logprobs[rows.to(logprobs.device)] = values.to(logprobs.device)
        return logprobs

    def compared(self, scored: Scored, ref_logprobs: Tensor) -> Rollout:
        """The rows of a rollout with their advantages over one another.

        Args:
            scored: The completions that are trained on.
            ref_logprobs: [B, T] of them under the reference; zeros where none is used.
        """
        sampled, groups = scored.sampled, (len(scored.prompts), scored.group_size)
        total = scored.rewards["total"]
        if unscored := int(total.isnan().sum()):
            log.warning("%d completions got None from every reward: their advantage is 0", unscored)
        if self.kl_penalty:
            total = total - self.kl_penalty * (k1(sampled.logprobs, ref_logprobs) * sampled.mask).sum(-1).cpu()
        available = {
            "rewards": total.view(groups),  # [B] -> [P, G]
            "scores": scored.scores.T.reshape(-1, *groups),  # [B, K] -> [K, P, G]
            "weights": self.judge.weights,
            "steps": scored.steps.view(*groups, -1),  # [B, T] -> [P, G, T]
        }
        named = [name for name in inspect.signature(self.advantage).parameters if name in available]
        advantages = self.advantage(**{name: available[name] for name in named})
        mask = sampled.mask
        _check_advantages(advantages, groups, mask.shape[1])
        if self.mask_truncated:
            mask = mask & torch.tensor(sampled.finished, device=mask.device).unsqueeze(-1)
        teaching = mask
        if self.top_entropy < 1:
            teaching = top_entropy(sampled.entropy, mask, fraction=self.top_entropy)
        return Rollout(
            ids=sampled.ids,
            attention_mask=sampled.attention_mask,
            mask=mask,
            old_logprobs=sampled.logprobs,
            ref_logprobs=ref_logprobs,
            advantages=advantages.to(mask.device).reshape(len(mask), -1)
            * teaching,  # [P, G] -> [B, 1], or [P, G, T] -> [B, T]
            support=sampled.support,
        )


def _check_advantages(advantages: Any, groups: tuple[int, int], length: int) -> None:
    """Refuse what an advantage function has returned and would be taken for other completions' numbers.

    Args:
        advantages: [P, G] or [P, G, T], if it is right.
        groups: P and G.
        length: T.

    Raises:
        ValueError: It is no such tensor.
    """
    found = tuple(advantages.shape) if isinstance(advantages, Tensor) else type(advantages).__name__
    if found not in (groups, (*groups, length)):
        raise ValueError(f"advantage: returned {found}; allowed are tensors of shape {groups} or {(*groups, length)}")
