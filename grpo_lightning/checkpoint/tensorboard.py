"""TensorBoard files of a run that was killed: cut back to what the checkpoint knows."""

import os
from contextlib import suppress
from pathlib import Path

SUFFIX = ".grpo"
"""What the names of event files end with, by logger.filename_suffix."""


def position(directory: Path) -> dict[str, int]:
    """The length in bytes of every event file, by name; flush the writer first."""
    lengths = {}
    for path in _files(directory):
        with suppress(FileNotFoundError):  # somebody clears up at this moment
            lengths[str(path.relative_to(directory))] = path.stat().st_size
    return lengths


def rewind(directory: Path, lengths: dict[str, int], *, continues: bool = True) -> int:
    """Cut every event file to its recorded length and remove those that have none.

    Event files only grow, so what lies beyond the recorded length was written by steps that will run again. Only files
    in ``directory`` itself are removed, and links are never followed: there may be others' logs.

    Args:
        directory: Where the event files are.
        lengths: What ``position`` returned when the checkpoint was written.
        continues: Whether the run of this very directory goes on. Else only files with this project's suffix, of a run
            that was killed before its first checkpoint, are removed, and all others stay as they are.

    Returns:
        How many bytes were removed.
    """
    removed = 0
    for path in _files(directory):
        known, size = lengths.get(str(path.relative_to(directory)), 0) if continues else 0, path.stat().st_size
        if known:
            removed += max(0, size - known)
            if known < size:
                os.truncate(path, known)
        elif path.parent == directory and not directory.is_symlink() and (continues or path.name.endswith(SUFFIX)):
            removed += size
            path.unlink()
    return removed


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.rglob("events.out.tfevents.*") if path.is_file() and not path.is_symlink())
