"""TensorBoard files of a run that was killed: cut back to what the checkpoint knows."""

import os
from contextlib import suppress
from pathlib import Path

SUFFIX = ".grpo"
"""What the names of event files end with, by logger.filename_suffix."""


def position(directory: Path) -> dict[str, int]:
    """The length in bytes of every event file, by name; flush the writer first."""
    lengths = {}
    for path in directory.glob(f"events.out.tfevents.*{SUFFIX}"):
        with suppress(FileNotFoundError):  # somebody clears up at this moment
            lengths[path.name] = path.stat().st_size
    return lengths


def rewind(directory: Path, lengths: dict[str, int]) -> int:
    """Cut every event file to its recorded length and remove those that have none.

    Event files only grow, so what lies beyond the recorded length was written by steps that will run again.

    Args:
        directory: Where the event files are; those without this project's suffix stay as they are.
        lengths: What ``position`` returned when the checkpoint was written; empty for a run that begins.

    Returns:
        How many bytes were removed.
    """
    removed = 0
    for path in sorted(directory.glob(f"events.out.tfevents.*{SUFFIX}")):
        known, size = lengths.get(path.name, 0), path.stat().st_size
        removed += max(0, size - known)
        if not known:
            path.unlink()
        elif known < size:
            os.truncate(path, known)
    return removed
