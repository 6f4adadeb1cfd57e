"""The newest and the best checkpoint of a run, written between steps only."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import TensorBoardLogger

from grpo_lightning import __version__
from grpo_lightning.checkpoint import io, resume
from grpo_lightning.console import atomic_path, utc_now
from grpo_lightning.distributed.signals import Preempted
from grpo_lightning.logger import warn_on_failure

_KEPT = "the checkpoints of earlier steps stay as before"


class RunCheckpoint(Checkpoint):
    """Keeps ``last.ckpt``, from which a run continues exactly, and ``best.ckpt``.

    Args:
        directory: Where the two files are written.
        every: Steps between checkpoints; one is also written after every validation and after the last step.
        monitor: The metric that says which is best; larger is better.
        events_directory: Where TensorBoard's files are; their lengths are recorded, so that a continued run can remove
            what was written later.

    Raises:
        ValueError: After a validation, if ``monitor`` is none of the metrics.
        CannotSave: Before the first step, if the disk has no room for two checkpoints; or one cannot be written.
    """

    def __init__(self, directory: str, *, every: int, monitor: str, events_directory: str) -> None:
        self.last = Path(directory) / "last.ckpt"
        self.best = Path(directory) / "best.ckpt"
        self.every = every
        self.monitor = monitor
        self.events_directory = Path(events_directory)
        self.best_value = float("-inf")
        self._saved_step: int | None = None
        self._seconds_before = 0.0
        self._started, self._started_at = time.perf_counter(), utc_now()
        self._bytes = 0
        self._data: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        self._bytes = io.checkpoint_bytes(module.policy, module.optimizer, all_weights=module.base is None)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._data = data.fingerprint() if hasattr(data, "fingerprint") else None
        problem = io.room_problem(self.last.parent, checkpoint=self._bytes) if trainer.is_global_zero else None
        if problem := trainer.strategy.broadcast(problem):  # all processes end, none waits for another
            raise io.CannotSave(problem)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        step, every = module.completed_steps, module.validation.every
        validates_now = step == module.steps or (every and step % every == 0)
        # A validation ends with a checkpoint of its own; after the last step other callbacks may replace the weights.
        if (step % self.every == 0 or trainer.should_stop) and not validates_now:
            self._save(trainer, module)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        # A continued run that starts between two validations skips the one before its first step.
        if trainer.state.fn != "fit" or module.validated_at != module.completed_steps:
            return
        if self.monitor.startswith("val/") and self.monitor not in module.metrics:
            raise ValueError(f"sweep_metric={self.monitor} is none of the metrics: {', '.join(sorted(module.metrics))}")
        value = module.metrics.get(self.monitor, float("-inf"))  # training metrics come with the first step
        improved = value > self.best_value
        self.best_value = max(self.best_value, value)
        self._save(trainer, module)
        if improved and trainer.is_global_zero:
            with io.explain_write_errors(self.best, self._bytes, kept=_KEPT):
                _link(self.last, self.best)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        if self._saved_step != module.completed_steps:  # a time limit or another callback has ended the run
            self._save(trainer, module)

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Preempted) and exception.between_steps and trainer.state.fn == "fit":
            self._save(trainer, module)

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            with warn_on_failure(logger):
                logger.save()
                if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                    logger.experiment.flush()
        checkpoint["run"] = {
            "version": __version__,
            "config": module.settings,
            "best": self.best_value,
            "events": resume.event_lengths(self.events_directory),
            "started": self._started_at,
            "seconds": self._seconds_before + time.perf_counter() - self._started,
            "data": self._data,
        }

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.best_value = checkpoint["run"]["best"]
        self._seconds_before = checkpoint["run"].get("seconds", 0.0)
        self._started_at = checkpoint["run"].get("started") or self._started_at
        self._saved_step = checkpoint["step"]["completed"]

    def _save(self, trainer: Trainer, module: Any) -> None:
        with io.explain_write_errors(self.last, self._bytes, kept=_KEPT):
            trainer.save_checkpoint(self.last, weights_only=False)
        self._saved_step = module.completed_steps


def _link(source: Path, destination: Path) -> None:
    """Make ``destination`` a hard link to ``source``, which is only ever replaced; a copy where that is impossible."""
    with atomic_path(destination) as place:
        place.unlink(missing_ok=True)
        if source.is_symlink():  # to the directory of a sharded checkpoint
            place.symlink_to(source.readlink())
            return
        try:
            os.link(source, place)
        except OSError:
            shutil.copyfile(source, place)
