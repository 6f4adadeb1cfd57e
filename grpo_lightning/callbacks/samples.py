"""The completions of a rollout and of a validation as tables, and histograms of a rollout in TensorBoard."""

from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from grpo_lightning.batch import Scored
from grpo_lightning.callbacks.completions import completions_table, log_table
from grpo_lightning.logger.guarded import attempt

HISTOGRAM = "~histogram"
"""What the tags of histograms begin with: scalars have other names, and TensorBoard sorts it behind them."""


class Samples(Callback):
    """Writes tables of completions to all loggers, and histograms to TensorBoard.

    Args:
        every: Steps between two rollouts that are written; the first step's always is. Validations always are.
        max_rows: The most completions in a table, in whole groups.
        max_characters: The most characters of a prompt or completion; longer ones are cut.
    """

    def __init__(self, *, every: int, max_rows: int, max_characters: int) -> None:
        self.every = every
        self.limits = {"max_rows": max_rows, "max_characters": max_characters}
        self._validated: list[Scored] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step: int = module.completed_steps  # type: ignore[assignment]
        if not trainer.is_global_zero or not outputs or "scored" not in outputs or (step % self.every and step != 1):
            return
        scored, advantages = outputs["scored"], outputs["advantages"]
        self._write(trainer, "completions/train", scored, advantages, step=step)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                with attempt(logger):
                    _histograms(logger.experiment, scored, advantages, outputs["ratio"], step)

    def on_validation_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        has_room = sum(len(scored.right) for scored in self._validated) < self.limits["max_rows"]
        if outputs and "scored" in outputs and trainer.is_global_zero and has_room:
            self._validated.append(outputs["scored"])

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        validated, self._validated = self._validated, []
        loop: Any = module.loop
        if validated and loop.is_logged:
            step: int = module.completed_steps  # type: ignore[assignment]
            self._write(trainer, "completions/validation", Scored.concatenate(validated), step=step)

    def _write(
        self, trainer: Trainer, name: str, scored: Scored, advantages: torch.Tensor | None = None, *, step: int
    ) -> None:
        table = completions_table(name, scored, advantages, **self.limits)
        for logger in trainer.loggers:
            with attempt(logger):
                log_table(logger, table, step=step)


def _histograms(writer: Any, scored: Scored, advantages: torch.Tensor, ratio: torch.Tensor, step: int) -> None:
    values = {
        "reward_total": scored.rewards["total"],
        "advantage": advantages,
        "completion_length": scored.sampled.mask.sum(-1),
        "policy_ratio": ratio,
    }
    for name, value in values.items():
        if len(finite := value[value.isfinite()]):
            writer.add_histogram(f"{HISTOGRAM}/{name}", finite.float(), step)
