"""Files that are replaced as a whole, and texts in CSV files, which people open in spreadsheets."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


@contextmanager
def staged(path: Path, *, by: str | None = None) -> Iterator[Path]:
    """A name beside ``path`` to write under, which takes its place at the end: there is the old file or the new one.

    Args:
        path: The file.
        by: The name; with the process's number unless given.
    """
    place = path.with_name(by or f".{path.name}.{os.getpid()}")
    try:
        yield place
        place.replace(path)
    except BaseException:
        with suppress(OSError):
            place.unlink(missing_ok=True)
        raise


def replace(path: Path, text: str | bytes, *, by: str | None = None) -> None:
    """Write ``text`` to ``path``, all of it or nothing.

    Args:
        path: The file.
        text: Its new content; a string as UTF-8.
        by: As in `staged`.

    Raises:
        OSError: It cannot be written; the old file is as it was.
    """
    with staged(path, by=by) as place:
        place.write_bytes(text.encode() if isinstance(text, str) else text)


def no_formula(value: Any) -> Any:
    """A cell of a CSV file: an apostrophe stands before what spreadsheets would run as a formula.

    Args:
        value: Of any type; a text that is a number stays.
    """
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value
