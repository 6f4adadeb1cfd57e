"""A run in a process of its own, so that what ends that process does not end everything.

A reward's C code may crash, and the operating system ends what takes too much memory. The process that was started
stays small, waits, hands signals on, and tells what happened; the next job of a sweep starts with a fresh process.
"""

import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_lightning.output import activity
from grpo_lightning.output.summary import write

log = logging.getLogger(__name__)

_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_PR_SET_PDEATHSIG = 1


class Crash(RuntimeError):
    """The process of a run died by a signal; the message says of which and what it was doing."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number
        """The signal."""


def is_possible() -> bool:
    """Whether a run gets a process of its own here.

    It does not where it is one of several processes, whose launcher watches them, where the program is already a
    process of another one's pool, under a debugger, and on systems without ``fork``. The pool of Hydra's launcher
    joblib is no hindrance: its processes have nothing but a job to run.
    """
    launched = {"LOCAL_RANK", "RANK", "SLURM_PROCID"} & os.environ.keys()
    is_of_joblib = type(multiprocessing.current_process()).__module__.startswith("joblib.")
    alone = threading.active_count() == 1 and (multiprocessing.parent_process() is None or is_of_joblib)
    return sys.platform == "linux" and not launched and alone and sys.gettrace() is None


def supervised(work: Callable[[], Any]) -> tuple[int, dict[str, Any]]:
    """Do ``work`` in a forked process and wait for it.

    Args:
        work: What to do; it ends the process by ``SystemExit``, or returns for status 0.

    Returns:
        The exit status, and what was noted by `activity.note`.

    Raises:
        Crash: The process died by a signal.
    """
    activity.share()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # the pages of this process stay shared
    parent = os.getpid()
    numbers = [getattr(signal, name) for name in _FORWARDED if hasattr(signal, name)]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # one that comes now is delivered once both stand
    child = os.fork()
    if child == 0:
        _die_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        _leave(work)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: _hand_on(child, number))
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if os.WIFSIGNALED(status):
        raise Crash(_described(os.WTERMSIG(status), activity.noted()), os.WTERMSIG(status))
    return os.WEXITSTATUS(status), activity.noted()


def _hand_on(child: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, number)


def _die_with(parent: int) -> None:
    """Let the kernel end this process when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _leave(work: Callable[[], Any]) -> None:
    """Do ``work`` and end this process, which must not return into the code that forked it."""
    import atexit
    import traceback

    status = 1
    try:
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        with suppress(BaseException):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _described(number: int, facts: dict[str, Any]) -> str:
    """What happened, in one sentence."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    place = facts.get("doing")
    when = f" in step {facts['step'] + 1}" if "step" in facts else ""
    if number == signal.SIGKILL:
        return (
            f"the run was killed (SIGKILL){when}{f', {place}' if place else ''}: by someone, or by the operating "
            "system because memory ran out"
        )
    if place and place.startswith("reward "):
        return f"{place} crashed the run{when} ({name}): it ends the process from C code, where no error can be caught"
    return f"the run crashed{when}{f', {place}' if place else ''} ({name})"


def write_summary(directory: Path, facts: dict[str, Any], error: Crash, *, overrides: list[str]) -> None:
    """Write ``summary.json`` for a run that could not do so itself; one that had not begun loses nothing of another."""
    if "step" not in facts and (directory / "summary.json").exists():
        return
    write(
        directory,
        {
            "metrics": facts.get("metrics", {}),
            "values": facts.get("values", {}),
            "steps": facts.get("step", 0),
            "seconds": round(facts.get("seconds_before", 0.0) + facts.get("seconds", 0.0), 3),
            "started": facts.get("started"),
            "choices": facts.get("choices", {}),
            "overrides": overrides,
            "status": "failed",
            "error": str(error),
        },
    )
