"""The gradient of one optimizer step, added up over micro-batches and processes."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_lightning.batch import Rollout
from grpo_lightning.loss import PolicyLoss
from grpo_lightning.policy import Policy
from grpo_lightning.ranks import Ranks
from grpo_lightning.rollout import on_policy


class Backward(Protocol):
    """Adds the gradient of a micro-batch's loss; ``last`` is true for the last one."""

    def __call__(self, loss: Tensor, *, last: bool) -> None: ...


def accumulate(
    policy: Policy,
    loss: PolicyLoss,
    minibatch: Rollout,
    *,
    temperature: float,
    microbatch_tokens: int,
    skip_dead: bool,
    on_policy_step: bool,
    ranks: Ranks,
    backward: Backward,
) -> dict[str, Tensor]:
    """Backward passes over this process's share of a minibatch; the strategy adds the gradients up over processes.

    Args:
        policy: Trained.
        loss: Of the step.
        minibatch: All rows of the optimizer step, the same in all processes.
        temperature: At which they were sampled.
        microbatch_tokens: Most tokens in one forward pass.
        skip_dead: Whether rows that cannot have a gradient are left out.
        on_policy_step: Whether it is the only step on rows that the policy as it is has sampled.
        ranks: The processes.
        backward: Called once per micro-batch, as often in every process.

    Returns:
        Metrics over all processes; "ratio" of this process's tokens, and the "work" of one forward pass of all.
    """
    weights = loss.weights(minibatch.mask, minibatch.mask.sum().float())
    teaching = loss.teaches(minibatch) if skip_dead else minibatch.mask.any(-1)
    teaching[0] |= not teaching.any()  # a gradient of zero, but there
    taught, weights = minibatch[teaching.nonzero().flatten()], weights[teaching]
    parts: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    ratio = [weights.new_zeros(0)]
    indices, idle = policy.shares(taught, microbatch_tokens, ranks)
    for number, index in enumerate(indices):
        counts = number < len(indices) - idle
        rows, share = taught[index], weights[index] * counts
        slope = loss.slope(rows, share, on_policy=on_policy_step)
        bonus = loss.entropy_coef != 0
        logprobs, entropy = policy.score(rows, temperature=temperature, entropy=bonus, slope=slope)
        if on_policy_step:
            rows = on_policy(rows, logprobs)
        value, part = loss(logprobs, entropy, rows, share)
        backward(value, last=number == len(indices) - 1)
        add_up(parts, part)
        add_up(sums, {name: one * counts for name, one in loss.statistics(logprobs, rows).items()})
        if counts:
            ratio.append((logprobs.detach() - rows.old_logprobs)[rows.mask].exp())
    told: dict[str, Any] = loss.metrics(ranks.add_up(parts), ranks.add_up(sums))
    return told | {"ratio": torch.cat(ratio), "work": torch.tensor(policy.work(taught))}


def add_up(known: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add ``more`` to the sums in ``known``, by name; of ``*_max`` keep the larger."""
    for name, value in more.items():
        before = known.get(name)
        if before is None:
            known[name] = value
        else:
            known[name] = torch.maximum(before, value) if name.endswith("_max") else before + value


def mean_of_updates(updates: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Every metric averaged over the optimizer steps of a rollout; of ``*_max`` the largest."""
    stacked = {name: torch.stack([update[name].cpu() for update in updates]) for name in updates[0]}
    return {name: values.max() if name.endswith("_max") else values.mean() for name, values in stacked.items()}
