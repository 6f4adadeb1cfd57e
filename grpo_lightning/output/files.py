"""Files that are replaced as a whole, and texts in CSV files, which people open in spreadsheets."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def replace(path: Path, text: str | bytes, *, by: str | None = None) -> None:
    """Write ``text`` beside ``path`` and rename it: there is the old file or the new one.

    Args:
        path: The file.
        text: Its new content; a string as UTF-8.
        by: The name under which it is written first; with the process's number unless given.

    Raises:
        OSError: It cannot be written; the old file is as it was.
    """
    staged = path.with_name(by or f".{path.name}.{os.getpid()}")
    try:
        staged.write_bytes(text.encode() if isinstance(text, str) else text)
        staged.replace(path)
    except OSError:
        with suppress(OSError):
            staged.unlink(missing_ok=True)
        raise


def no_formula(value: Any) -> Any:
    """A cell of a CSV file: an apostrophe stands before what spreadsheets would run as a formula.

    Args:
        value: Of any type; a text that is a number stays.
    """
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value
