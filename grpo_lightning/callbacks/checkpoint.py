"""The newest and the best checkpoint of a run, written between steps only."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from grpo_lightning import __version__
from grpo_lightning.checkpoint import tensorboard
from grpo_lightning.distributed.ranks import Preempted
from grpo_lightning.module.base import StepModule

log = logging.getLogger(__name__)


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
    """

    def __init__(self, directory: str, *, every: int, monitor: str, events_directory: str) -> None:
        self.directory = Path(directory)
        self.every = every
        self.monitor = monitor
        self.events_directory = Path(events_directory)
        self.best = float("-inf")

    @property
    def last(self) -> Path:
        """The newest checkpoint."""
        return self.directory / "last.ckpt"

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
        if improved and trainer.is_global_zero:
            _link(self.last, self.directory / "best.ckpt")

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Preempted | SIGTERMException):  # both come between steps
            self._save(trainer)

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.save()
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.experiment.flush()
        checkpoint["run"] = {
            "version": __version__,
            "config": _steps(module).settings,
            "best": self.best,
            "events": tensorboard.position(self.events_directory),
        }

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.best = checkpoint["run"]["best"]

    def _save(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self.last, weights_only=False)


def _steps(module: LightningModule) -> StepModule:
    if not isinstance(module, StepModule):
        raise TypeError(f"this callback counts the steps of a StepModule, not of {type(module).__name__}")
    return module


def _link(source: Path, destination: Path) -> None:
    """Make ``destination`` the same file as ``source``, which is only ever replaced; a copy where that cannot be."""
    staged = destination.with_name(f".{destination.name}.{os.getpid()}")
    staged.unlink(missing_ok=True)
    if source.is_symlink():  # to the directory of a sharded checkpoint
        staged.symlink_to(source.readlink())
        staged.replace(destination)
        return
    try:
        os.link(source, staged)
    except OSError:
        shutil.copyfile(source, staged)
    staged.replace(destination)
