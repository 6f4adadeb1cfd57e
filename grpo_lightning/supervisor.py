"""Supervision of a run, which has a process of its own so that what ends that process does not end everything.

A reward's C code may crash, and the operating system kills what takes too much memory. The process that was started
stays small, waits, forwards signals, and tells what happened; the next job of a sweep starts with a fresh process.
Both share a page of memory, on which the run records its status.
"""

import ctypes
import gc
import json
import logging
import mmap
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_lightning.console import write_summary

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_FORWARDED = [number for number in signal.Signals if number.name in _NAMES]
_PR_SET_PDEATHSIG = 1
_PAGE_SIZE = 2**20  # bytes, of which the system takes those that are written to

_page: mmap.mmap | None = None
_status: dict[str, Any] = {}


def share_status() -> None:
    """Begin a new status, on memory that processes forked from now on share with this one."""
    global _page
    _page = mmap.mmap(-1, _PAGE_SIZE)
    _status.clear()


def record_status(**values: Any) -> None:
    """Record plain values by name, in place of earlier ones, where the supervisor can read them after a crash."""
    _status.update(values)
    if _page is not None and len(text := json.dumps(_status).encode()) <= _PAGE_SIZE - 8:
        # The length comes first and is 0 meanwhile, so that a process that dies here leaves nothing half written.
        _page[:8] = bytes(8)
        _page[8 : 8 + len(text)] = text
        _page[:8] = len(text).to_bytes(8, "little")


@contextmanager
def doing(activity: str) -> Iterator[None]:
    """Inside, ``activity`` is what the process does; afterwards what it did before."""
    before = _status.get("doing")
    record_status(doing=activity)
    try:
        yield
    finally:
        record_status(doing=before)


def recorded_status() -> dict[str, Any]:
    """What was recorded, by this process or by the one that it supervises."""
    if _page is None:
        return dict(_status)
    length = int.from_bytes(_page[:8], "little")
    status: dict[str, Any] = json.loads(_page[8 : 8 + length]) if length else {}
    return status


class Crash(RuntimeError):
    """The process of a run died by a signal; the message says of which and what it was doing."""


def can_supervise() -> bool:
    """Whether a run gets a process of its own here: not below a launcher, in a pool, in a debugger, or without fork.

    The pool of Hydra's launcher joblib is no hindrance: its processes have nothing but a job to run.
    """
    launched = {"LOCAL_RANK", "RANK", "SLURM_PROCID"} & os.environ.keys()
    is_of_joblib = type(multiprocessing.current_process()).__module__.startswith("joblib.")
    is_main = threading.active_count() == 1 and (multiprocessing.parent_process() is None or is_of_joblib)
    return sys.platform == "linux" and not launched and is_main and sys.gettrace() is None


def supervise(run: Callable[[], Any]) -> tuple[int, dict[str, Any]]:
    """Call ``run`` in a forked process; returns its exit status and the `recorded_status`.

    Raises:
        Crash: The process died by a signal.
    """
    share_status()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # the pages of this process stay shared
    parent = os.getpid()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # one that comes now arrives once both are ready
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the kernel ends this process with its parent
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        _run_and_exit(run)

    def forward(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    before = {number: signal.getsignal(number) for number in _FORWARDED}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, forward)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if os.WIFSIGNALED(status):
        raise Crash(_describe_crash(os.WTERMSIG(status), recorded_status()))
    return os.WEXITSTATUS(status), recorded_status()


def _run_and_exit(run: Callable[[], Any]) -> None:
    """Call ``run`` and end this process, which must not return into the code that forked it."""
    import atexit
    import traceback

    status = 1
    try:
        run()
        status = 0
    except SystemExit as end:
        status = exit_status(end)
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


def exit_status(end: SystemExit) -> int:
    """The status that a process ends with: 1 for a text."""
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def _describe_crash(number: int, status: dict[str, Any]) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    activity = status.get("doing") or ""
    step = f" in step {status['step'] + 1}" if "step" in status else ""
    if number != signal.SIGKILL and activity.startswith("reward "):
        return f"{activity} crashed the run{step} ({name}): its C code ended the process, so no error can be caught"
    where = f"{step}, {activity}" if activity else step
    if number == signal.SIGKILL:
        return f"the run was killed (SIGKILL){where}: by someone, or by the system because memory ran out"
    return f"the run crashed{where} ({name})"


def write_crash_summary(directory: Path, crash: Crash, *, overrides: Sequence[str]) -> None:
    """Write ``summary.json`` for a run that could not do so itself; one without a step replaces no older summary."""
    status = recorded_status()
    if "step" not in status and (directory / "summary.json").exists():
        return
    write_summary(
        directory,
        {
            "metrics": status.get("metrics", {}),
            "values": status.get("values", {}),
            "steps": status.get("step", 0),
            "seconds": round(status.get("seconds_before", 0.0) + status.get("seconds", 0.0), 3),
            "started": status.get("started"),
            "choices": status.get("choices", {}),
            "overrides": list(overrides),
            "status": "failed",
            "error": str(crash),
        },
    )
