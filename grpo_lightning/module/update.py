"""The gradient of one optimizer step, added up over micro-batches and processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.loss import PolicyLoss
from grpo_lightning.loss.correction import corrections, mismatch
from grpo_lightning.policy import Policy
from grpo_lightning.rollout.selection import on_policy
from grpo_lightning.types import Rollout


class Backward(Protocol):
    """Adds the gradient of a micro-batch's loss; ``last`` is true for the last one."""

    def __call__(self, loss: Tensor, *, last: bool) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Update:
    """What there is to say about one optimizer step."""

    metrics: dict[str, Tensor]
    """Scalars by name, over all processes."""
    ratio: Tensor
    """[n] to the policy that sampled, of this process's tokens."""
    flops: float
    """Floating-point operations of one forward pass of all rows, see ``Policy.flops``."""
    microbatches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of this process: the rows of each in the minibatch, [b], and their log-probabilities, [b, T]."""


def accumulate(
    policy: Policy,
    loss: PolicyLoss,
    minibatch: Rollout,
    *,
    temperature: float,
    microbatch_tokens: int,
    skip_dead: bool,
    on_policy_step: bool,
    is_first: bool,
    ranks: Ranks,
    backward: Backward,
) -> Update:
    """Backward passes over this process's part of a minibatch; the strategy adds the gradients up over processes.

    Args:
        policy: Trained.
        loss: The step's.
        minibatch: All rows of the optimizer step, the same in all processes.
        temperature: At which they were sampled.
        microbatch_tokens: Most tokens in one forward pass.
        skip_dead: Whether rows that cannot have a gradient are left out.
        on_policy_step: Whether it is the only step on rows that the policy as it is has sampled.
        is_first: Whether it is the first step on such rows: what separates old log-probabilities from the policy's own
            is then the sampler alone, and is measured.
        ranks: The processes.
        backward: Called once per micro-batch, as often in every process.
    """
    weights = loss.weights(minibatch.mask)
    teaching = loss.teaches(minibatch) if skip_dead else minibatch.mask.any(-1)
    teaching[0] |= not teaching.any()  # one row whose gradient is zero, since there has to be one
    numbers = teaching.nonzero().flatten()
    taught, weights = minibatch[numbers], weights[teaching]
    parts: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    ratio = [weights.new_zeros(0)]
    microbatches: list[tuple[Tensor, Tensor]] = []
    indices, idle = policy.local_microbatches(taught, microbatch_tokens, ranks)
    for number, index in enumerate(indices):
        is_real = number < len(indices) - idle  # the others keep step with processes that have more
        rows, row_weights = taught[index], weights[index] * is_real
        logprobs, entropy = policy.logprobs_and_entropy(
            rows,
            temperature=temperature,
            entropy=loss.entropy_coef != 0,
            loss_gradient=loss.gradient(rows, row_weights, on_policy=on_policy_step),
        )
        log_ratio = logprobs.detach() - rows.old_logprobs  # [b, T] to the sampler
        factor = loss.correct(log_ratio, rows.mask, on_policy=on_policy_step)
        seen = mismatch(log_ratio, rows.mask) if is_first else {}
        if loss.correction is not None:
            seen |= corrections(factor, rows.mask)
        if on_policy_step:
            rows = on_policy(rows, logprobs)
        value, part = loss(logprobs, entropy, rows, row_weights * factor)
        backward(value, last=number == len(indices) - 1)
        add_up(parts, part)
        add_up(sums, {name: one * is_real for name, one in (loss.statistics(logprobs, rows) | seen).items()})
        if is_real:
            ratio.append((logprobs.detach() - rows.old_logprobs)[rows.mask].exp())
            microbatches.append((numbers[index], logprobs.detach()))
    metrics = loss.metrics(ranks.sum(parts), ranks.sum(sums))
    return Update(metrics=metrics, ratio=torch.cat(ratio), flops=policy.flops(taught), microbatches=microbatches)


def add_up(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add ``more`` to ``sums``, by name; of ``*_max`` keep the larger."""
    for name, value in more.items():
        before = sums.get(name)
        if before is None:
            sums[name] = value
        else:
            sums[name] = torch.maximum(before, value) if name.endswith("_max") else before + value


def mean_metrics(updates: Sequence[Update]) -> dict[str, Tensor]:
    """Every metric averaged over the optimizer steps of a rollout that have it; of maxima the largest.

    The first step has all metrics that any has.
    """
    stacked = {
        name: torch.stack([update.metrics[name].cpu() for update in updates if name in update.metrics])
        for name in updates[0].metrics
    }
    return {
        name: values.max() if name.endswith(("_max", "/max")) else values.mean() for name, values in stacked.items()
    }
