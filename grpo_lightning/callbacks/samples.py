"""The best, the worst and a random completion of a rollout as text, and histograms, in TensorBoard."""

import random
import re
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from grpo_lightning.batch import Prompt, Scored
from grpo_lightning.callbacks.loggers import attempt

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Samples(Callback):
    """Writes texts and histograms of the rollouts that are trained on.

    Args:
        every: Steps between two that are written; the first step always is.
        max_characters: The most characters of a prompt or completion; longer ones are cut.
    """

    def __init__(self, *, every: int, max_characters: int) -> None:
        self.every = every
        self.max_characters = max_characters

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step: int = module.completed_steps  # type: ignore[assignment]
        if not outputs or "scored" not in outputs or (step % self.every and step != 1):
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                with attempt(logger):
                    self._write(logger.experiment, step, **outputs)

    def _write(
        self, writer: Any, step: int, *, scored: Scored, advantages: torch.Tensor, ratio: torch.Tensor, **_: Any
    ) -> None:
        rewards = scored.rewards["total"]
        known = rewards.nan_to_num(-torch.inf)
        rows = {
            "best": int(known.argmax()),
            "worst": int(rewards.nan_to_num(torch.inf).argmin()),
            "random": random.Random(step).randrange(len(rewards)),
        }
        for name, row in rows.items():
            writer.add_text(f"samples/{name}", self.page(scored, advantages, row), step)
        scores = rewards[rewards.isfinite()]
        if len(scores):
            writer.add_histogram("reward/total", scores, step)
        writer.add_histogram("advantage/value", advantages.float(), step)
        writer.add_histogram("completion/length", scored.sampled.mask.sum(-1), step)
        if len(finite := ratio[ratio.isfinite()]):
            writer.add_histogram("policy/ratio", finite.float(), step)

    def page(self, scored: Scored, advantages: torch.Tensor, row: int) -> str:
        """One completion as Markdown: rewards, advantage, prompt and text, the last two fenced."""
        scores = ", ".join(f"{name} {float(values[row]):.3g}" for name, values in scored.rewards.items())
        prompt = self.fence(as_text(scored.prompts.texts[row // scored.group_size]))
        completion = self.fence(scored.sampled.texts[row])
        return (
            f"**rewards** {scores}  \n**advantage** {float(advantages[row]):.3g}\n\n"
            f"**prompt**\n\n{prompt}\n\n**completion**\n\n{completion}"
        )

    def fence(self, text: str) -> str:
        """``text`` as a Markdown code block that it cannot leave: cut, control characters escaped."""
        cut = text[: self.max_characters] + (" […]" if len(text) > self.max_characters else "")
        shown = _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", cut)
        longest = max((len(run) for run in re.findall("`+", shown)), default=0)
        marks = "`" * max(3, longest + 1)
        return f"{marks}text\n{shown}\n{marks}"


def as_text(prompt: Prompt) -> str:
    """A prompt as one text; chat messages with their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"[{one['role']}] {one['content']}" if isinstance(one, dict) else str(one) for one in prompt)
