"""Python that this process starts takes no file of the working directory for one of Python's own modules.

Multiprocessing and launchers of jobs start Python with ``-c`` or ``-m``, which look into the working directory before
anything else, and import modules before they are told where to look: a file named ``socket.py`` would run.
"""

import multiprocessing
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from multiprocessing import process, util
from pathlib import Path
from types import FrameType
from typing import Any

from grpo_lightning import start
from grpo_lightning.distributed import alone

_SAFE_PATH, _PATH = "PYTHONSAFEPATH", "PYTHONPATH"
_TOLD = ("GRPO_LIGHTNING_BEGUN", "GRPO_LIGHTNING_GIVEN", "GRPO_LIGHTNING_SETTINGS_FROM")
_PLACES = {"LD_LIBRARY_PATH": re.compile("[:;]"), "PATH": re.compile(":")}
_HERE = "grpo_lightning"
"""A value of the variable that tells it from one of the user's; any but the empty one has the same effect."""

_PYTHON = re.compile(r"python[\w.]*")
_COMPILER = re.compile(r"([\w.]+-)*(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|hipcc|icpx|ld|nvcc)(-[\d.]+)?")
_INSTALLED = {"site-packages", "dist-packages"}
_CWD = 8
"""The place of ``cwd`` among the arguments of ``Popen``, behind the command."""

_ROOT = str(Path(__file__).parents[2])
_spawn = util.spawnv_passfds
_begin = subprocess.Popen.__init__
_PASSED_BY = {*sys.stdlib_module_names, "grpo_lightning"} - {"__main__"}
"""Modules that start programs for others."""


def protect_processes() -> None:
    """Let multiprocessing start Python with the path of this process from the beginning, from now on.

    It sends the path anyway, but late. Libraries that start Python for a question, as torch and vLLM do, start it
    without the working directory on its path. An option, unlike a variable, is not handed on to what a process starts:
    a program that a reward starts finds the files beside it. Nor do shared libraries and programs come from the working
    directory, which an empty element of ``LD_LIBRARY_PATH`` and ``PATH`` means; opencv, which vLLM imports, adds one.
    Compilers run elsewhere.
    """
    util.spawnv_passfds = _spawn_safely
    subprocess.Popen.__init__ = _begin_safely  # type: ignore[assignment,method-assign]


