"""Worker processes for reward functions that could hang, crash or eat the memory on odd text.

One pool for all rewards of a process, started at first use. Workers are forked from a server that is started afresh, so
they inherit neither the trainer's threads nor its GPU; each runs one completion at a time and is ended when that takes
too long. Like every program that uses `multiprocessing`, a script of one's own needs ``if __name__ == "__main__":``.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

_MOST_WORKERS = 8
_MOST_MEMORY = 4 * 2**30  # bytes that one worker may allocate
_GRACE_SECONDS = 5.0  # after its time-out a worker ends by itself, should there be no trainer left to end it
_SHOWN_CHARACTERS = 300

_pool: ProcessPool | None = None
_workers: int | None = None


@dataclass(frozen=True)
class Failure:
    """What a row got instead of a value."""

    kind: str
    """timeout, exception or crash"""
    message: str


class Pending:
    """Rows that workers are busy with."""

    def __init__(self, futures: Sequence[ProcessFuture[Any]]) -> None:
        self._futures = futures

    def result(self) -> list[Any]:
        """Wait for all rows; one value or `Failure` each, in their order."""
        return [_outcome(future) for future in self._futures]


def submit(function: Callable[..., Any], rows: Sequence[Mapping[str, Any]], *, seconds: float) -> Pending:
    """Start ``function(**row)`` for every row, each in whatever worker is free.

    Args:
        function: Pickled to the workers, so it must be importable: of a module, not a lambda. What it takes to unpickle
            it, imports above all, does not count as a row's time.
        rows: Keyword arguments.
        seconds: For one row from its start; a worker that takes longer is ended, and another one takes its place.

    Raises:
        ValueError: ``function`` or a row cannot be pickled.
    """
    try:
        pickle.dumps((function, rows))
    except Exception as error:
        raise ValueError(
            f"{function!r} cannot run in a worker process: {error}; allowed are functions of a module, with plain "
            "values as arguments"
        ) from error
    pool = _running(function)
    return Pending([pool.schedule(_run, args=[function, dict(row), seconds], timeout=seconds) for row in rows])


def configure(workers: int | None) -> None:
    """How many workers to start: ends those that run. None: one per core of this device, at most 8."""
    global _workers
    close()
    _workers = workers


def close() -> None:
    """End the workers; the next use starts others."""
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        pool.stop()
        pool.join()


def _running(function: Callable[..., Any]) -> ProcessPool:
    global _pool
    if _pool is not None and not _pool.active:
        close()
    if _pool is None:
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload([name for name in (__name__, _module(function)) if name != "__main__"])
        _pool = ProcessPool(max_workers=_workers or _default_workers(), context=context, initializer=_prepare)
        atexit.register(close)
    return _pool


def _default_workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_WORKERS, max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _module(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


def _prepare() -> None:
    """Runs in every worker before its first row."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a function prints is not for the trainer's terminal
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has none, and other systems other limits
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run(function: Callable[..., Any], row: Mapping[str, Any], seconds: float) -> Any:
    """One row in a worker: a value that surely survives the way back, or a `Failure`."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE_SECONDS)
    try:
        return pickle.loads(pickle.dumps(function(**row)))
    except BaseException as error:  # sys.exit too: whatever it is, the next row is another one's
        return Failure("exception", f"{type(error).__name__}: {_text(error)}"[:_SHOWN_CHARACTERS])
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "its text cannot be shown"


def _outcome(future: ProcessFuture[Any]) -> Any:
    try:
        return future.result()
    except TimeoutError as error:
        return Failure("timeout", f"took longer than {error.args[-1]:g} s" if len(error.args) > 1 else str(error))
    except ProcessExpired as error:
        return Failure("crash", f"its worker died with exit code {error.exitcode}")
    except CancelledError:
        return Failure("crash", "the pool was closed")
    except Exception as error:
        return Failure("exception", f"{type(error).__name__}: {_text(error)}"[:_SHOWN_CHARACTERS])
