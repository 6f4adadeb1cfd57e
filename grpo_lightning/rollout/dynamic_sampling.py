"""Dynamic sampling: which groups a rollout trains on; those that a filter refuses are replaced by further prompts."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from grpo_lightning.policy import Policy
from grpo_lightning.rollout.scoring import Scorer, StepContext
from grpo_lightning.types import Prompts, Sampled, Sampling, SamplingSupport, Scored

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")

GroupFilter = Callable[[Tensor], Tensor]
"""Outcome rewards [P, G] -> which groups to train on, [P] (bool)."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups that a rollout trains on, and those left for the next one."""

    scored: Scored
    """P groups."""
    sampled: Scored
    """All groups that were sampled and scored for it."""
    surplus: Scored | None
    """Groups beyond P that passed the filter, for the next rollout."""
    metrics: Mapping[str, Tensor]
    """Of the filter, and the failures of rewards."""
    is_fresh: bool
    """Whether all of ``scored`` was sampled by the policy as it is now."""


def sample_groups(
    scorer: Scorer,
    policy: Policy,
    prompts: Prompts,
    *,
    group_size: int,
    sampling: Sampling,
    group_filter: GroupFilter | None,
    max_tries: int,
    carried: Scored | None,
    microbatch_tokens: int,
    context: StepContext,
) -> Groups:
    """P groups: those carried over from the last rollout first, then those that pass the filter.

    DAPO's dynamic sampling, arXiv:2503.14476, section 3.2.

    Args:
        scorer: Generates and scores.
        policy: Generates.
        prompts: [P * max_tries] those of each try.
        group_size: Completions per prompt, G.
        sampling: How tokens are drawn.
        group_filter: Says by the outcome rewards which groups to train on; None for all.
        max_tries: How often to sample at most. If too few groups pass, refused ones fill up the rollout.
        carried: Surplus groups of the last rollout; dropped if they have another size or other rewards.
        microbatch_tokens: Most tokens in one forward pass of the policy.
        context: The step's seed, sampler, clock and processes.
    """
    if carried and (carried.group_size != group_size or carried.rewards.keys() != {*scorer.rewards, "total"}):
        log.warning("%d groups of the last rollout have another size or other rewards: left out", len(carried.prompts))
        carried = None
    wanted = len(prompts) // max_tries
    fresh: list[Scored] = []
    passed: list[Scored] = [carried] if carried else []
    refused: list[Scored] = []
    metrics_by_try: list[dict[str, float]] = []
    # at least once, though the last rollout may have been of more prompts and have left enough over
    while not fresh or (_count(passed) < wanted and len(fresh) < max_tries):
        scored, metrics = scorer.generate_and_score(
            policy,
            prompts[range(len(fresh) * wanted, (len(fresh) + 1) * wanted)],
            group_size=group_size,
            sampling=sampling,
            context=replace(context, seed=context.seed + len(fresh)),
        )
        sampled, support_metrics = with_support(
            policy, scored.sampled, sampling, microbatch_tokens=microbatch_tokens, context=context
        )
        scored = replace(scored, sampled=sampled)
        passes = [True] * wanted
        if group_filter is not None:
            passes = group_filter(scored.rewards[scorer.outcome_name].view(wanted, -1)).tolist()
        fresh.append(scored)
        passed.append(scored.groups([group for group in range(wanted) if passes[group]]))
        refused.append(scored.groups([group for group in range(wanted) if not passes[group]]))
        metrics_by_try.append(metrics | support_metrics)
    metrics_ = {name: torch.tensor([one[name] for one in metrics_by_try]).mean() for name in metrics_by_try[0]}
    if group_filter is not None:
        metrics_ |= {
            "group/tries": torch.tensor(float(len(fresh))),
            "group/kept": torch.tensor(_count(passed) / (len(fresh) * wanted)),
            "group/carried": torch.tensor(len(carried.prompts) / wanted if carried else 0.0),
        }
    if (missing := wanted - _count(passed)) > 0:
        log.warning(
            "%d of %d groups passed rollout.group_filter after %d tries (rollout.max_tries): filled up with others, "
            "which have no gradient",
            wanted - missing,
            wanted,
            max_tries,
        )
        filling = Scored.concatenate([part for part in refused if len(part.prompts)])
        passed.append(filling.groups(range(missing)))
    groups = Scored.concatenate([part for part in passed if len(part.prompts)])
    surplus = None
    if len(groups.prompts) > wanted:
        groups, surplus = groups.groups(range(wanted)), groups.groups(range(wanted, len(groups.prompts)))
    return Groups(
        scored=groups,
        sampled=Scored.concatenate(fresh),
        surplus=surplus,
        metrics=metrics_,
        is_fresh=carried is None,
    )


def _count(parts: Sequence[Scored]) -> int:
    return sum(len(part.prompts) for part in parts)


def with_support(
    policy: Policy, sampled: Sampled, sampling: Sampling, *, microbatch_tokens: int, context: StepContext
) -> tuple[Sampled, dict[str, float]]:
    """Completions of truncated sampling with their `SamplingSupport`, where an engine drew them and does not return it.

    That takes a forward pass of the policy, divided over the processes; its seconds count as ``score``.

    Args:
        policy: As it was when they were drawn.
        sampled: The same rows in all processes.
        sampling: How they were drawn.
        microbatch_tokens: Most tokens in one forward pass.
        context: The processes and the clock.

    Returns:
        The rows with ``support``; and the metric ``sampler/support_miss_rate``, the fraction of the tokens that are
        not in the policy's own support and were added to it. Where there is nothing to do, the rows as they are, and
        no metric.
    """
    is_truncated = sampling.truncated and sampling.temperature > 0
    if not context.sampler.is_engine or not is_truncated or sampled.support is not None:
        return sampled, {}
    ranks = context.ranks
    with context.clock("score"):
        batches, idle = policy.local_microbatches(sampled, microbatch_tokens, ranks)
        found = [(rows, policy.support(sampled[rows], sampling)) for rows in batches]
        found = found[: len(found) - idle]
        local = [(rows.to(_CPU), one.support.to(_CPU), int(one.outside.sum())) for rows, one in found]
        parts = list(chain.from_iterable(ranks.gather(local)))
    order = torch.cat([rows for rows, _, _ in parts]).argsort()
    support = SamplingSupport.concatenate([one for _, one, _ in parts])[order].to(sampled.mask.device)
    outside = sum(count for _, _, count in parts) / int(sampled.mask.sum())
    return replace(sampled, support=support), {"sampler/support_miss_rate": outside}
