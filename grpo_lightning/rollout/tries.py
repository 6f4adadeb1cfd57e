"""Which groups a rollout trains on: all that it samples, or those that pass a filter, tried until there are enough."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from grpo_lightning.policy import Policy
from grpo_lightning.rollout.judge import Judge
from grpo_lightning.rollout.step_context import StepContext
from grpo_lightning.types import Prompts, Sampled, Sampling, SamplingSupport, Scored

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")

GroupFilter = Callable[[Tensor], Tensor]
"""Outcome rewards [P, G] -> which groups to train on, [P] (bool)."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The groups that a rollout trains on, and what it leaves to the next one."""

    scored: Scored
    """P groups."""
    judged: Scored
    """All groups that were sampled and scored for it."""
    left_over: Scored | None
    """For the next rollout."""
    metrics: Mapping[str, Tensor]
    """Of the choice, and the failures of rewards."""
    num_tokens: int
    """Sampled for it, whether or not they are trained on."""
    flops: float
    """Least floating-point operations of sampling, see ``Policy.flops``."""
    is_fresh: bool
    """Whether all of ``scored`` was sampled by the policy as it is now."""


@dataclass(frozen=True)
class Tries:
    """Samples whole groups, again and again until enough of them pass.

    Args:
        judge: Samples and scores.
        group_filter: Says by the outcome rewards which groups to train on; None for all.
        max_tries: How often to sample at most.
        microbatch_tokens: Most tokens in one forward pass of the policy.
    """

    judge: Judge
    group_filter: GroupFilter | None
    max_tries: int
    microbatch_tokens: int

    def choose(
        self,
        policy: Policy,
        prompts: Prompts,
        carried: Scored | None,
        *,
        group_size: int,
        sampling: Sampling,
        context: StepContext,
    ) -> Chosen:
        """P groups: those that are carried first, then those that pass.

        Args:
            policy: Samples.
            prompts: [P * max_tries] those of each try.
            carried: Groups that the last rollout had left over; left out if they have another size or other rewards.
            group_size: Completions per prompt.
            sampling: How tokens are drawn.
            context: The step's seed and what watches over it.
        """
        fresh: list[Scored] = []
        told: list[dict[str, float]] = []
        before = self._fitting(carried, group_size)
        kept = [before] if before else []
        wanted = len(prompts) // self.max_tries
        # at least once, though the last rollout may have been of more prompts and have left enough over
        while not fresh or (sum(len(part.prompts) for part in kept) < wanted and len(fresh) < self.max_tries):
            scored, own = self.judge.score(
                policy,
                prompts[range(len(fresh) * wanted, (len(fresh) + 1) * wanted)],
                group_size=group_size,
                sampling=sampling,
                context=replace(context, seed=context.seed + len(fresh)),
            )
            sampled, outside = with_sets(
                policy, scored.sampled, sampling, microbatch_tokens=self.microbatch_tokens, context=context
            )
            scored = replace(scored, sampled=sampled)
            fresh.append(scored)
            told.append(own | outside)
            kept.append(scored.groups(self._passing(scored)))
        chosen, left_over = self._chosen(kept, fresh, wanted)
        metrics = {name: torch.tensor([own[name] for own in told]).mean() for name in told[0]}
        if self.group_filter is not None:
            metrics |= {
                "group/tries": torch.tensor(float(len(fresh))),
                "group/kept": torch.tensor(sum(len(part.prompts) for part in kept) / (len(fresh) * wanted)),
                "group/carried": torch.tensor(len(before.prompts) / wanted if before else 0.0),
            }
        judged = Scored.concatenate(fresh)
        return Chosen(
            scored=chosen,
            judged=judged,
            left_over=left_over,
            metrics=metrics,
            num_tokens=int(judged.sampled.mask.sum()),
            flops=policy.flops(judged.sampled)
            * (2 if "sampler/support_miss_rate" in metrics else 1),  # sets take a pass, too
            is_fresh=before is None,
        )

    def _fitting(self, carried: Scored | None, group_size: int) -> Scored | None:
        """What is carried, if it was judged as it would be now."""
        if carried is None:
            return None
        if carried.group_size != group_size or carried.rewards.keys() != {*self.judge.rewards, "total"}:
            log.warning(
                "%d groups of the last rollout have another size or other rewards: left out", len(carried.prompts)
            )
            return None
        return carried

    def _passing(self, scored: Scored) -> list[int]:
        """Numbers of the groups that pass the filter."""
        if self.group_filter is None:
            return list(range(len(scored.prompts)))
        outcomes = scored.rewards[self.judge.outcome_name].view(len(scored.prompts), -1)
        passed: list[int] = self.group_filter(outcomes).nonzero().flatten().tolist()
        return passed

    def _chosen(self, kept: Sequence[Scored], fresh: Sequence[Scored], wanted: int) -> tuple[Scored, Scored | None]:
        """``wanted`` groups, and those beyond; filled up with groups that the filter refused if they are too few."""
        parts = [part for part in kept if len(part.prompts)]
        if (missing := wanted - sum(len(part.prompts) for part in parts)) > 0:
            everything = Scored.concatenate(fresh)
            passed = {number * wanted + group for number, part in enumerate(fresh) for group in self._passing(part)}
            refused = [group for group in range(len(everything.prompts)) if group not in passed]
            parts = [*parts, everything.groups(refused[:missing])]
            log.warning(
                "%d of %d groups passed rollout.group_filter after %d tries (rollout.max_tries): filled up with "
                "others, which teach nothing",
                wanted - missing,
                wanted,
                self.max_tries,
            )
        together = Scored.concatenate(parts)
        if len(together.prompts) == wanted:
            return together, None
        return together.groups(range(wanted)), together.groups(range(wanted, len(together.prompts)))


def with_sets(
    policy: Policy, sampled: Sampled, sampling: Sampling, *, microbatch_tokens: int, context: StepContext
) -> tuple[Sampled, dict[str, float]]:
    """Completions with their sets, where an engine has drawn them from sets that it does not tell.

    That takes a forward pass of the policy, of which every process does its portion; its seconds count as ``score``.

    Args:
        policy: As it was when they were drawn.
        sampled: The same rows in all processes.
        sampling: How they were drawn.
        microbatch_tokens: Most tokens in one forward pass.
        context: The processes and the clock.

    Returns:
        The rows with ``support``; and the metric ``sampler/support_miss_rate``, the fraction of the tokens that are
        not in the policy's own set and were added to it. Where there is nothing to do, the rows as they are, and
        no metric.
    """
    if (
        not context.sampler.is_engine
        or not sampling.truncated
        or sampling.temperature == 0
        or sampled.support is not None
    ):
        return sampled, {}
    ranks = context.ranks
    with context.clock("score"):
        batches, idle = policy.local_microbatches(sampled, microbatch_tokens, ranks)
        found = [(rows, policy.support(sampled[rows], sampling)) for rows in batches]
        own = [
            (rows.to(_CPU), one.support.to(_CPU), int(one.outside.sum())) for rows, one in found[: len(found) - idle]
        ]
        parts = list(chain.from_iterable(ranks.gather(own)))
    order = torch.cat([rows for rows, _, _ in parts]).argsort()
    support = SamplingSupport.concatenate([sets for _, sets, _ in parts])[order].to(sampled.mask.device)
    outside = sum(count for _, _, count in parts) / int(sampled.mask.sum())
    return replace(sampled, support=support), {"sampler/support_miss_rate": outside}
