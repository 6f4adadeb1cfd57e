"""Links that lie so deep that no whole path to them may be asked for: `os.path.realpath` takes them for plain names."""

import os
from pathlib import Path

_NAME, _DEPTH = "d" * 250, 18
STEPS = _DEPTH + 1
"""How many folders `os.path.realpath` sees between a folder and what lies at the end of such a link's path."""


def led_away(folder: Path, target: Path) -> str:
    """A path below a folder that leads to another directory, and to ``d…/d…/end`` in the folder for `os.path.realpath`.

    Args:
        folder: In which 18 folders are made, one in another, with a link ``end`` in the last, and a link ``begin``.
        target: Where that link leads to.

    Returns:
        The path, relative to the folder and short enough to be opened.
    """
    at = os.open(folder, os.O_RDONLY)
    for _ in range(_DEPTH):
        os.mkdir(_NAME, dir_fd=at)
        below = os.open(_NAME, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.symlink(target, "end", dir_fd=at)
    os.close(at)
    (folder / "begin").symlink_to("/".join([_NAME] * (_DEPTH - 3)))
    return "/".join(["begin", *[_NAME] * 3, "end"])
