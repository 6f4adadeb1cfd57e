"""The files of recorded rollouts: their names, and lines of strict JSON in them. Nothing heavy is imported."""

import gzip
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_lightning.output.files import replace

FORMAT = "grpo-lightning rollout 1"
"""What the first line of a file calls itself; the number changes with the meaning of a field."""
FOLDER = "rollouts"
"""Where the files are in a run directory."""

_NAME = re.compile(r"(\d{6,12})\.jsonl\.gz")


class Unusable(ValueError):
    """A file or directory does not hold recorded rollouts; the message is one sentence that begins with its path."""


def file_name(step: int) -> str:
    """The name of a step's file, which sorts by step."""
    return f"{step:06d}.jsonl.gz"


def folder(path: str | Path) -> Path:
    """The directory of the files, which is given itself or by its run's directory.

    Raises:
        Unusable: There is no such directory.
    """
    given = Path(path)
    found = given / FOLDER if (given / FOLDER).is_dir() else given
    if not found.is_dir():
        raise Unusable(f"{given} is {'no directory' if given.exists() else 'not there'}")
    return found


def steps(directory: Path) -> dict[int, Path]:
    """The file of every recorded step, in order."""
    named = {int(found[1]): path for path in directory.iterdir() if (found := _NAME.fullmatch(path.name))}
    return {step: named[step] for step in sorted(named)}


def listed(numbers: Collection[int]) -> str:
    """Some steps in words: ``1 to 40, 60`` with the gaps left out, and no more than a line of them."""
    words = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        first, *_, last = [number for _, number in run] * 2
        words.append(str(first) if first == last else f"{first} to {last}")
    shown = words if len(words) <= 8 else [*words[:7], f"… {words[-1]}"]
    return ", ".join(shown) or "none"


def rewind(directory: Path, completed: int) -> list[Path]:
    """Remove the files of steps beyond ``completed``, which will be made again; returns what was removed."""
    gone = [path for step, path in steps(directory).items() if step > completed] if directory.is_dir() else []
    for path in gone:
        path.unlink()
    return gone


def write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write lines beside ``path`` and rename them to it: there is the whole file or none.

    The same lines make the same bytes.

    Raises:
        OSError: They cannot be written; nothing is left of them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n" for line in lines)
    replace(path, gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0))


def header(path: Path) -> dict[str, Any]:
    """The first line of a file: the step and how its rollout came about.

    Raises:
        Unusable: The file is damaged, or no recorded rollout.
    """
    first: Any = next(_lines(path), None)
    told = first.get("format") if isinstance(first, dict) else None
    if told != FORMAT:
        raise Unusable(f"{path} is no recorded rollout: its first line has format={told!r:.60}, and not {FORMAT!r}")
    return dict(first)


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first line of a file, and the others, one for each completion.

    Raises:
        Unusable: The file is damaged, or no recorded rollout.
    """
    return header(path), [*_lines(path)][1:]


def _lines(path: Path) -> Iterator[Any]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from map(json.loads, file)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise Unusable(f"{path} is damaged or not readable ({error})") from error
