"""Callbacks that log: progress lines, recorded rollouts, tables of completions, and TensorBoard's charts."""

import logging
import math
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from grpo_lightning import __version__, recording
from grpo_lightning.config.settings import value_at
from grpo_lightning.console import (
    WIDTH,
    drop_leading_zero,
    escape_control,
    format_number,
    log_line,
    metric_label,
    redact,
    single_line,
)
from grpo_lightning.logger import warn_on_failure
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rollout.collector import Collected
from grpo_lightning.rollout.scoring import turn_spans
from grpo_lightning.types import Prompt, Scored

log = logging.getLogger(__name__)

HISTOGRAM = "~histogram"  # begins the tags of histograms, so that TensorBoard sorts them behind the scalars
CHARTS = {
    "Progress": {
        "pass@1 on held-out prompts": r"val/pass@1",
        "reward in training": r"reward/total",
        "reward on held-out prompts": r"val/reward/total",
        "pass@k and maj@k": r"val/(pass@(?!1$)|maj@).+",
        "each reward in training": r"reward/(?!total$|std$).+",
        "each reward on held-out prompts": r"val/reward/(?!total$).+",
        "loss": r"loss/total",  # of supervised training
    },
    "Health": {
        "groups with signal": r"group/mixed",
        "groups that are all right or all wrong": r"group/all_(right|wrong)",
        "deviation of rewards within groups": r"reward/std",
        "KL to the reference": r"policy/kl_divergence",
        "entropy": r"policy/entropy",
        "gradient norm": r"optim/grad_norm",
        "tokens clipped": r"policy/clip_fraction",
        "completion length": r"completion/length_(mean|max)",
        "truncated completions": r"completion/truncated_fraction",
        "rewards that failed": r"failure/.+",
    },
    "Speed": {
        "seconds of a step": r"time/.+",
        "tokens per second": r"perf/tokens_per_second",
        "memory": r"perf/peak_memory_gb",
        "learning rate": r"optim/lr",
    },
}
"""Category -> title of a chart -> the metrics that it shows, as a regular expression."""
_NOT_SHOWN = ("callbacks", "logger", "run_dir", "checkpoint", "mode", "trusted", "sweep", "hydra")
"""What keys begin with that change no result."""
Cell = str | int | float | None


class CompletionTables(Callback):
    """Writes tables of completions to all loggers, and histograms to TensorBoard.

    Args:
        every: Steps between two rollouts that are written; the first one and all validations are, too.
        max_rows: The most completions in a table, in whole groups.
        max_characters: The most characters of a prompt or completion; longer ones are cut.
    """

    def __init__(self, *, every: int, max_rows: int, max_characters: int) -> None:
        self.every = every
        self.limits = {"max_rows": max_rows, "max_characters": max_characters}
        self._validated: list[Scored] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        step: int = module.completed_steps
        if not trainer.is_global_zero or not outputs or "scored" not in outputs or (step % self.every and step != 1):
            return
        scored, advantages = outputs["scored"], outputs["advantages"]
        self._write(trainer, "completions/train", scored, advantages, step=step)
        values = {
            "reward_total": scored.rewards["total"],
            "advantage": advantages,
            "completion_length": scored.sampled.mask.sum(-1),
            "policy_ratio": outputs["ratio"],
        }
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                with warn_on_failure(logger):
                    for name, value in values.items():
                        if len(finite := value[value.isfinite()]):
                            logger.experiment.add_histogram(f"{HISTOGRAM}/{name}", finite.float(), step)

    def on_validation_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        has_room = sum(len(scored.right) for scored in self._validated) < self.limits["max_rows"]
        if outputs and "scored" in outputs and trainer.is_global_zero and has_room:
            self._validated.append(outputs["scored"])

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        validated, self._validated = self._validated, []
        if validated and module.loop.is_logged:
            scored = Scored.concatenate(validated)
            self._write(trainer, "completions/validation", scored, step=module.completed_steps)

    def _write(
        self, trainer: Trainer, name: str, scored: Scored, advantages: torch.Tensor | None = None, *, step: int
    ) -> None:
        table = completions_table(scored, advantages, **self.limits)
        for logger in trainer.loggers:
            with warn_on_failure(logger):
                log_table(logger, name, table, step=step)


@dataclass(frozen=True)
class Table:
    """Rows under named columns, and the same as Markdown for people."""

    columns: list[str]
    rows: list[list[Cell]]
    page: str


def log_table(logger: Logger, name: str, table: Table, *, step: int) -> None:
    """Log a table: as text in TensorBoard, a file in MLflow, a table in a logger that has ``log_table``, as W&B's."""
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text(name, table.page, step)
    elif isinstance(logger, MLFlowLogger):
        content = {"columns": table.columns, "data": table.rows}
        logger.experiment.log_dict(logger.run_id, content, f"{name}/{step:06d}.json")
    elif hasattr(logger, "log_table"):
        any_logger: Any = logger
        any_logger.log_table(name, table.columns, table.rows, step=step)


