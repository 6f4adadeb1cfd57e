"""The completions of a rollout and of a validation as tables, and histograms of a rollout in TensorBoard.

A table has columns for programs, and a page in Markdown for people.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger

from grpo_lightning.config.redaction import escape_control, redact
from grpo_lightning.logger.guarded import attempt
from grpo_lightning.rollout.turns import turn_ends
from grpo_lightning.types import Prompt, Scored

HISTOGRAM = "~histogram"
"""What the tags of histograms begin with: scalars have other names, and TensorBoard sorts it behind them."""
_LETTER = re.compile(r"[^\W_]|[ \n]")
Cell = str | int | float | None


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


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    Example:
        ``Table("completions/train", ("prompt", "total"), [("2+2?", 1.0)], page)``
    """

    name: str
    """What the table is of; loggers show names with the same beginning together."""
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    page: str
    """The same as Markdown, for people."""


def log_table(logger: Logger, table: Table, *, step: int) -> None:
    """Hand a table to a logger: as a text to TensorBoard, as a file to MLflow, as a table to any that takes tables.

    A logger takes tables if it has ``log_table(key, columns, data, step=)``, as W&B's has; others get none.
    """
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text(table.name, table.page, step)
    elif isinstance(logger, MLFlowLogger):
        content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        logger.experiment.log_dict(logger.run_id, content, f"{table.name}/{step:06d}.json")
    elif hasattr(logger, "log_table"):
        takes: Any = logger
        takes.log_table(table.name, list(table.columns), [list(row) for row in table.rows], step=step)


def completions_table(
    name: str, scored: Scored, advantages: torch.Tensor | None = None, *, max_rows: int, max_characters: int
) -> Table:
    """The completions of whole groups, the first that there is room for.

    Args:
        name: What they are of, such as ``completions/train``.
        scored: B = P * G completions.
        advantages: [B] each completion's; None where there are none.
        max_rows: The most completions; of the first group there are as many as that.
        max_characters: The most of a text; longer ones are cut, and say so.
    """
    size, sampled = scored.group_size, scored.sampled
    shown = min(len(scored.right), max(max_rows // size * size, min(size, max_rows)))
    lengths = sampled.mask.sum(-1).tolist()
    texts = sampled.texts if sampled.turns is None else _episodes(scored)
    answers = scored.prompts.columns.get("answer")
    rewards = {key: values.tolist() for key, values in scored.rewards.items()}
    columns = ["prompt", *(["answer"] if answers else []), "completion", "length", "end", *rewards]
    rows: list[list[Cell]] = []
    for row in range(shown):
        group = row // size
        cells: list[Cell] = [_clean(as_text(scored.prompts.texts[group]), max_characters)]
        if answers:
            cells.append(_clean(str(answers[group]), max_characters))
        cells += [_clean(texts[row], max_characters), lengths[row], "end" if sampled.finished[row] else "cut"]
        rows.append([*cells, *(None if value[row] != value[row] else value[row] for value in rewards.values())])
    if advantages is not None:
        columns.append("advantage")
        for cells, value in zip(rows, advantages.tolist(), strict=False):
            cells.append(value)
    page = "\n\n".join(_page(columns, rows, group_size=size, total=len(scored.right)))
    return Table(name, columns, rows, page)


def _episodes(scored: Scored) -> list[str]:
    """[B] who said what, a line each, and behind a turn what was scored at its end where that is told by turns."""
    turns, replies = scored.sampled.turns or (), scored.sampled.replies or ()
    texts = []
    for row, ends in enumerate(turn_ends(scored.sampled)):
        scores = scored.steps[row][ends].tolist()
        by_turn = any(score == score for score in scores[:-1])
        lines = []
        for number, (said, score) in enumerate(zip(turns[row], scores, strict=True)):
            told = f" ({score:.3g})" if by_turn and score == score else ""
            lines.append(f"model: {said}{told}")
            lines += [f"reply: {reply}" for reply in replies[row][number : number + 1]]
        texts.append("\n".join(lines))
    return texts


def _page(columns: list[str], rows: list[list[Cell]], *, group_size: int, total: int) -> Iterator[str]:
    """Per prompt its text and answer, and below them a table of its completions."""
    first = columns.index("completion")
    for start in range(0, len(rows), group_size):
        group = rows[start : start + group_size]
        yield f"**Prompt {start // group_size + 1}**"
        yield fence(str(group[0][0]))
        if first == 2:
            yield f"**Answer** {inert(str(group[0][1]))}"
        titles = [inert(title) for title in columns[first:]]
        lines = ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
        lines += ["| " + " | ".join(_cell(cell) for cell in row[first:]) + " |" for row in group]
        yield "\n".join(lines)
    if total > len(rows):
        yield f"*The first {len(rows)} of {total} completions.*"


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else inert(str(value))


def inert(text: str) -> str:
    """``text`` as a line of Markdown that shows it and nothing else: no mark of Markdown or HTML has its meaning."""
    letters = (one if _LETTER.match(one) else f"&#{ord(one)};" for one in text)
    return "".join(letters).replace("\n", "<br>")


def fence(text: str) -> str:
    """``text`` as a Markdown code block that it cannot leave."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}text\n{text}\n{marks}"


def _clean(text: str, max_characters: int) -> str:
    """``text`` without secrets, cut, control characters as escapes."""
    text = redact(text)  # before it is cut
    return escape_control(text[:max_characters] + (" […]" if len(text) > max_characters else ""))


def as_text(prompt: Prompt) -> str:
    """A prompt as one text; chat messages with their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"[{one['role']}] {one['content']}" if isinstance(one, dict) else str(one) for one in prompt)
