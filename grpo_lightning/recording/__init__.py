"""Recorded rollouts: one file per recorded step, gzip of lines of JSON. This module imports nothing heavy."""

import gzip
import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_lightning.console import write_atomic

FORMAT = "grpo-lightning rollout 1"
"""The field "format" of a file's first line; the number changes with the meaning of a field."""
FOLDER = "rollouts"
"""Where the files are in a run directory."""

_NAME = re.compile(r"(\d{6,12})\.jsonl\.gz")


class RecordingError(ValueError):
    """A file or directory does not hold recorded rollouts; the message begins with its path."""


def file_name(step: int) -> str:
    """The name of a step's file."""
    return f"{step:06d}.jsonl.gz"


def find_directory(path: str | Path) -> Path:
    """The directory of the files, from itself or from its run's directory.

    Raises:
        RecordingError: There is no such directory.
    """
    directory = Path(path) / FOLDER if (Path(path) / FOLDER).is_dir() else Path(path)
    if not directory.is_dir():
        raise RecordingError(f"{path} is {'no directory' if directory.exists() else 'not there'}")
    return directory


def recorded_steps(directory: Path) -> dict[int, Path]:
    """The file of every recorded step, by step."""
    return {int(match[1]): path for path in sorted(directory.iterdir()) if (match := _NAME.fullmatch(path.name))}


def format_steps(steps: Collection[int]) -> str:
    """Steps in words, such as ``1 to 40, 60``."""
    ranges = []
    for _, group in groupby(enumerate(sorted(steps)), lambda pair: pair[1] - pair[0]):
        first, *_, last = [step for _, step in group] * 2
        ranges.append(str(first) if first == last else f"{first} to {last}")
    return ", ".join(ranges if len(ranges) <= 8 else [*ranges[:7], f"… {ranges[-1]}"]) or "none"


def rewind(directory: Path, completed: int) -> list[Path]:
    """Remove the files of steps beyond ``completed``, which will be made again; returns what was removed."""
    steps = recorded_steps(directory) if directory.is_dir() else {}
    removed = [path for step, path in steps.items() if step > completed]
    for path in removed:
        path.unlink()
    return removed


def write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write lines to a file, which is complete or absent; the same lines make the same bytes.

    Raises:
        OSError: They cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n" for line in lines)
    write_atomic(path, gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0))


def read_header(path: Path) -> dict[str, Any]:
    """The first line of a file, which describes the rollout.

    Raises:
        RecordingError: The file is damaged, or no recorded rollout.
    """
    return _read(path, header_only=True)[0]


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first line of a file, and the others, one for each completion.

    Raises:
        RecordingError: The file is damaged, or no recorded rollout.
    """
    header, *rows = _read(path)
    return header, rows


def _read(path: Path, *, header_only: bool = False) -> list[dict[str, Any]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = [json.loads(line) for line in ([file.readline()] if header_only else file)]
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise RecordingError(f"{path} is damaged or not readable ({error})") from error
    if not lines or lines[0].get("format") != FORMAT:
        raise RecordingError(f"{path} is no recorded rollout: its first line has no format={FORMAT!r}")
    return lines