def _spawn_safely(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    _drop_empty(os.environ)
    return _spawn(path, safe(args), passfds)


def _begin_safely(process: Any, args: Any, *others: Any, **options: Any) -> None:
    _drop_empty(os.environ)
    if isinstance(variables := options.get("env"), Mapping):
        options["env"] = _drop_empty(dict(variables))
    if _is_program_of_here() or _is_asked_by_the_user():
        _begin(process, args, *others, **options)
        return
    if is_compiler(args) and len(others) <= _CWD and options.get("cwd") is None:
        options["cwd"] = sys.prefix
    command = without_here(args)
    is_library = command is not args or _is_of_a_library(args)
    if start.START is not None and _ROOT not in sys.path and is_library:  # `pip install -e` may put it there
        variables = os.environ if options.get("env") is None else options["env"]
        options["env"] = {**variables, _PATH: os.pathsep.join(filter(None, [alone.PLACE, variables.get(_PATH)]))}
    _begin(process, command, *others, **options)


def is_compiler(command: Any) -> bool:
    """Whether a command compiles or links what has no relative path: it can be run in any directory.

    In the working directory a linker finds what its own scripts name, such as ``libgcc_s.so.1``; Triton starts one.
    """
    if not isinstance(command, list | tuple) or not command:
        return False
    program, *words = map(os.fsdecode, command)
    if not _COMPILER.fullmatch(os.path.basename(program)) or (os.sep in program and not os.path.isabs(program)):
        return False
    places = [word[2:] if word.startswith(("-I", "-L", "-o")) else word for word in words]
    return all(os.path.isabs(place) for place in places if place and not place.startswith("-"))


def _drop_empty(variables: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """The same variables, of which those that say where shared libraries and programs are have no empty elements."""
    for name, between in _PLACES.items():
        places = between.split(str(variables.get(name, "")))
        if "" in places and len(places) > 1:
            variables[name] = ":".join(filter(None, places))
    return variables


def _is_program_of_here() -> bool:
    """Whether this is a program of the user's own that looks into the working directory itself."""
    return start.START is None and any(place in ("", os.getcwd()) for place in sys.path)


def _is_asked_by_the_user() -> bool:
    """Whether the code that starts a program stands in a file of the user's; in a program of his own, in no library."""
    frame: FrameType | None = sys._getframe(2)
    known = (start.importable() or ("", []))[1]
    while frame is not None:
        top = str(frame.f_globals.get("__name__")).partition(".")[0]
        if top not in _PASSED_BY:
            is_of_library = not _INSTALLED.isdisjoint(Path(frame.f_code.co_filename).parts)
            return top in known or (start.START is None and not is_of_library)
        frame = frame.f_back
    return start.START is None


def _is_of_a_library(command: Any) -> bool:
    """Whether a command starts Python on a file that was installed, as torch's workers are started that compile."""
    if not isinstance(command, list | tuple) or len(command) < 2:
        return False
    program, file = map(os.fsdecode, command[:2])
    return bool(_PYTHON.fullmatch(os.path.basename(program))) and "site-packages" in Path(file).parts


def without_here(command: Any) -> Any:
    """A command that starts Python on anything but a file, without the working directory on its path; others as is."""
    if not isinstance(command, list | tuple) or not command:
        return command
    program = os.fsdecode(command[0])
    if program != sys.executable and not _PYTHON.fullmatch(os.path.basename(program)):
        return command
    words = [os.fsdecode(word) for word in command[1:]]
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            del words[:1]
        elif word[1] not in "WX-" and {*word} & {*"cm"}:
            words.clear()
    return command if words and words[0] != "-" else [command[0], "-P", *command[1:]]


def safe(command: Sequence[Any]) -> list[Any]:
    """A command ``python … -c CODE`` with this process's path instead of the working directory."""
    found = list(command)
    if "-c" in found:
        at = found.index("-c")
        load = ""
        if _ROOT not in sys.path:
            load = f"sys.path.insert(0, {alone.PLACE!r}); import grpo_lightning_alone; "
            load += "".join(f"grpo_lightning_alone.load({name!r}); " for name in alone.beside())
        known = [place or process.ORIGINAL_DIR or os.getcwd() for place in sys.path]  # type: ignore[attr-defined]
        own = start.importable()  # where this process finds files of the user's, which are not on its path
        enter = f"enter(*{own!r}); " if own else ""
        if os.path.lexists("matplotlibrc"):
            enter += "pass_by_settings(); "
        begin = f"from {start.__name__} import enter, pass_by_settings; {enter}" if enter else ""
        found[at : at + 2] = ["-P", "-c", f"import sys; sys.path[:] = {known!r}; {load}{begin}{found[at + 1]}"]
    return found


def protect_jobs() -> None:
    """Let launchers start Python so until `forget`, by variables: their commands are their own."""
    before = os.environ.get(_SAFE_PATH, "")  # to Python an empty one is none
    if not before.startswith(_HERE):
        os.environ[_SAFE_PATH] = f"{_HERE}{before}"
        os.environ[_PATH] = os.pathsep.join([alone.PLACE, *filter(None, [os.environ.get(_PATH)])])


def in_a_shell() -> str:
    """The variables of `protect_jobs` as a command of a shell, for launchers whose jobs get none of this process's.

    With them go what the command line says, without secrets, and where settings come from.
    """
    own = {name: os.environ[name].replace("${", "\\u0024{") for name in _TOLD if name in os.environ}  # for OmegaConf
    values = {_SAFE_PATH: _HERE, _PATH: os.environ.get(_PATH, ""), **own}
    return "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())


def forget() -> None:
    """In a job, take back what its launcher needed and its own processes do not.

    Without the variables of `protect_jobs`, programs that a reward starts find the files beside them. Joblib's way to
    start processes is not known to processes that are started otherwise, which would end at once.
    """
    if multiprocessing.get_start_method(allow_none=True) not in (None, *multiprocessing.get_all_start_methods()):
        multiprocessing.set_start_method(None, force=True)
    if os.environ.get(_SAFE_PATH, "").startswith(_HERE):
        if before := os.environ.pop(_SAFE_PATH).removeprefix(_HERE):
            os.environ[_SAFE_PATH] = before
        if rest := os.environ.pop(_PATH, "").removeprefix(alone.PLACE).removeprefix(os.pathsep):
            os.environ[_PATH] = rest
