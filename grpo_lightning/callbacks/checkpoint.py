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
from grpo_lightning.checkpoint import io, rewind
from grpo_lightning.console import atomic_path
from grpo_lightning.distributed.signals import Preempted
from grpo_lightning.logger.base import warn_on_failure
from grpo_lightning.module.base import StepModule
from grpo_lightning.supervisor import recorded_status


class RunCheckpoint(Checkpoint):
    """Keeps ``last.ckpt``, from which a run continues exactly, and ``best.ckpt``.

    Args:
        directory: Where the two files are written.
        every: Steps between checkpoints; one is also written after every validation and after the last step.
        monitor: The metric that says which is best; larger is better.
        events_directory: Where TensorBoard's files are; their lengths are recorded, so that a resumed run can cut off
            what was written later.

    Raises:
        ValueError: After a validation, if ``monitor`` is none of the metrics.
        CannotSave: Before the first step, if the disk has no room for two checkpoints; or one cannot be written.
    """

    def __init__(self, directory: str, *, every: int, monitor: str, events_directory: str) -> None:
        self.directory = Path(directory)
        self.every = every
        self.monitor = monitor
        self.events_directory = Path(events_directory)
        self.best = float("-inf")
        self._saved_step: int | None = None
        self._seconds_before = 0.0
        self._started = time.perf_counter()
        self._bytes = 0
        self._data: dict[str, Any] | None = None

    @property
    def last(self) -> Path:
        """The newest checkpoint."""
        return self.directory / "last.ckpt"

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        steps = _steps(module)
        self._bytes = io.checkpoint_bytes(steps.policy, steps.optimizer, all_weights=steps.base is None)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._data = data.fingerprint() if hasattr(data, "fingerprint") else None
        problem = None
        if trainer.is_global_zero:
            try:
                io.check_room(self.directory, checkpoint=self._bytes)
            except io.CannotSave as error:
                problem = str(error)
        if problem := trainer.strategy.broadcast(problem):  # all processes end, none waits for another
            raise io.CannotSave(problem)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        done = _steps(module).completed_steps
        every = _steps(module).validation.every
        validates_now = done == _steps(module).steps or (every and done % every == 0)
        if done % self.every == 0 and not validates_now:  # a validation ends with a checkpoint of its own
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        metrics = _steps(module).metrics
        if _steps(module).validated_at != _steps(module).completed_steps:
            return  # nothing was validated: a resumed run that starts between two validations
        value = metrics.get(self.monitor, float("-inf"))  # training metrics come with the first step
        if self.monitor.startswith("val/") and self.monitor not in metrics:
            raise ValueError(f"sweep_metric={self.monitor}: allowed is one of {', '.join(sorted(metrics))}")
        improved = value > self.best
        self.best = max(self.best, value)
        self._save(trainer)
        best = self.directory / "best.ckpt"
        if improved and trainer.is_global_zero:
            with io.explain_write_errors(best, self._bytes, kept=self._kept):
                _link(self.last, best)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        # whoever has ended it: a time limit, or a callback of the user's
        if self._saved_step != _steps(module).completed_steps:
            self._save(trainer)

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Preempted) and exception.between_steps and trainer.state.fn == "fit":
            self._save(trainer)

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            with warn_on_failure(logger):
                logger.save()
                if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                    logger.experiment.flush()
        checkpoint["run"] = {
            "version": __version__,
            "config": _steps(module).settings,
            "best": self.best,
            "events": rewind.event_lengths(self.events_directory),
            "started": recorded_status().get("started"),
            "seconds": self._seconds_before + time.perf_counter() - self._started,
            "data": self._data,
        }

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.best = checkpoint["run"]["best"]
        self._seconds_before = checkpoint["run"].get("seconds", 0.0)
        self._saved_step = checkpoint["step"]["completed"]

    def _save(self, trainer: Trainer) -> None:
        with io.explain_write_errors(self.last, self._bytes, kept=self._kept):
            trainer.save_checkpoint(self.last, weights_only=False)
        self._saved_step = _steps(trainer.lightning_module).completed_steps

    def _kept(self) -> str:
        known = [path.name for path in (self.last, self.directory / "best.ckpt") if path.exists()]
        return f"{' and '.join(known)} of earlier steps stay as before" if known else "there is no earlier one"


def _steps(module: LightningModule) -> StepModule:
    if not isinstance(module, StepModule):
        raise TypeError(f"this callback counts the steps of a StepModule, not of {type(module).__name__}")
    return module


def _link(source: Path, destination: Path) -> None:
    """Make ``destination`` the same file as ``source``, which is only ever replaced; a copy where that cannot be."""
    with atomic_path(destination) as place:
        place.unlink(missing_ok=True)
        if source.is_symlink():  # to the directory of a sharded checkpoint
            place.symlink_to(source.readlink())
            return
        try:
            os.link(source, place)
        except OSError:
            shutil.copyfile(source, place)
