"""Progress of a run: a Rich progress bar on a terminal, one plain line per N steps elsewhere."""

import sys
import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from grpo_lightning.console import WIDTH, drop_leading_zero, format_number, log_line, metric_label, single_line

_MAX_NAME = 24
"""Characters of a metric's name on a line; the name of a user's reward may be longer."""
_TIME_WIDTH = 7
"""Columns of the bar's remaining time, as in 0:01:23."""


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
        if trainer.is_global_zero and sys.stderr.isatty():
            self._bar = progress_bar(module, trainer, Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("fit", total=module.steps, completed=module.completed_steps)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        step: int = module.completed_steps
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        elif step % self.every == 0 and step != module.steps and step % module.validation.every:
            self._print(trainer, module)  # a validation that follows has a line of its own

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if module.validated_at != module.completed_steps:
            return
        if self._bar is None:
            self._print(trainer, module)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _print(self, trainer: Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            seconds = time.perf_counter() - self._started if self._started else 0.0
            total = f"/{module.steps}" if trainer.state.fn == "fit" else ""  # a checkpoint may be of more
            start, end = f"step {module.completed_steps}{total}", f"{seconds:.0f} s"
            metrics = describe_metrics(module, room=WIDTH - len(start) - len(end) - 4)
            log_line("  ".join(part for part in (start, metrics, end) if part))

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def progress_bar(module: Any, trainer: Trainer, console: Console) -> Progress:
    """The bar of a terminal, in one line, with as many metrics as fit."""
    bar = min(40, max(4, console.width // 8))
    taken = len("step") + 2 * len(str(module.steps)) + 1 + bar + _TIME_WIDTH + 4  # and a space between two columns

    class Metrics(ProgressColumn):
        """The phase and the metrics, read from the module at every refresh."""

        def render(self, task: Any) -> Text:
            validates = trainer.validating or trainer.sanity_checking
            phase = "validation" if validates else "done" if task.finished else module.clock.phase
            room = max(0, console.width - taken)
            metrics = describe_metrics(module, room=room - 11, keep_old=True)
            return Text(f"{phase:<10} {metrics}"[:room], no_wrap=True, end="")

    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar),
        Metrics(Column(no_wrap=True)),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        refresh_per_second=4,
    )


def describe_metrics(module: Any, *, room: int, keep_old: bool = False) -> str:
    """The metrics of a progress line, the most telling first, as many as fit.

    Args:
        module: Whose metrics are shown.
        room: Columns.
        keep_old: Whether the newest validation is shown, with its step, also where steps have been made since.
    """
    metrics, parts = module.metrics, []
    scorer = module.validation.scorer
    outcome = f"reward/{scorer.outcome_name}" if scorer.rewards else ""
    first = next((name for name in (outcome, "reward/total", "loss/total") if name in metrics), None)
    if first is not None:
        number = format_number(metrics[first], 2)
        length = max(0, min(_MAX_NAME, room - len(number) - 1))
        parts.append(f"{single_line(metric_label(first))[:length]} {number}".strip())
    is_new = module.validated_at == module.completed_steps
    if "val/pass@1" in metrics and (is_new or keep_old):
        old = "" if is_new else f" (step {module.validated_at})"
        parts.append(f"pass@1 {format_number(metrics['val/pass@1'], 2)}{old}")
    for name, label in (
        ("reward/total", "reward "),
        ("policy/kl_divergence", "kl "),
        ("reward/format", "format "),
        ("advantage/std", "advantage ±"),
        ("perf/tokens_per_second", "tok/s "),
    ):
        if name in metrics and name != first:
            value, is_kl = metrics[name], name == "policy/kl_divergence"
            short = drop_leading_zero(f"{value:.2g}") if is_kl else format_number(value, 2)
            parts.append(label + (f"{value:.0f}" if name.startswith("perf/") else short))
    while parts and len("  ".join(parts)) > room:
        parts.pop()
    return "  ".join(parts)
