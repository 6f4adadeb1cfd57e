"""The files of recorded rollouts: their names, and lines of strict JSON in them. Nothing heavy is imported.

A file may come from anywhere: it is data, its lengths are counted before they are believed, and nothing in it is run.
"""

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_lightning.output.links import leads_elsewhere
from grpo_lightning.output.terminal import one_line
from grpo_lightning.recording.fields import header_problem, row_problem

FOLDER = "rollouts"
"""Where the files are in a run directory."""

_NAME = re.compile(r"(\d{6,12})\.jsonl\.gz")
_LONGEST_LINE = 1 << 26
_LONGEST_FILE = 1 << 32
_LONGEST_TEXTS = 1 << 22
"""Characters of what a completion's line has beside numbers: texts, and the columns of its row of data."""
_LONGEST_TOKEN = 128
"""Characters of the numbers of a token: its id, an entropy and three log-probabilities."""


class Unusable(ValueError):
    """A file or directory does not hold recorded rollouts; the message is one sentence that begins with its path."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def file_name(step: int) -> str:
    """The name of a step's file, which sorts by step."""
    return f"{step:06d}.jsonl.gz"


def folder(path: str | Path) -> Path:
    """The directory of the files, which is given itself or by its run's directory.

    Raises:
        Unusable: There is no such directory, or it is by a link, which may be a stranger's, one of the user's.
    """
    given = Path(path)
    found = given / FOLDER if (given / FOLDER).is_dir() else given
    _check_own(found, given)
    if not found.is_dir():
        raise Unusable(f"{given} is {'no directory' if given.exists() else 'not there'}")
    return found


def steps(directory: Path) -> dict[int, Path]:
    """The file of every recorded step, in order; links inside the directory count, other files do not.

    Raises:
        Unusable: One is by a link a file elsewhere.
    """
    named = {int(found[1]): path for path in directory.iterdir() if (found := _NAME.fullmatch(path.name))}
    for path in named.values():
        _check_own(path, directory)
    return {step: named[step] for step in sorted(named)}


def _check_own(path: Path, directory: Path) -> None:
    if leads_elsewhere(path, directory):
        raise Unusable(f"{path} is by a link a place elsewhere; allowed are a run's own files")


def listed(numbers: Collection[int]) -> str:
    """Some steps in words: ``1 to 40, 60`` with the gaps left out, and no more than a line of them."""
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    shown = words if len(words) <= 8 else [*words[:7], f"… {words[-1]}"]
    return ", ".join(shown) or "none"


def rewind(directory: Path, completed: int) -> list[Path]:
    """Remove the files of steps beyond ``completed``, which will be made again; links stay.

    Returns:
        What was removed.
    """
    if not directory.is_dir() or directory.is_symlink():
        return []
    gone = [path for step, path in steps(directory).items() if step > completed and not path.is_symlink()]
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
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.unlink(missing_ok=True)
    try:
        with staged.open("xb") as file:  # anew: never through a link that somebody has put there
            with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as packed:
                for line in lines:
                    text = json.dumps(line, allow_nan=False, separators=(",", ":"))
                    packed.write(text.encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def header(path: Path) -> dict[str, Any]:
    """The first line of a file: the step and how its rollout came about.

    Raises:
        Unusable: The file is damaged, or no recorded rollout.
    """
    return _checked_header(path, next(_lines(path), None))


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first line of a file, and the others, one for each completion, whose fields fit to one another.

    Raises:
        Unusable: The file is damaged, or no recorded rollout.
    """
    lines = _lines(path)
    first = _checked_header(path, next(lines, None))
    count = first["prompts"] * first["group_size"]
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(lines, 2):
        if len(rows) == count:
            raise Unusable(f"{path} has more than the {count} completions that its first line tells of")
        if problem := row_problem(row, first):
            raise Unusable(f"{path}, line {number}: {problem}")
        rows.append(row)
    if len(rows) != count:
        raise Unusable(f"{path} has {len(rows)} of the {count} completions that its first line tells of")
    return first, rows


def check_bytes(path: Path) -> None:
    """Read a file to its end, and compare its checksum.

    Raises:
        Unusable: It is damaged.
    """
    for _ in _lines(path, parse=lambda _: {}):
        pass


def _lines(path: Path, parse: Callable[[str], Any] | None = None) -> Iterator[Any]:
    size = limit = 0
    try:
        with gzip.open(path, "rb") as file:
            stream = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
            while text := stream.readline(_LONGEST_LINE + 1):
                size += len(text)
                if len(text) > _LONGEST_LINE or (limit and size > limit):
                    raise Unusable(f"{path} is longer than a rollout can be")
                found = (parse if parse and limit else _parsed)(text)
                limit = limit or _most_characters(found, size)  # by the first line
                yield found
    except Unusable:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Unusable(f"{path} is damaged ({error})") from error
    except OSError as error:
        raise Unusable(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{path} holds something else than lines of JSON ({error})") from error


def _most_characters(first: Any, read: int) -> int:
    """How long a file can be whose first line, of ``read`` characters, tells of so many completions and tokens."""
    if header_problem(first):
        return _LONGEST_FILE  # nothing more of it is believed
    tokens = first["prompt_tokens"] + first["completion_tokens"]
    rows = first["prompts"] * first["group_size"]
    told: int = read + rows * (_LONGEST_TEXTS + _LONGEST_TOKEN * tokens)
    return min(told, _LONGEST_FILE)


def _parsed(text: str) -> Any:
    def refused(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refused)


def _checked_header(path: Path, first: Any) -> dict[str, Any]:
    if problem := header_problem(first):
        raise Unusable(f"{path} is no recorded rollout: {problem}")
    if path.name != file_name(first["step"]):
        raise Unusable(f"{path} is the rollout of step {first['step']}; allowed is the name {file_name(first['step'])}")
    checked: dict[str, Any] = first
    return checked
