"""What a killed run has left: files in writing, which are removed, and logs, which go back to its checkpoint."""

import logging
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lightning.pytorch.loggers import Logger

from grpo_lightning.checkpoint import resume, tensorboard
from grpo_lightning.logger import csv
from grpo_lightning.recording import FOLDER, rewind

log = logging.getLogger(__name__)

_STAGED = re.compile(
    r"\.(last|best)\.ckpt\.\d+|\.(summary\w*|preflight|health)\.json\.\d+|\.export\d*\.partial|\.\d+\.jsonl\.gz\.\d+"
)
_PARTS = re.compile(r"last_\d+_\d+\.ckpt")


def sweep(directory: Path, *, keep: Path | None = None, completed: int = 0) -> list[Path]:
    """Remove staged files and unfinished checkpoints of processes that are gone; nobody else may be writing there.

    Rollouts that were recorded after the checkpoint go, too: they are made again. Directories of sharded checkpoints
    are removed where ``last.ckpt`` or ``best.ckpt`` stand, and lead to others.

    Args:
        directory: The run directory.
        keep: A checkpoint that stays in any case.
        completed: Steps that the run in this directory has made when it goes on.

    Returns:
        What was removed.
    """
    own = directory / "checkpoints"
    places = [place for place in (directory, own, directory / FOLDER) if place.is_dir()]
    found = [path for place in places for path in place.iterdir() if not path.is_symlink()]
    used = {path.resolve() for path in (own / "last.ckpt", own / "best.ckpt", keep) if path and path.exists()}
    gone = [path for path in found if _STAGED.fullmatch(path.name)]
    if (own / "last.ckpt").exists():
        gone += [p for p in found if _PARTS.fullmatch(p.name) and p.is_dir() and p.resolve() not in used]
    for path in gone:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    with suppress(OSError):
        gone += rewind(directory / FOLDER, completed)
    if gone:
        log.info("removed what a killed process had left: %s", ", ".join(map(str, gone)))
    return gone


def rewind_logs(directory: Path, loggers: Iterable[Logger], events: dict[str, int], *, checkpoint: Path | None) -> None:
    """Remove what was logged of steps that will be made again; of a run that begins all of it.

    Args:
        directory: The run directory.
        loggers: The trainer's.
        events: The lengths of TensorBoard's files that the checkpoint knows.
        checkpoint: From which the run goes on; None: it begins. One of another run says nothing of these logs.
    """
    own = checkpoint is not None and resume.is_own(checkpoint, directory)
    tensorboard.rewind(directory / "tensorboard", events if own else {})
    csv.rewind(loggers, resume.so_far(checkpoint, directory)[0] if own else -1)
