"""One optimizer step that survives bad numbers."""

import logging
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

log = logging.getLogger(__name__)


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

    def state(self) -> list[int]:
        """The two counts, for a checkpoint."""
        return [self.skipped, self.skipped_in_a_row]

    def restore(self, state: list[int]) -> None:
        """Go on from what `state` described."""
        self.skipped, self.skipped_in_a_row = state
