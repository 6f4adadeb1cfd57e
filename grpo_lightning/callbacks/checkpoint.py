"""Checkpoints that a kill at any moment cannot damage, written between steps only."""

import logging
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from grpo_lightning.callbacks import events
from grpo_lightning.ranks import Preempted
from grpo_lightning.step import StepModule

log = logging.getLogger(__name__)


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint beside its destination, then renames it: there is the old file or the new one, whole.

    Lightning's own goes through ``$TMPDIR``, which may lie on another file system, where a rename is a copy.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        destination = Path(path)
        destination.parent.mkdir(parents=True, exist_ok=True)
        staged = destination.with_name(f".{destination.name}.{os.getpid()}")
        try:
            with staged.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            staged.replace(destination)
        finally:
            staged.unlink(missing_ok=True)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read(Path(path), map_location="cpu" if map_location is None else map_location)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def read(path: Path, *, map_location: Any = "cpu") -> dict[str, Any]:
    """A checkpoint's content, of a sharded one without the weights; only tensors and plain values are accepted.

    Raises:
        ValueError: It is none of this project's checkpoints.
    """
    file = path / "meta.pt" if path.is_dir() else path
    checkpoint: dict[str, Any] = torch.load(file, map_location=map_location, weights_only=True)
    if "step" not in checkpoint:
        raise ValueError(f"checkpoint={str(path)!r} was not written by this program: it has no step counter")
    return checkpoint


def weights(path: Path) -> dict[str, Any]:
    """The weights in a checkpoint, whether it is one file or a directory of shards."""
    if not path.is_dir():
        found: dict[str, Any] = read(path)["state_dict"]
        return found
    with TemporaryDirectory() as directory:
        whole = Path(directory) / "whole.pt"
        dcp_to_torch_save(path, whole)
        content: dict[str, Any] = torch.load(whole, weights_only=True)
    joined: dict[str, Any] = content["state_dict"]
    return joined


class RunCheckpoint(Checkpoint):
    """Keeps ``last.ckpt``, from which a run continues exactly, and ``best.ckpt``.

    Args:
        directory: Where they lie.
        every: Steps between checkpoints; one is also written after every validation and after the last step.
        monitor: The metric that says which is best; larger is better.
        events_directory: Of TensorBoard files, whose length is recorded so that a resumed run can cut what came later.
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
            "config": _steps(module).config,
            "best": self.best,
            "events": events.position(self.events_directory),
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
    """``destination`` becomes the same file as ``source``, which is replaced, never written to; else a copy."""
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
