"""Collect a rollout: sample, score, compare. Runs without a Trainer."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.environment import Environment
from grpo_lightning.loss import k1
from grpo_lightning.policy import Policy
from grpo_lightning.reward import RewardSpec
from grpo_lightning.rollout.dynamic_sampling import GroupFilter, sample_groups
from grpo_lightning.rollout.metrics import advantage_metrics, sampled_metrics, token_metrics
from grpo_lightning.rollout.scoring import Scorer, StepContext
from grpo_lightning.rollout.selection import top_entropy
from grpo_lightning.types import Prompts, Rollout, Sampled, Sampling, Scored

log = logging.getLogger(__name__)

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

    @property
    def advantages(self) -> Tensor:
        """[B] mean over each row's tokens."""
        return self.rollout.mean_advantages


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Collects rollouts: ``group_size`` completions per prompt, compared with one another.

    The fields are the keys of conf/rollout. Numbers may vary with the step, see `grpo_lightning.schedule`.
    """

    reward: Mapping[str, RewardSpec]
    """Name -> function and weight."""
    environment: Environment | None = None
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
            context: The step's seed, sampler, clock and processes. All processes return the whole rollout.
            carried: Surplus groups of the last rollout, which come first; their old log-probabilities are those of the
                policy that sampled them. Dropped where they do not fit any more, see `sample_groups`.

        Returns:
            A rollout of P prompts, whose old log-probabilities are the sampler's.
        """
        groups = sample_groups(
            self.scorer,
            policy,
            prompts,
            group_size=self.group_size,
            sampling=self.sampling,
            group_filter=self.group_filter,
            max_tries=self.max_tries,
            carried=carried,
            microbatch_tokens=microbatch_tokens,
            context=context,
        )
        scored = groups.scored
        if self.downsample is not None:
            rewards = scored.rewards["total"].view(len(scored.prompts), -1)  # [B] -> [P, G]
            members = self.downsample(rewards)  # [P, n]
            scored = scored.rows((torch.arange(len(rewards)).unsqueeze(-1) * self.group_size + members).flatten())
        with context.clock("score"):
            ref_logprobs = self.ref_logprobs(reference, scored.sampled, microbatch_tokens, context)
        rollout = self.compare(scored, ref_logprobs)
        metrics = sampled_metrics(groups.sampled)
        metrics |= token_metrics(scored, ref_logprobs, has_reference=reference is not None)
        metrics |= advantage_metrics(rollout.mean_advantages) | dict(groups.metrics)
        passes = 2 if "sampler/support_miss_rate" in metrics else 1  # the support of an engine's samples takes one, too
        flops = policy.flops(groups.sampled.sampled) * passes
        return Collected(
            rollout=rollout,
            scored=scored,
            metrics=metrics,
            carried=groups.surplus,
            num_tokens=int(groups.sampled.sampled.mask.sum()),
            flops=flops + (reference.flops(scored.sampled) if reference else 0.0),
            is_fresh=groups.is_fresh,
        )

    def ref_logprobs(
        self, reference: Policy | None, sampled: Sampled, microbatch_tokens: int, context: StepContext
    ) -> Tensor:
        """[B, T] under the reference, of the whole vocabulary; the work is divided over the processes.

        Zeros without a reference.
        """
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
        local = torch.cat(parts).unique()
        for rows, values in context.ranks.gather((local.cpu(), logprobs[local].cpu())):
            logprobs[rows.to(logprobs.device)] = values.to(logprobs.device)
        return logprobs

    def compare(self, scored: Scored, ref_logprobs: Tensor) -> Rollout:
        """Compute advantages.

        Args:
            scored: The completions that are trained on.
            ref_logprobs: [B, T] of them under the reference; zeros where none is used.

        Raises:
            ValueError: The advantage function returns no tensor of a right shape.
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
            has_advantage = top_entropy(sampled.entropy, mask, fraction=self.top_entropy)
        advantages = advantages.to(mask.device).reshape(len(mask), -1)  # [P, G] -> [B, 1], or [P, G, T] -> [B, T]
        return Rollout(
            ids=sampled.ids,
            attention_mask=sampled.attention_mask,
            mask=mask,
            old_logprobs=sampled.logprobs,
            ref_logprobs=ref_logprobs,
            advantages=advantages * has_advantage,
            support=sampled.support,
        )
