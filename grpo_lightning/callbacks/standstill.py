"""Says once that nothing is learned: rewards without any difference, or a gradient of zero, for many rollouts."""

import logging
from typing import Any

from lightning import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)


class Standstill(Callback):
    """Counts the rollouts in a row that cannot have taught anything, and warns once when they are many.

    A rollout with any difference between the rewards of a group starts the count anew. Where a KL term alone has a
    gradient, rewards are warned about, the gradient is not.

    Args:
        rollouts: How many in a row are warned about.

    Raises:
        ValueError: On construction, if ``rollouts`` is below 1.
    """

    def __init__(self, *, rollouts: int) -> None:
        if rollouts < 1:
            raise ValueError(f"callbacks.standstill.rollouts={rollouts}: allowed is an integer >= 1")
        self.rollouts = rollouts
        self._without_difference = self._without_gradient = 0
        self._told = False

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        metrics: dict[str, float] = module.metrics  # type: ignore[assignment]
        # Advantages are exactly 0 where all rewards of a group are equal; their deviation in float32 rarely is.
        rounding = 1e-6 * max(1.0, abs(metrics.get("reward/total", 0.0)))
        no_advantage = metrics.get("advantage/std") == 0 == metrics.get("advantage/mean")
        equal = no_advantage and metrics.get("reward/std", 0.0) <= rounding
        self._without_difference = self._without_difference + 1 if equal else 0
        flat = metrics.get("optim/grad_norm") == 0 and not equal
        self._without_gradient = self._without_gradient + 1 if flat else 0
        if self._told or not trainer.is_global_zero:
            return
        if self._without_difference >= self.rollouts:
            self._tell(
                module,
                "in each of the last %d rollouts all completions of a prompt had the same reward "
                f"(reward/total is {metrics.get('reward/total', float('nan')):.3g}), so that nothing is learned from "
                "them: try a reward with finer differences, easier or harder prompts, a larger rollout.group_size or a "
                "higher rollout.temperature",
            )
        elif self._without_gradient >= self.rollouts:
            self._tell(
                module,
                "the gradient was exactly 0 in each of the last %d rollouts although rewards differ, so that no weight "
                "moves: look at policy/clip_fraction, at the loss's coefficients, at completion/truncated_fraction "
                "with rollout.mask_truncated, and whether the policy's forward pass is connected to its weights",
            )

    def _tell(self, module: LightningModule, text: str) -> None:
        self._told = True
        log.warning(f"step %d: {text}", module.completed_steps, self.rollouts)
