"""The directory in which the command line was started, and the user's modules that lie in it.

It is not on Python's path before settings name one of them: libraries import what may be installed, such as ``triton``
or ``pynvml``, and would run any file of that name.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

START: Path | None = None
"""The directory in which the command line was started; None in a program, which has its own path."""


def place() -> Path:
    """The directory below which Python files are the user's."""
    return START or Path.cwd().resolve()


def spec_of(top: str) -> ModuleSpec | None:
    """Where a module without a package is: on Python's path or else in the directory of the start.

    Nothing is imported.
    """
    found = _installed(top)
    return PathFinder.find_spec(top, [str(START)]) if found is None and START is not None else found


def make_importable(top: str) -> None:
    """Put the directory of the start on Python's path, last, if that is where a module that settings name lies."""
    if START is not None and str(START) not in sys.path and _installed(top) is None and spec_of(top) is not None:
        sys.path.append(str(START))


def _installed(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
