"""The process that becomes the program: it gives up its rights, then runs the text."""

import atexit
import io
import linecache
import os
import random
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from grpo_lightning.sandbox import kernel, landlock, seccomp

NAME = "program.py"
"""What tracebacks call the text."""
READY = b"."
"""What is said once all rights are given up; anything else is the reason why the program was not run."""

_FAILED = 70  # the exit status of a process that could not give up its rights
_SAID = 3  # where READY goes, beside stdin, stdout and stderr
_MOST_OPEN_FILES = 64
_MOST_OF_SERVER = 1024  # which has a dozen files open
_STACK = 64 * 2**20  # bytes that the first thread's may grow to
_LIKELY = "1000"  # the first process to end where the machine runs out of memory


@dataclass(frozen=True)
class Given:
    """What a program gets, and what it may take."""

    files: Sequence[int]
    """Its text, stdin, stdout and stderr, open."""
    said: int
    """Where `READY` goes."""
    rules: int
    """Of `landlock.rules`."""
    directory: str
    limits: Mapping[str, Any]
    """As `grpo_lightning.sandbox.Limits` has them."""


def become(given: Given, parent: int) -> NoReturn:
    """Turn this process, which was forked to that end, into the program; never returns.

    Args:
        given: What the program gets.
        parent: The process that forked it, with which it ends.
    """
    leave, code = os._exit, _FAILED  # whatever the program makes of os._exit
    try:
        text = _read(given.files[0])
        try:
            _give_up(given, parent)
        except BaseException as error:
            needs = f"it needs {error}" if isinstance(error, kernel.Missing) else f"{type(error).__name__}: {error}"
            os.write(given.said, needs.encode(errors="replace")[:500])
        else:
            code = _run(text)
    finally:
        leave(code)


def _read(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 2**20):
        parts.append(part)
    return b"".join(parts)


def _give_up(given: Given, parent: int) -> None:
    """Give up what a program must not have; in this order, since each step needs rights that later ones take away."""
    os.chdir(given.directory)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as adjusted:
        adjusted.write(_LIKELY)
    _limit(given.limits)
    kernel.drop_capabilities()  # after the limits, which root could raise again
    kernel.end_with_parent(parent, signal.SIGKILL)
    kernel.prctl(kernel.NO_NEW_PRIVILEGES, 1)  # which both filters need
    landlock.restrict(given.rules)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seccomp.install()
    for place, opened in enumerate((*given.files[1:], given.said)):
        os.dup2(opened, place)  # all of them are 3 or more, and what is 3 comes last or was copied before
    os.write(_SAID, READY)
    os.closerange(_SAID, _MOST_OF_SERVER)


def _limit(limits: Mapping[str, Any]) -> None:
    memory, stack = limits["memory_mb"] * 2**20, resource.getrlimit(resource.RLIMIT_STACK)[1]
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_STACK, _STACK if stack == resource.RLIM_INFINITY else min(_STACK, stack)),
        (resource.RLIMIT_FSIZE, max(limits["file_bytes"], limits["output_bytes"] + 1)),
        (resource.RLIMIT_NOFILE, _MOST_OPEN_FILES),
        *((one, 0) for one in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE)),
    ):
        resource.setrlimit(kind, (most, most))
    # The first limit is a signal that a program can catch, the second none.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_seconds"], limits["cpu_seconds"] + 1))


def _run(text: bytes) -> int:
    """Run the text as the main module of an interpreter; returns the exit status.

    `random` begins at the same place every time, as hashes do: the same program on the same input prints the same.
    """
    flush = _fresh(text)
    try:
        exec(compile(text, NAME, "exec", dont_inherit=True), vars(sys.modules["__main__"]))
        code = 0
    except SystemExit as left:
        code = _status(left.code)
    except BaseException as error:
        code = 1
        _show(error)
    try:
        getattr(threading, "_shutdown", int)()  # waits for threads that are no daemons
        getattr(atexit, "_run_exitfuncs", int)()
        flush()
    except BaseException as error:
        code = code or 120  # as Python has it for output that cannot be written
        _show(error)
    return code


def _fresh(text: bytes) -> Callable[[], None]:
    """Make this interpreter look as if it had just begun; returns what writes its buffered output."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("grpo_lightning", "__main__")]:
        del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = [NAME]
    os.environ.clear()
    stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    stdout, stderr = (io.BufferedWriter(io.FileIO(number, "w", closefd=False)) for number in (1, 2))
    out, err = (
        io.TextIOWrapper(stdout, "utf-8"),
        io.TextIOWrapper(stderr, "utf-8", "backslashreplace", line_buffering=True),
    )
    for name, stream in (("stdin", stdin), ("stdout", out), ("stderr", err)):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    random.seed(0)
    lines = text.decode(errors="replace").splitlines(keepends=True)
    linecache.cache[NAME] = (len(text), None, lines, NAME)  # for tracebacks and `inspect`

    def flush() -> None:
        if not out.closed:
            out.flush()

    return flush


def _status(code: object) -> int:
    """The exit status of ``sys.exit(code)``."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    with suppress(BaseException):
        print(code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Print an exception as Python does at its end, from the program's first line on."""
    with suppress(BaseException):
        begin = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(type(error), error, begin, file=sys.stderr)
        sys.stderr.flush()
