"""What a run says while it goes: a Rich progress bar on a terminal, one plain line per N steps elsewhere."""

import sys
import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

_SHOWN = {"reward/total": "reward", "val/pass@1": "pass@1", "perf/tokens_per_second": "tok/s"}


class _Live(ProgressColumn):
    """Phase and metrics, read from the module at every refresh."""

    def __init__(self, module: Any, trainer: Trainer) -> None:
        super().__init__()
        self.module = module
        self.trainer = trainer

    def render(self, task: Any) -> Text:
        phase = "validation" if self.trainer.validating or self.trainer.sanity_checking else self.module.clock.phase
        return Text(f"{phase:<10} {describe(self.module.metrics)}")


def describe(metrics: dict[str, float]) -> str:
    """The few numbers of a progress line, those that are known."""
    return "  ".join(f"{label} {metrics[name]:.4g}" for name, label in _SHOWN.items() if name in metrics)


class RunProgress(Callback):
    """Shows phase, reward, pass@1 and tokens per second.

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
            print(line, file=sys.stderr, flush=True)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
