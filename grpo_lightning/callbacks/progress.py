"""What a run says while it goes: a Rich progress bar on a terminal, one plain line per N steps elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any

from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from grpo_lightning.config.redaction import single_line
from grpo_lightning.console import WIDTH, drop_leading_zero, format_number, log_line, metric_label
from grpo_lightning.supervisor import record_status

_LONGEST = 24
"""Characters of a metric's name on a line, which a user's reward may be longer than."""
_TIME = 7
"""Columns of the bar's remaining time, as in 0:01:23."""


class _Live(ProgressColumn):
    """The column of the progress bar with phase and metrics, read from the module at every refresh."""

    def __init__(self, module: Any, trainer: Trainer, room: Callable[[], int]) -> None:
        super().__init__(Column(no_wrap=True))
        self.module = module
        self.trainer = trainer
        self.room = room

    def render(self, task: Any) -> Text:
        validates = self.trainer.validating or self.trainer.sanity_checking
        phase = "validation" if validates else "done" if task.finished else self.module.clock.phase
        room = max(0, self.room())
        metrics = describe(self.module, room=room - 11, keep_old=True)
        return Text(f"{phase:<10} {metrics}"[:room], no_wrap=True, end="")


def outcome_name(module: Any) -> str | None:
    """The metric of training that tells how a run goes: the reward that says whether a completion is right, or a loss.

    None before there is any.
    """
    judge = module.validation.scorer
    right = f"reward/{judge.outcome_name}" if judge.rewards else ""
    return next((name for name in (right, "reward/total", "loss/total") if name in module.metrics), None)


def describe(module: Any, *, room: int, keep_old: bool = False) -> str:
    """The few numbers of a progress line, the most telling first, as many as there is room for.

    Args:
        module: Whose metrics are shown.
        room: Columns.
        keep_old: Whether the newest validation is shown, with its step, also where steps have been made since.
    """
    metrics, parts = module.metrics, []
    name = outcome_name(module)
    if name is not None:
        number = format_number(metrics[name], 2)
        longest = max(0, min(_LONGEST, room - len(number) - 1))
        parts.append(f"{single_line(metric_label(name))[:longest]} {number}".strip())
    is_new = module.validated_at == module.completed_steps
    if "val/pass@1" in metrics and (is_new or keep_old):
        old = "" if is_new else f" (step {module.validated_at})"
        parts.append(f"pass@1 {format_number(metrics['val/pass@1'], 2)}{old}")
    if "reward/total" in metrics and name != "reward/total":
        parts.append(f"reward {format_number(metrics['reward/total'], 2)}")
    if "policy/kl_divergence" in metrics:
        parts.append("kl " + drop_leading_zero(f"{metrics['policy/kl_divergence']:.2g}"))
    if "reward/format" in metrics and name != "reward/format":
        parts.append(f"format {format_number(metrics['reward/format'], 2)}")
    if "advantage/std" in metrics:
        parts.append(f"advantage ±{format_number(metrics['advantage/std'], 2)}")
    if "perf/tokens_per_second" in metrics:
        parts.append(f"tok/s {metrics['perf/tokens_per_second']:.0f}")
    while parts and len("  ".join(parts)) > room:
        parts.pop()
    return "  ".join(parts)


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
        self._note(module)
        if not trainer.is_global_zero or not sys.stderr.isatty():
            return
        self._bar = progress_bar(module, trainer, Console(stderr=True))
        self._bar.start()
        self._task = self._bar.add_task("fit", total=module.steps, completed=module.completed_steps)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        step: int = module.completed_steps
        self._note(module)
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        elif step % self.every == 0 and step != module.steps and step % module.validation.every:
            self._line(trainer, module)  # a validation that follows has a line of its own

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if module.validated_at != module.completed_steps:
            return
        if trainer.state.fn == "fit":
            self._note(module)
        if self._bar is None:
            self._line(trainer, module)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _note(self, module: Any) -> None:
        """Leave what is known behind, for the summary of a run that crashes."""
        seconds = round(time.perf_counter() - self._started, 3)
        facts: dict[str, Any] = {"metrics": module.metrics, "values": module.summary()}
        record_status(step=module.completed_steps, seconds=seconds, **facts)

    def _line(self, trainer: Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            seconds = time.perf_counter() - self._started if self._started else 0.0
            total = f"/{module.steps}" if trainer.state.fn == "fit" else ""  # a checkpoint may be of more
            start, end = f"step {module.completed_steps}{total}", f"{seconds:.0f} s"
            told = describe(module, room=WIDTH - len(start) - len(end) - 4)
            log_line("  ".join(part for part in (start, told, end) if part))

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def progress_bar(module: Any, trainer: Trainer, console: Console) -> Progress:
    """The bar of a terminal, in one line of it, with as many metrics as fit."""
    bar = min(40, max(4, console.width // 8))
    taken = len("step") + 2 * len(str(module.steps)) + 1 + bar + _TIME + 4  # and a space between two columns
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar),
        _Live(module, trainer, lambda: console.width - taken),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        refresh_per_second=4,
    )
