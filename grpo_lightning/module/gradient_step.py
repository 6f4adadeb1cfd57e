"""The weights that are trained, and one optimizer step on them that survives bad numbers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from grpo_lightning.policy.adapters import is_adapted
from grpo_lightning.sampler.native.token_sampling import NonFiniteLogits

log = logging.getLogger(__name__)


def trained_weights(policy: nn.Module) -> list[nn.Parameter]:
    """The weights that are trained.

    Raises:
        ValueError: They are of 16 bits, or the others are quantized and no adapter is above them.
    """
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    if coarse := {str(weight.dtype).removeprefix("torch.") for weight in trained} - {"float32", "float64"}:
        raise ValueError(
            f"policy: the trained weights are {', '.join(sorted(coarse))}; allowed is float32, with "
            "trainer.precision=bf16-mixed for speed: small updates vanish in 16-bit weights"
        )
    packed = any(not weight.is_floating_point() for weight in policy.parameters())
    if packed and not is_adapted(getattr(policy, "model", policy)):
        raise ValueError(
            "policy: its weights are quantized, which cannot be trained; allowed with them is policy.adapter, such as "
            "{r: 16, lora_alpha: 32}"
        )
    return trained


class GradientStep:
    """Clips the gradient and steps; a step whose gradient is not finite is skipped, and counted.

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
            optimizer: Whose parameters have gradients.
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

    @contextmanager
    def blamed(self, completed_steps: int, phase: str) -> Iterator[None]:
        """Inside, weights from which no token can be drawn are an error that names the step and what to try.

        Args:
            completed_steps: Before this sampling.
            phase: What the sampling is for.

        Raises:
            FloatingPointError: The policy's logits are not finite.
        """
        try:
            yield
        except NonFiniteLogits as error:
            when = f"the {phase} after step {completed_steps}" if completed_steps else f"the {phase} before any step"
            cause = (
                f"the last updates have damaged its weights: try a lower optimizer.lr, a module.max_grad_norm below "
                f"{self.max_grad_norm:g}, a longer schedule.warmup_steps or trainer.precision=32-true, from an earlier "
                "checkpoint"
                if completed_steps
                else "its weights were damaged as they were loaded, or are too large for trainer.precision: "
                "try another policy.path, trainer.precision=32-true and policy.dtype=float32"
            )
            raise FloatingPointError(f"in {when}, {error}; {cause}") from error

    def state(self) -> list[int]:
        """The two counts, for a checkpoint."""
        return [self.skipped, self.skipped_in_a_row]

    def restore(self, state: list[int]) -> None:
        """Go on from what `state` described."""
        self.skipped, self.skipped_in_a_row = state
