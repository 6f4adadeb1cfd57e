"""The sets of tokens that completions of an engine were drawn from, as the policy that is trained would have them."""

from dataclasses import replace
from itertools import chain

import torch

from grpo_lightning.batch import Sampled, Sampling
from grpo_lightning.batch.rows import Kept
from grpo_lightning.policy import Policy
from grpo_lightning.rollout.step_context import StepContext

_CPU = torch.device("cpu")


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
        The rows with ``kept``; and the metric ``sampler/outside``, the fraction of the tokens that are not in the
        policy's own set and were added to it. Where there is nothing to do, the rows as they are, and no metric.
    """
    if not policy.has_engine or not sampling.truncated or sampling.temperature == 0 or sampled.kept is not None:
        return sampled, {}
    ranks = context.ranks
    with context.clock("score"):
        batches, idle = policy.own_microbatches(sampled, microbatch_tokens, ranks)
        found = [(rows, policy.kept(sampled[rows], sampling)) for rows in batches]
        own = [(rows.to(_CPU), one.kept.to(_CPU), int(one.outside.sum())) for rows, one in found[: len(found) - idle]]
        parts = list(chain.from_iterable(ranks.gather(own)))
    order = torch.cat([rows for rows, _, _ in parts]).argsort()
    kept = Kept.concatenate([sets for _, sets, _ in parts])[order].to(sampled.mask.device)
    outside = sum(count for _, _, count in parts) / int(sampled.mask.sum())
    return replace(sampled, kept=kept), {"sampler/outside": outside}
