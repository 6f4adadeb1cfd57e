"""Python that this process starts takes no file of the working directory for one of Python's own modules.

Multiprocessing and launchers of jobs start Python with ``-c`` or ``-m``, which look into the working directory before
anything else, and import modules before they are told where to look: a file named ``socket.py`` would run.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import process, util
from pathlib import Path
from typing import Any

from grpo_lightning import start

_SAFE_PATH, _PATH = "PYTHONSAFEPATH", "PYTHONPATH"
_HERE = "grpo_lightning"
"""A value of the variable that tells it from one of the user's; any but the empty one has the same effect."""

_ROOT = str(Path(__file__).parents[2])
_ALONE = str(Path(__file__).parent / "alone")
"""A directory from which this package is imported wherever it lies, and nothing else that lies beside it."""
_spawn = util.spawnv_passfds


def protect_processes() -> None:
    """Let multiprocessing start Python with the path of this process from the beginning, from now on.

    It sends the path anyway, but late. An option, unlike a variable, is not handed on to what a process starts: a
    program that a reward starts finds the files beside it.
    """
    util.spawnv_passfds = _spawn_safely


def _spawn_safely(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    return _spawn(path, safe(args), passfds)


def safe(command: Sequence[Any]) -> list[Any]:
    """A command ``python … -c CODE`` with this process's path instead of the working directory."""
    found = list(command)
    if "-c" in found:
        at = found.index("-c")
        load = "" if _ROOT in sys.path else f"sys.path.insert(0, {_ALONE!r}); import grpo_lightning_alone; "
        known = [place or process.ORIGINAL_DIR or os.getcwd() for place in sys.path]  # type: ignore[attr-defined]
        own = start.importable()  # where this process finds files of the user's, which are not on its path
        enter = f"enter(*{own!r}); " if own else ""
        if os.path.lexists("matplotlibrc"):
            enter += "pass_by_matplotlibrc(); "
        begin = f"from {start.__name__} import enter, pass_by_matplotlibrc; {enter}" if enter else ""
        found[at : at + 2] = ["-P", "-c", f"import sys; sys.path[:] = {known!r}; {load}{begin}{found[at + 1]}"]
    return found


def protect_jobs() -> None:
    """Let launchers start Python so until `forget`, by variables: their commands are their own."""
    if _SAFE_PATH not in os.environ:
        os.environ[_SAFE_PATH] = _HERE
        os.environ[_PATH] = os.pathsep.join([_ALONE, *filter(None, [os.environ.get(_PATH)])])


def forget() -> None:
    """In a job, take back what its launcher needed and its own processes do not.

    Without the variables of `protect_jobs`, programs that a reward starts find the files beside them. Joblib's way to
    start processes is not known to processes that are started otherwise, which would end at once.
    """
    if multiprocessing.get_start_method(allow_none=True) not in (None, *multiprocessing.get_all_start_methods()):
        multiprocessing.set_start_method(None, force=True)
    if os.environ.get(_SAFE_PATH) == _HERE:
        del os.environ[_SAFE_PATH]
        if rest := os.environ.pop(_PATH, "").removeprefix(_ALONE).removeprefix(os.pathsep):
            os.environ[_PATH] = rest
