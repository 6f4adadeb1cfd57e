"""What a stage says while it runs: its figures so far, which are then not lost when it is ended; and its time left."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """A stage cannot be run here; the message says why."""


class _Report:
    """The file of the stage that runs in this process, if there is one, and what it holds."""

    path: Path | None = None
    ends: float = float("inf")
    held: dict[str, Any] = {}  # noqa: RUF012 (one process has one stage)


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


@contextmanager
def reported(path: Path, seconds: float, **about: Any) -> Iterator[None]:
    """Inside, what is kept goes into this file, and there are so many seconds."""
    _Report.path, _Report.ends, _Report.held = path, time.monotonic() + seconds, {}
    try:
        keep(**about)
        yield
    finally:
        _Report.path, _Report.ends = None, float("inf")


def keep(**figures: Any) -> None:
    """Add figures to the file of this process's stage; without one nothing is kept."""
    if _Report.path is not None:
        _Report.held |= figures
        write(_Report.path, _Report.held)


def seconds_left() -> float:
    """Until this process's stage is ended."""
    return _Report.ends - time.monotonic()


def enough(seconds: float, what: str, left_out: list[str]) -> bool:
    """Whether this process's stage has so many seconds left; else ``what`` is added to what it leaves out."""
    if seconds_left() >= seconds:
        return True
    left_out.append(f"{what}: no time was left")
    return False
