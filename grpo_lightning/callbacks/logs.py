"""What loggers get besides scalars: tables of completions; in TensorBoard histograms, charts and hyperparameters."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger

from grpo_lightning.config.settings import value_at
from grpo_lightning.console import escape_control, redact
from grpo_lightning.logger import warn_on_failure
from grpo_lightning.rollout.scoring import turn_spans
from grpo_lightning.types import Prompt, Scored

HISTOGRAM = "~histogram"
"""What the tags of histograms begin with, so that TensorBoard sorts them behind the scalars."""
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
