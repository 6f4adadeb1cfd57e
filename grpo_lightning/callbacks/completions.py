"""Tables of completions for all loggers, and histograms of rollouts in TensorBoard."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger

from grpo_lightning.console import escape_control, redact
from grpo_lightning.logger.base import warn_on_failure
from grpo_lightning.rollout.scoring import turn_ends
from grpo_lightning.types import Prompt, Scored

HISTOGRAM = "~histogram"
"""What the tags of histograms begin with, so that TensorBoard sorts them behind the scalars."""
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

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step: int = module.completed_steps  # type: ignore[assignment]
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

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        validated, self._validated = self._validated, []
        loop: Any = module.loop
        if validated and loop.is_logged:
            step: int = module.completed_steps  # type: ignore[assignment]
            self._write(trainer, "completions/validation", Scored.concatenate(validated), step=step)

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

    size, sampled = scored.group_size, scored.sampled
    shown = min(len(scored.right), max(max_rows // size * size, min(size, max_rows)))
    lengths = sampled.mask.sum(-1).tolist()
    texts = sampled.texts if sampled.turns is None else _dialogues(scored)
    answers = scored.prompts.columns.get("answer")
    numbers = {name: values.tolist() for name, values in scored.rewards.items()}
    if advantages is not None:
        numbers["advantage"] = advantages.tolist()
    columns = ["prompt", *(["answer"] if answers else []), "completion", "length", "end", *numbers]
    rows: list[list[Cell]] = []
    for row in range(shown):
        group = row // size
        cells: list[Cell] = [clean(_prompt_text(scored.prompts.texts[group]))]
        if answers:
            cells.append(clean(str(answers[group])))
        cells += [clean(texts[row]), lengths[row], "end" if sampled.finished[row] else "cut"]
        rows.append([*cells, *(None if value[row] != value[row] else value[row] for value in numbers.values())])
    return Table(columns, rows, "\n\n".join(_page(columns, rows, group_size=size, total=len(scored.right))))


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
    for row, ends in enumerate(turn_ends(scored.sampled)):
        scores = scored.steps[row][ends].tolist()
        by_turn = any(score == score for score in scores[:-1])
        lines = []
        for number, (turn, score) in enumerate(zip(turns[row], scores, strict=True)):
            reward = f" ({score:.3g})" if by_turn and score == score else ""
            lines.append(f"model: {turn}{reward}")
            lines += [f"reply: {reply}" for reply in replies[row][number : number + 1]]
        texts.append("\n".join(lines))
    return texts


def _page(columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, group_size: int, total: int) -> Iterator[str]:
    """Per prompt a Markdown code block of its text, its answer and its completions, each below its numbers."""
    first = columns.index("completion")
    for start in range(0, len(rows), group_size):
        group = rows[start : start + group_size]
        lines = [f"{name}: {cell}" for name, cell in zip(columns[:first], group[0], strict=False)]
        for number, row in enumerate(group, 1):
            pairs = zip(columns[first + 1 :], row[first + 1 :], strict=True)
            numbers = (f"{name}={f'{cell:.3g}' if isinstance(cell, float) else cell}" for name, cell in pairs)
            lines += ["", f"({number}) {'  '.join(numbers)}", str(row[first])]
        yield f"**Prompt {start // group_size + 1}**\n\n{fence(chr(10).join(lines))}"
    if total > len(rows):
        yield f"*The first {len(rows)} of {total} completions.*"


def fence(text: str) -> str:
    """``text`` as a Markdown code block that it cannot close."""
    marks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{marks}text\n{text}\n{marks}"
