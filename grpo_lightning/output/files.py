"""Small files that are replaced as a whole."""

import os
from contextlib import suppress
from pathlib import Path


def replace(path: Path, text: str | bytes, *, by: str | None = None) -> None:
    """Write ``text`` beside ``path`` and rename it: there is the old file or the new one, and no link is followed.

    Args:
        path: The file.
        text: Its new content; a string as UTF-8.
        by: The name under which it is written first; with the process's number unless given.

    Raises:
        OSError: It cannot be written; the old file is as it was.
    """
    staged = path.with_name(by or f".{path.name}.{os.getpid()}")
    staged.unlink(missing_ok=True)
    try:
        with staged.open("xb") as file:  # anew: never through a link that somebody has put there
            file.write(text.encode() if isinstance(text, str) else text)
        staged.replace(path)
    except OSError:
        with suppress(OSError):
            staged.unlink(missing_ok=True)
        raise
