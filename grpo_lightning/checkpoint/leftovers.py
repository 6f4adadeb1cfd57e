"""What a process that was killed while it wrote has left in a run directory."""

import logging
import re
import shutil
from contextlib import suppress
from pathlib import Path

from grpo_lightning.recording.files import FOLDER, rewind

log = logging.getLogger(__name__)

_STAGED = re.compile(
    r"\.(last|best)\.ckpt\.\d+|\.(summary\w*|preflight|health)\.json\.\d+|\.export\d*\.partial|\.\d+\.jsonl\.gz\.\d+"
)
_PARTS = re.compile(r"last_\d+_\d+\.ckpt")


def sweep(directory: Path, *, keep: Path | None = None, completed: int = 0) -> list[Path]:
    """Remove staged files and unfinished checkpoints of processes that are gone; nobody else may be writing there.

    Rollouts that were recorded after the checkpoint go, too: they are made again. Directories of sharded checkpoints
    are removed where ``last.ckpt`` or ``best.ckpt`` stand, and lead to others. Links stay: none is a process's own, and
    others may lead by way of them.

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
    links = [path for path in (own / "last.ckpt", own / "best.ckpt") if path.exists() or path.is_symlink()]
    used = {link.resolve() for link in (*links, *([keep] if keep else []))}
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
        log.info("removed what a killed process had left: %s", ", ".join(str(path) for path in gone))
    return gone
