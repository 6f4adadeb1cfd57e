"""One optimizer step: gradients added up over micro-batches and processes, clipped, applied."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.loss import PolicyLoss, corrections, mismatch
from grpo_lightning.policy import Policy
from grpo_lightning.policy.base import is_adapted
from grpo_lightning.types import Rollout

log = logging.getLogger(__name__)


class Backward(Protocol):
    """Adds the gradient of a micro-batch's loss; ``last`` is true for the last one."""

    def __call__(self, loss: Tensor, *, last: bool) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Update:
    """Results of one optimizer step."""

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
        on_policy_step: Whether this is the only step on rows that the present policy has sampled: then its own
            log-probabilities are the old ones, and the ratio is exactly 1.
        is_first: Whether this is the first step on such rows: the old log-probabilities then differ from the policy's
            own by the sampler alone, and the mismatch is measured.
        ranks: The processes.
        backward: Called once per micro-batch, as often in every process.
    """
    weights = loss.weights(minibatch.mask)  # of the whole minibatch, then sliced
    included = loss.has_gradient(minibatch) if skip_dead else minibatch.mask.any(-1)
    included[0] |= not included.any()  # there has to be one row, whose gradient is then zero
    numbers = included.nonzero().flatten()
    minibatch, weights = minibatch[numbers], weights[included]
    parts: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    ratio = [weights.new_zeros(0)]
    microbatches: list[tuple[Tensor, Tensor]] = []
    indices, idle = policy.local_microbatches(minibatch, microbatch_tokens, ranks)
    for number, index in enumerate(indices):
        is_real = number < len(indices) - idle  # the others keep step with processes that have more
        rows, row_weights = minibatch[index], weights[index] * is_real
        logprobs, entropy = policy.logprobs_and_entropy(
            rows,
            temperature=temperature,
            entropy=loss.entropy_coef != 0,
            loss_gradient=loss.gradient(rows, row_weights, on_policy=on_policy_step),
        )
        log_ratio = logprobs.detach() - rows.old_logprobs  # [b, T] to the sampler
        factor = loss.correct(log_ratio, rows.mask, on_policy=on_policy_step)
        statistics = mismatch(log_ratio, rows.mask) if is_first else {}
        if loss.correction is not None:
            statistics |= corrections(factor, rows.mask)
        if on_policy_step:
            rows = rows.on_policy(logprobs)
        value, part = loss(logprobs, entropy, rows, row_weights * factor)
        backward(value, last=number == len(indices) - 1)
        _add_up(parts, part)
        _add_up(sums, {name: one * is_real for name, one in (loss.statistics(logprobs, rows) | statistics).items()})
        if is_real:
            ratio.append((logprobs.detach() - rows.old_logprobs)[rows.mask].exp())
            microbatches.append((numbers[index], logprobs.detach()))
    metrics = loss.metrics(ranks.sum(parts), ranks.sum(sums))
    return Update(metrics=metrics, ratio=torch.cat(ratio), flops=policy.flops(minibatch), microbatches=microbatches)


def _add_up(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
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
    metrics: dict[str, Tensor] = {}
    for name in updates[0].metrics:
        values = torch.stack([update.metrics[name].cpu() for update in updates if name in update.metrics])
        metrics[name] = values.max() if name.endswith(("_max", "/max")) else values.mean()
    return metrics


def trained_weights(policy: nn.Module) -> list[nn.Parameter]:
    """The weights that are trained.

    Raises:
        ValueError: They are of 16 bits, or quantized without an adapter.
    """
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    if coarse := {str(weight.dtype).removeprefix("torch.") for weight in trained} - {"float32", "float64"}:
        raise ValueError(
            f"policy: the trained weights are {', '.join(sorted(coarse))}, in which small updates vanish; use float32, "
            "with trainer.precision=bf16-mixed for speed"
        )
    is_quantized = any(not weight.is_floating_point() for weight in policy.parameters())
    if is_quantized and not is_adapted(getattr(policy, "model", policy)):
        raise ValueError(
            "policy: quantized weights cannot be trained; add an adapter, such as "
            "policy.adapter={r: 16, lora_alpha: 32}"
        )
    return trained


class GradientStep:
    """Clips the gradient and steps; a step whose gradient is not finite is skipped and counted.

    Args:
        max_grad_norm: Clip threshold of the gradient's L2 norm.
        max_skipped: Optimizer steps in a row that may be skipped because their gradient is not finite.
    """

    def __init__(self, *, max_grad_norm: float, max_skipped: int) -> None:
        self.max_grad_norm = max_grad_norm
        self.max_skipped = max_skipped
        self.skipped = 0
        self.skipped_in_a_row = 0

    def apply(self, optimizer: Optimizer, *, step: int) -> float:
        """Clip and step, then drop the gradients.

        Args:
            optimizer: Its parameters have gradients.
            step: Its number, for messages.

        Returns:
            The gradient's norm before clipping.

        Raises:
            FloatingPointError: More than ``max_skipped`` steps in a row were skipped.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        total: Any = nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if norm < float("inf"):
            optimizer.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            log.warning("step %d: gradient norm %s, optimizer step skipped", step, norm)
        optimizer.zero_grad()
        if self.skipped_in_a_row > self.max_skipped:
            raise FloatingPointError(
                f"step {step}: {self.skipped_in_a_row} optimizer steps in a row had a gradient "
                f"that is not finite (module.max_skipped={self.max_skipped}): lower optimizer.lr or check the rewards"
            )
        return norm
