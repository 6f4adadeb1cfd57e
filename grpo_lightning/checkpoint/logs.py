"""The logs of a run that goes on: back to where its checkpoint was written."""

from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch.loggers import Logger

from grpo_lightning.checkpoint import resume, tensorboard
from grpo_lightning.checkpoint.of_others import is_own
from grpo_lightning.logger import csv


def rewind(directory: Path, loggers: Iterable[Logger], events: dict[str, int], *, checkpoint: Path | None) -> None:
    """Remove what was logged of steps that will be made again; of a run that begins all of it.

    Args:
        directory: The run directory.
        loggers: The trainer's.
        events: The lengths of TensorBoard's files that the checkpoint knows.
        checkpoint: From which the run goes on; None: it begins. One of another run says nothing of these logs.
    """
    own = checkpoint is not None and is_own(checkpoint, directory)
    tensorboard.rewind(directory / "tensorboard", events, continues=own)
    csv.rewind(loggers, resume.so_far(checkpoint, directory)[0] if own else -1)
