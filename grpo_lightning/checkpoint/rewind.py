"""Back to the checkpoint: what a killed run has left behind is removed, and its logs are cut back."""

import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from lightning.pytorch.loggers import Logger

from grpo_lightning import recording
from grpo_lightning.checkpoint.resume import belongs_to, recorded_progress
from grpo_lightning.logger import csv

log = logging.getLogger(__name__)

EVENTS_SUFFIX = ".grpo"
"""What the names of this project's event files end with, by ``logger.tensorboard.filename_suffix``."""
_STAGED = re.compile(
    r"\.(last|best)\.ckpt\.\d+|\.(summary\w*|preflight|health)\.json\.\d+|\.export\d*\.partial|\.\d+\.jsonl\.gz\.\d+"
)
_SHARDED = re.compile(r"last_\d+_\d+\.ckpt")


def remove_stale_files(directory: Path, *, keep: Path | None = None, completed: int = 0) -> None:
    """Remove unfinished files of processes that are gone, and rollouts recorded after the checkpoint.

    Nobody else may be writing in the directory. Directories of sharded checkpoints are removed unless ``last.ckpt`` or
    ``best.ckpt`` links to them.

    Args:
        directory: The run directory.
        keep: A checkpoint that stays in any case.
        completed: Steps that the run has made when it continues.
    """
    checkpoints = directory / "checkpoints"
    places = [place for place in (directory, checkpoints, directory / recording.FOLDER) if place.is_dir()]
    present = [path for place in places for path in place.iterdir() if not path.is_symlink()]
    links = (checkpoints / "last.ckpt", checkpoints / "best.ckpt", keep)
    used = {path.resolve() for path in links if path and path.exists()}
    removed = [path for path in present if _STAGED.fullmatch(path.name)]
    if (checkpoints / "last.ckpt").exists():
        removed += [p for p in present if _SHARDED.fullmatch(p.name) and p.is_dir() and p.resolve() not in used]
    for path in removed:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    with suppress(OSError):
        removed += recording.rewind(directory / recording.FOLDER, completed)
    if removed:
        log.info("removed what a killed process had left: %s", ", ".join(map(str, removed)))


def rewind_logs(
    directory: Path, loggers: Iterable[Logger], events: Mapping[str, int], *, checkpoint: Path | None
) -> None:
    """Remove what was logged of steps that will be made again; for a new run, or one from elsewhere, all of it.

    Args:
        directory: The run directory.
        loggers: The trainer's.
        events: The lengths of TensorBoard's files that the checkpoint has recorded.
        checkpoint: From which the run continues; None for a new run.
    """
    resumes = checkpoint is not None and belongs_to(checkpoint, directory)
    rewind_events(directory / "tensorboard", events if resumes else {})
    csv.rewind(loggers, recorded_progress(checkpoint, directory)[0] if resumes else -1)


def event_lengths(directory: Path) -> dict[str, int]:
    """The length in bytes of every event file, by name; flush the writer first."""
    lengths = {}
    for path in directory.glob(f"events.out.tfevents.*{EVENTS_SUFFIX}"):
        with suppress(FileNotFoundError):  # removed by the user at this moment
            lengths[path.name] = path.stat().st_size
    return lengths


def rewind_events(directory: Path, lengths: Mapping[str, int]) -> None:
    """Cut every event file to its recorded length and remove those that have none.

    Event files only grow, so what lies beyond the recorded length was written by steps that will run again. Files
    without this project's suffix stay.
    """
    for path in directory.glob(f"events.out.tfevents.*{EVENTS_SUFFIX}"):
        length = lengths.get(path.name, 0)
        if not length:
            path.unlink()
        elif length < path.stat().st_size:
            os.truncate(path, length)