def completions_table(
    scored: Scored, advantages: torch.Tensor | None = None, *, max_rows: int, max_characters: int
) -> Table:
    """The completions of the first groups that fit, with secrets removed and control characters escaped.

    Args:
        scored: B = P * G completions.
        advantages: [B] of each completion, or None.
        max_rows: The most completions; of the first group as many as that.
        max_characters: The most of a text; longer ones are cut, and say so.
    """

    def clean(text: str) -> str:
        text = redact(text)  # before it is cut
        return escape_control(text[:max_characters] + (" […]" if len(text) > max_characters else ""))

    size, sampled, total = scored.group_size, scored.sampled, len(scored.right)
    shown = min(total, max(max_rows // size * size, min(size, max_rows)))
    lengths = sampled.mask.sum(-1).tolist()
    texts = sampled.texts if sampled.turns is None else _dialogues(scored)
    answers = scored.prompts.columns.get("answer")
    numbers = {name: values.tolist() for name, values in scored.rewards.items()}
    if advantages is not None:
        numbers["advantage"] = advantages.tolist()
    rows: list[list[Cell]] = []
    lines: list[str] = []
    blocks: list[str] = []
    for row in range(shown):
        group, place = divmod(row, size)
        prompt = [clean(_prompt_text(scored.prompts.texts[group])), *([clean(str(answers[group]))] if answers else [])]
        text, end = clean(texts[row]), "end" if sampled.finished[row] else "cut"
        cells = {name: None if value[row] != value[row] else value[row] for name, value in numbers.items()}
        rows.append([*prompt, text, lengths[row], end, *cells.values()])
        if not place:
            lines = [f"{name}: {cell}" for name, cell in zip(("prompt", "answer"), prompt, strict=False)]
        shown_numbers = {"length": lengths[row], "end": end} | cells
        pairs = (f"{k}={f'{v:.3g}' if isinstance(v, float) else v}" for k, v in shown_numbers.items())
        lines += ["", f"({place + 1}) {'  '.join(pairs)}", text]
        if place == size - 1 or row == shown - 1:  # a code block for each prompt
            blocks.append(f"**Prompt {group + 1}**\n\n{fence(chr(10).join(lines))}")
    if total > shown:
        blocks.append(f"*The first {shown} of {total} completions.*")
    columns = ["prompt", *(["answer"] if answers else []), "completion", "length", "end", *numbers]
    return Table(columns, rows, "\n\n".join(blocks))


def _prompt_text(prompt: Prompt) -> str:
    """A prompt as one text; chat messages with their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(
        f"[{part['role']}] {part['content']}" if isinstance(part, dict) else str(part) for part in prompt
    )


def _dialogues(scored: Scored) -> list[str]:
    """[B] the turns of each episode, a line each, with the reward of a turn where turns have rewards."""
    turns, replies = scored.sampled.turns or (), scored.sampled.replies or ()
    texts = []
    for row, spans in enumerate(turn_spans(scored.sampled)):
        scores = scored.steps[row][[end - 1 for _, end in spans]].tolist()
        by_turn = any(score == score for score in scores[:-1])
        lines = []
        for number, (turn, score) in enumerate(zip(turns[row], scores, strict=True)):
            reward = f" ({score:.3g})" if by_turn and score == score else ""
            lines.append(f"model: {turn}{reward}")
            lines += [f"reply: {reply}" for reply in replies[row][number : number + 1]]
        texts.append("\n".join(lines))
    return texts


def fence(text: str) -> str:
    """``text`` as a Markdown code block that it cannot close."""
    marks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{marks}text\n{text}\n{marks}"


class Charts(Callback):
    """Writes the layout of the Custom Scalars tab after the first step of a run, when its metrics are known."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if module.completed_steps != 1 or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                with warn_on_failure(logger):
                    logger.experiment.add_custom_scalars(chart_layout(module.metrics))  # type: ignore[arg-type]


def chart_layout(metrics: Collection[str]) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """The charts that show any of some metrics, as TensorBoard's writers take them."""
    return {
        category: {
            title: ("Multiline", [f"^{pattern}$"])
            for title, pattern in charts.items()
            if any(re.fullmatch(pattern, name) for name in metrics)
        }
        for category, charts in CHARTS.items()
    }


class HParams(Callback):
    """Writes the settings that tell a run apart to the HParams tab, and all settings to the other loggers.

    Args:
        outcome: The scalar that is shown first, with its last value.
        metrics: Further scalars that are shown.
        parts: Groups of conf/ whose choice is shown, behind the overridden settings.
    """

    def __init__(self, *, outcome: str, metrics: Sequence[str], parts: Sequence[str]) -> None:
        self.metrics = list(dict.fromkeys((outcome, *metrics)))
        self.parts = parts

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        from torch.utils.tensorboard.summary import hparams

        settings: Mapping[str, Any] = module.settings  # type: ignore[assignment]
        for logger in trainer.loggers if trainer.is_global_zero else ():
            with warn_on_failure(logger):
                if isinstance(logger, TensorBoardLogger):
                    shown = hparams_columns(
                        settings, settings.get("overrides", ()), settings.get("choices", {}), self.parts
                    )
                    # Lightning's log_hyperparams would also write a value of each metric, which has none yet; the
                    # third summary would say that the run has succeeded.
                    for summary in hparams(shown, dict.fromkeys(self.metrics))[:2]:
                        logger.experiment._get_file_writer().add_summary(summary)  # a validation has closed it
                elif settings:
                    logger.log_hyperparams(dict(settings))


def hparams_columns(
    settings: Mapping[str, Any], overrides: Sequence[str], choices: Mapping[str, Any], parts: Sequence[str]
) -> dict[str, float | str]:
    """Column -> value of the HParams tab: the overridden settings, then the choices of the groups in ``parts``."""
    keys = [word.partition("=")[0].lstrip("+").partition("@")[0] for word in overrides if not word.startswith("~")]
    columns: dict[str, float | str] = {}
    for key in (*keys, *parts):
        value = choices.get(key, value_at(settings, key))
        if key == "reward":  # an algorithm may have added some
            value = "+".join(settings.get("reward") or {})
        if key.startswith(_NOT_SHOWN) or value is None or isinstance(value, Mapping):
            continue
        columns[key] = value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
    return columns


_RECORDED = ("reward", "advantage", "loss", "rollout")  # the parts whose settings are recorded, once


class RecordRollouts(Callback):
    """Writes a file ``STEP.jsonl.gz`` for some steps, with all that its update was made from.

    The first error in writing is a warning.

    Args:
        directory: Where the files go.
        every: Steps between two that are recorded; the first step always is.
    """

    def __init__(self, directory: str, *, every: int) -> None:
        self.directory = Path(directory)
        self.every = every
        self._policy = ""
        self._has_warned = False

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if isinstance(module, GRPOLightningModule) and self._is_due(module.completed_steps + 1):
            self._policy = recording.fingerprint(module.policy)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        if not isinstance(module, GRPOLightningModule) or not outputs or not self._is_due(module.completed_steps):
            return
        collected: Collected = outputs["collected"]
        updates = outputs["updates"]
        logprobs: dict[int, list[float]] = {}
        if len(updates) == 1 and collected.is_fresh:
            pairs = (zip(rows.tolist(), values.tolist(), strict=True) for rows, values in updates[0].microbatches)
            for part in module.loop.ranks.gather({row: values for pair in pairs for row, values in pair}):
                logprobs |= part
        if not trainer.is_global_zero:
            return
        header = self._header(module, collected, len(updates), outputs["collector"])
        try:
            lines = recording.to_lines(header, collected.scored, collected.rollout, logprobs)
            recording.write(self.directory / recording.file_name(module.completed_steps), lines)
        except (OSError, ValueError) as error:  # a full disk, or what JSON cannot hold
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "%s: the rollout of step %d was not recorded (%s): training goes on, and rollouts may be missing",
                    *(self.directory, module.completed_steps, single_line(str(error))[:300]),
                )

    def _is_due(self, step: int) -> bool:
        return step % self.every == 0 or step == 1

    def _header(
        self, module: GRPOLightningModule, collected: Collected, optimizer_steps: int, collector: Any
    ) -> dict[str, Any]:
        metrics = {name: float(value) for name, value in collected.metrics.items()}
        updated = {
            name: value
            for name, value in module.metrics.items()
            if name not in metrics and not name.startswith(("time/", "perf/", "val/"))
        }
        settings: dict[str, Any] = {name: v for name, v in module.settings.items() if name in _RECORDED}
        if "rollout" in settings:
            settings["rollout"] = {k: v for k, v in settings["rollout"].items() if k not in ("path", *_RECORDED)}
        openings = [*map(module.policy.chat.opening, collected.scored.prompts.texts)]
        return {
            "format": recording.FORMAT,
            "version": __version__,
            "step": module.completed_steps,
            "seed": module.seed,
            "temperature": float(collector.temperature),
            "weights": collector.scorer.weights.tolist(),
            "fresh": collected.is_fresh,
            "complete": collected.is_fresh and int(collected.scored.sampled.mask.sum()) == collected.num_tokens,
            "reference": module.reference is not None,
            "policy": self._policy,
            "num_tokens": collected.num_tokens,
            "optimizer_steps": optimizer_steps,
            "collected": {name: None if math.isnan(value) else value for name, value in sorted(metrics.items())},
            "updated": dict(sorted(updated.items())),
            "settings": settings,
            **({"openings": openings} if any(openings) else {}),
        }


_MAX_NAME = 24  # characters of a metric's name on a line; the name of a user's reward may be longer
_TIME_WIDTH = 7  # columns of the bar's remaining time, as in 0:01:23


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
        if self._bar is None and module.validated_at == module.completed_steps:
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
