"""One optimizer step, its gradient added up over micro-batches and processes; and the check of a first rollout."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.loss import PolicyLoss, corrections, mismatch
from grpo_lightning.policy import Policy
from grpo_lightning.policy.base import is_adapted
from grpo_lightning.types import Rollout, Sampling

log = logging.getLogger(__name__)

Backward = Callable[..., None]
"""(loss, last=): adds the gradient of a micro-batch's loss; ``last`` is true for the last one."""


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
        minibatch: All rows of the optimizer step, the same in all processes; sampled at ``temperature``.
        temperature: Of every log-probability.
        microbatch_tokens: Most tokens in one forward pass.
        skip_dead: Whether rows that cannot have a gradient are left out.
        on_policy_step: Whether this is the only step on rows that the present policy has sampled: then its own
            log-probabilities are the old ones, and the ratio is exactly 1.
        is_first: Whether this is the first step on such rows, so that old and own log-probabilities differ by the
            sampler alone, and the mismatch is measured.
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
            loss_gradient=loss.gradient_by_logprobs(rows, row_weights, on_policy=on_policy_step),
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
        before = sums.get(name, value.new_zeros(()))  # no maximum is negative
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
        ValueError: There are none, or they are of 16 bits, or quantized without an adapter.
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
    if not trained:
        raise ValueError("policy: all its weights are frozen; call requires_grad_() on those that are to be trained")
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
        """Clip and step, then drop the gradients; returns the gradient's norm before clipping.

        Args:
            optimizer: Its parameters have gradients.
            step: Its number, for messages.

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


class SelfCheckError(RuntimeError):
    """Sampling, scoring and reference do not describe the same distribution."""


@torch.no_grad()
def check_rollout(
    policy: Policy,
    reference: Policy | None,
    rollout: Rollout,
    sampling: Sampling,
    microbatch_tokens: int,
    *,
    tolerance: float = 1e-3,
    coarse: bool = False,
    filtered: bool = False,
) -> None:
    """Check a rollout for errors that training would hide; no weights were updated since it was made.

    Args:
        policy: As it sampled.
        reference: Of the KL term, or None.
        rollout: With the sampler's log-probabilities as the old ones.
        sampling: How it was drawn.
        microbatch_tokens: As in `accumulate`.
        tolerance: Largest difference in nats; in 16-bit or 8-bit arithmetic the mean may be 0.05 instead, since single
            tokens are off by a rounding of large logits.
        coarse: Whether what sampled computes in 16 bits, whatever the policy does.
        filtered: Whether the sets of truncated sampling are the policy's, not the sampler's. They differ where a
            probability lies on a bound: then the largest differences of one token in a hundred do not count.

    Raises:
        SelfCheckError: Scoring the same tokens twice differs (something random is left on, so that no ratio is 1);
            scoring differs from the sampler (then the ratio of the first update is not 1); or a reference that is a
            copy of the policy is not at distance 0.
    """
    rows = rollout[rollout.mask.any(-1).nonzero().flatten()]
    if not len(rows):
        return  # every completion was cut at the limit, and rollout.mask_truncated leaves those out
    rows = rows[policy.microbatches(rows, microbatch_tokens)[0]]
    rounded = (torch.bfloat16, torch.float16, torch.int8)
    is_half = coarse or any(weight.dtype in rounded for weight in policy.parameters())
    is_half |= torch.is_autocast_enabled(rows.ids.device.type)
    allowed = 0.05 if is_half else tolerance

    def gap(one: Tensor, other: Tensor, mask: Tensor, *, without_outliers: bool = False) -> float:
        """The mean difference inside the mask in 16 bits, else the largest, or that without one token in a hundred."""
        gaps = (one - other).abs()[mask].sort().values
        if is_half:
            return float(gaps.mean())
        ignored = max(1, len(gaps) // 100) if without_outliers else 0
        return float(gaps[: len(gaps) - ignored].max()) if len(gaps) > ignored else 0.0

    first = policy.logprobs(rows, temperature=sampling.temperature)
    again = policy.logprobs(rows, temperature=sampling.temperature)
    if not torch.equal(first, again):
        raise SelfCheckError(
            f"scoring the same completions twice differs by up to {(first - again).abs().max():.2g} nats, so the "
            "ratio to the old policy is never 1: dropout or another random layer is still on in the policy"
        )
    found = gap(first, rows.old_logprobs, rows.mask, without_outliers=filtered and rows.support is not None)
    if found > allowed:
        alone = rows[torch.arange(1, device=rows.mask.device)]
        moved = gap(policy.logprobs(alone, temperature=sampling.temperature), first[:1], alone.mask)
        cause = (
            f"the log-probabilities of a completion change by {moved:.2g} with the rows beside it: the model does not "
            "respect attention_mask or position_ids (padding)"
            if moved > allowed
            else "the model scores a token otherwise in one pass than step by step with its cache, or another "
            "temperature was sampled than is scored; a sampler of your own has to return log-probabilities under "
            "softmax(logits / temperature), or set module.self_check=false"
        )
        raise SelfCheckError(
            f"recomputed log-probabilities differ from the sampler's by up to {found:.2g} nats "
            f"(allowed: {allowed}): {cause}"
        )
    if reference is not None and reference.idle_device is None and _same_weights(policy, reference):
        whole = rows.without_support
        own = first if rows.support is None else policy.logprobs(whole, temperature=sampling.temperature)
        found = gap(own, reference.logprobs(whole, temperature=sampling.temperature), rows.mask)
        if found > allowed:
            raise SelfCheckError(
                f"the reference is a copy of the policy, yet their log-probabilities differ by up to {found:.2g} nats: "
                "the KL term would pull to a wrong place (another dtype or attention implementation?)"
            )


def _same_weights(policy: Policy, reference: Policy) -> bool:
    own, theirs = dict(policy.named_parameters()), dict(reference.named_parameters())
    return own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)
