"""What a run says while it goes: a Rich progress bar on a terminal, one plain line per N steps elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from grpo_lightning.output import activity
from grpo_lightning.output.terminal import say

_SHOWN = {
    "reward/accuracy": ("accuracy", ".3g"),
    "reward/format": ("format", ".3g"),
    "reward/total": ("reward", ".3g"),
    "advantage/mean": ("advantage", "z.1f"),
    "advantage/std": ("±", ".2f"),
    "policy/kl_divergence": ("kl", ".2g"),
    "val/pass@1": ("pass@1", ".3g"),
    "perf/tokens_per_second": ("tok/s", ".0f"),
}
"""Metric -> its label on a progress line, and the format of its value."""


class _Live(ProgressColumn):
    """The column of the progress bar with phase and metrics, read from the module at every refresh."""

    def __init__(self, module: Any, trainer: Trainer) -> None:
        super().__init__()
        self.module = module
        self.trainer = trainer

    def render(self, task: Any) -> Text:
        phase = "validation" if self.trainer.validating or self.trainer.sanity_checking else self.module.clock.phase
        return Text(f"{phase:<10} {describe(self.module.metrics)}")


def describe(metrics: Mapping[str, float]) -> str:
    """The few numbers of a progress line, those that were measured."""
    parts = [f"{label} {metrics[name]:{form}}" for name, (label, form) in _SHOWN.items() if name in metrics]
    return "  ".join(parts).replace("  ±", " ±")


class RunProgress(Callback):
    """Shows the phase and a few metrics of the newest step.

    Args:
        every: Steps between two lines where the output is no terminal.
    """

    def __init__(self, *, every: int) -> None:
        self.every = every
        self._bar: Progress | None = None
        self._task: Any = None
        self._started = 0.0

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        self._started = time.perf_counter()
        activity.note(step=module.completed_steps)
        if not trainer.is_global_zero or not sys.stderr.isatty():
            return
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            _Live(module, trainer),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self._bar.start()
        self._task = self._bar.add_task("fit", total=module.steps, completed=module.completed_steps)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        step: int = module.completed_steps
        activity.note(step=step, metrics=module.metrics, seconds=round(time.perf_counter() - self._started, 3))
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        elif step % self.every == 0 and step != module.steps and step % module.validation.every:
            self._line(trainer, module)  # a validation that follows has a line of its own

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if self._bar is None and module.validated_at == module.completed_steps:
            self._line(trainer, module)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _line(self, trainer: Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            seconds = time.perf_counter() - self._started if self._started else 0.0
            line = f"step {module.completed_steps}/{module.steps}  {describe(module.metrics)}  {seconds:.0f} s"
            say(line)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
