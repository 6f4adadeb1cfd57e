"""TensorBoard files of a run that was killed: cut back to what the checkpoint knows."""

import os
from pathlib import Path


def position(directory: Path) -> dict[str, int]:
    """The length in bytes of every event file, by name; flush the writer first."""
    return {str(path.relative_to(directory)): path.stat().st_size for path in _files(directory)}


def rewind(directory: Path, lengths: dict[str, int]) -> int:
    """Cut every event file to its recorded length and remove those that have none.

    Event files only grow, so what lies beyond the recorded length was written by steps that will run again.

    Args:
        directory: Where the event files are.
        lengths: What ``position`` returned when the checkpoint was written.

    Returns:
        How many bytes were removed.
    """
    removed = 0
    for path in _files(directory):
        known, size = lengths.get(str(path.relative_to(directory)), 0), path.stat().st_size
        removed += max(0, size - known)
        if not known:
            path.unlink()
        elif known < size:
            os.truncate(path, known)
    return removed


def _files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("events.out.tfevents.*"))
