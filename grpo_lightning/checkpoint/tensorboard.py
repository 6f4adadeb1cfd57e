"""TensorBoard files of a run that was killed: cut back to what the checkpoint knows."""

import os
from contextlib import suppress
from pathlib import Path

from grpo_lightning.output.files import replace

SUFFIX = ".grpo"
"""What the names of event files end with, by logger.filename_suffix."""


def position(directory: Path) -> dict[str, int]:
    """The length in bytes of every event file, by name; flush the writer first."""
    lengths = {}
    for path in _files(directory):
        with suppress(FileNotFoundError):  # somebody clears up at this moment
            lengths[path.name] = path.stat().st_size
    return lengths


def rewind(directory: Path, lengths: dict[str, int], *, continues: bool = True) -> int:
    """Cut every event file to its recorded length and remove those that have none.

    Event files only grow, so what lies beyond the recorded length was written by steps that will run again. Only files
    with this project's suffix in ``directory`` itself are changed, and links are never followed: there may be others'
    logs, whatever a checkpoint says of them.

    Args:
        directory: Where the event files are.
        lengths: What ``position`` returned when the checkpoint was written.
        continues: Whether the run of this very directory goes on. Else all these files are removed, as those of a run
            that was killed before its first checkpoint.

    Returns:
        How many bytes were removed.
    """
    removed = 0
    for path in _files(directory):
        known, size = lengths.get(path.name, 0) if continues else 0, path.stat().st_size
        removed += max(0, size - known)
        if not known:
            path.unlink()
        elif known < size:
            _cut(path, known)
    return removed


def _cut(path: Path, length: int) -> None:
    """Cut a file; one of several names of it, as in a backup of hard links, becomes a file of its own."""
    if path.lstat().st_nlink > 1:
        with path.open("rb") as file:
            replace(path, file.read(length), by=f".{path.name}")
    else:
        os.truncate(path, length)


def _files(directory: Path) -> list[Path]:
    if directory.is_symlink() or not directory.is_dir():
        return []
    found = directory.glob(f"events.out.tfevents.*{SUFFIX}")
    return sorted(path for path in found if path.is_file() and not path.is_symlink())
