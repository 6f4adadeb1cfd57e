"""Recording of rollouts, to look at, to score anew and to train on again."""

import logging
import math
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from grpo_lightning import __version__, recording
from grpo_lightning.console import single_line
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rollout.collector import Collected

log = logging.getLogger(__name__)
_RECORDED = ("reward", "advantage", "loss", "rollout")
"""The parts whose settings are recorded, once."""


class RecordRollouts(Callback):
    """Writes a file ``STEP.jsonl.gz`` for some steps, with all that its update was made from.

    The first error in writing is a warning.

    Args:
        directory: Where the files go.
        every: Steps between two that are recorded; the first step always is.

    Raises:
        ValueError: On construction, if ``every`` is below 1.
    """

    def __init__(self, directory: str, *, every: int) -> None:
        if every < 1:
            raise ValueError(f"callbacks.rollouts.every={every}: must be an integer >= 1")
        self.directory = Path(directory)
        self.every = every
        self._policy = ""
        self._has_warned = False

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if isinstance(module, GRPOLightningModule) and self._is_due(module.completed_steps + 1):
            self._policy = recording.fingerprint(module.policy)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
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
        }
