"""Worker processes for reward functions that could hang, crash or eat the memory on odd text.

One pool for all rewards of a process, started at first use. Workers are forked from a server that is started afresh, so
they inherit neither the trainer's threads nor its GPU. A row's time is an alarm of its worker, which the kernel keeps:
it ends C code that never returns to Python, however busy the trainer is, even when that is gone. Like every program
that uses `multiprocessing`, a script of one's own needs ``if __name__ == "__main__":``.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from grpo_lightning.config.redaction import single_line
from grpo_lightning.console import survive_closed_pipes
from grpo_lightning.distributed import signals
from grpo_lightning.reward.spec import describe_error, to_plain

MOST_WORKERS = 8
_MOST_MEMORY = 4 * 2**30  # bytes that one worker may allocate
_MOST_STARTS = 3  # of workers for the same row
_SPARE_SECONDS = 60.0  # to import a function; also, how late a row is ended that switches its alarm off
_MOST_WRAPPED = 3  # partials and PerCompletions around a function
_SLICE = 0.25  # s between two looks at whether the trainer was asked to end
_FOR_TRAINER = [
    number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
]

_pool: ProcessPool | None = None
_is_forked = False
_unpickled = functools.lru_cache(maxsize=16)(pickle.loads)


@dataclass(frozen=True)
class Failure:
    """What a row got instead of a value."""

    kind: str
    """What happened: timeout, exception or crash; of environments also reply, which the policy cannot read."""
    message: str


class Pending:
    """Rows that workers are busy with."""

    def __init__(self, function: Callable[..., Any], tasks: Sequence[tuple[bytes, bytes, float]]) -> None:
        self._function, self._tasks = function, tasks
        self._futures: dict[int, ProcessFuture[Any]] = {}
        self._pool: ProcessPool | None = None
        self._unable: Exception | None = None
        self._schedule(range(len(tasks)))

    def result(self, poll: Callable[[], None] | None = None) -> list[Any]:
        """Wait for all rows; one value or `Failure` each, in their order.

        Args:
            poll: Called four times a second meanwhile; may raise to give up.

        Raises:
            ValueError: A worker cannot import the function.
            RuntimeError: Workers cannot be started.
        """
        for _ in range(_MOST_STARTS - 1):
            self._schedule(self._lost(poll))  # a worker died between two rows, or the pool was closed
        if self._lost(poll):
            raise RuntimeError(
                "the worker processes of rewards do not start, for reasons that they wrote above: a script needs "
                '`if __name__ == "__main__":` around what it does, and a daemonic process cannot have any'
            ) from self._unable
        return [self._outcome(row) for row in range(len(self._tasks))]

    def _schedule(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        unable: ProcessFuture[Any] = ProcessFuture()
        self._futures |= dict.fromkeys(rows, unable)
        try:
            self._pool = pool = _running(self._function)
            for row in rows:
                backstop = self._tasks[row][2] + _SPARE_SECONDS
                self._futures[row] = pool.schedule(_run, args=self._tasks[row], timeout=backstop)
        except (RuntimeError, OSError, AssertionError) as error:
            self._unable = error
            unable.set_exception(BrokenProcessPool())
            close()

    def _lost(self, poll: Callable[[], None] | None) -> list[int]:
        """Wait for the workers; returns the rows that none of them will finish."""
        while (waiting := wait(self._futures.values(), timeout=_SLICE).not_done) and self._pool and self._pool.active:
            if poll is not None:
                poll()
        return [
            row
            for row, future in self._futures.items()
            if future in waiting or isinstance(future.exception(), BrokenProcessPool)
        ]

    def _outcome(self, row: int) -> Any:
        late = Failure("timeout", f"took longer than {self._tasks[row][2]:g} s")
        try:
            value = self._futures[row].result()
            if isinstance(value, bytes):
                return pickle.loads(value)
        except TimeoutError:
            return late
        except ProcessExpired as error:
            ended_by_alarm = hasattr(signal, "SIGALRM") and error.exitcode == -signal.SIGALRM
            return late if ended_by_alarm else Failure("crash", f"its worker died with exit code {error.exitcode}")
        except Exception as error:
            return Failure("exception", describe_error(error))
        if value.kind == "import":
            raise _not_importable(self._function, value.message)
        return value


def submit(function: Callable[..., Any], rows: Sequence[Mapping[str, Any]], *, seconds: float) -> Pending:
    """Start ``function(**row)`` for every row, each in the next worker that is free.

    Args:
        function: The function to call. It is pickled to the workers, so it must be importable: of a module, not a
            lambda. Each worker unpickles it once, and what that takes, imports above all, does not count as a row's
            time.
        rows: The keyword arguments of each call.
        seconds: The time for one row from its start; a worker that takes longer is ended, and another takes its place.

    Raises:
        ValueError: ``function`` or a row cannot be pickled, or ``seconds`` is not positive.
    """
    if not seconds > 0:
        raise ValueError(f"seconds: expected a number above 0, got {seconds!r}")
    try:
        packed = pickle.dumps(function)
        tasks = [(packed, pickle.dumps(dict(row)), seconds) for row in rows]
    except Exception as error:
        raise _not_importable(function, describe_error(error)) from error
    return Pending(function, tasks)


def close() -> None:
    """End the workers; the next use, or waiting for rows that they had not finished, starts others."""
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        pool.stop()
        for process in list(pool._pool_manager.worker_manager.workers.values()):
            process.kill()  # pebble would give every one that is busy some seconds
        pool.join()


def _kill() -> None:
    """End the workers without waiting for anything, from any thread."""
    if _pool is not None:
        for process in list(_pool._pool_manager.worker_manager.workers.values()):
            process.kill()


def _running(function: Callable[..., Any]) -> ProcessPool:
    global _pool
    if _pool is not None and not _pool.active:
        close()
    if _pool is None:
        has_server = "forkserver" in multiprocessing.get_all_start_methods() and not _is_forked
        context: Any = multiprocessing.get_context("forkserver" if has_server else "spawn")
        if has_server:
            _start_server(_modules(function))
        _pool = ProcessPool(
            max_workers=_num_workers(),
            context=context,
            initializer=_prepare,
        )
    return _pool


def _start_server(modules: Sequence[str]) -> None:
    """Start the server that forks the workers, unless it runs, with the trainer's signals blocked in it."""
    from multiprocessing import forkserver, resource_tracker

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_TRAINER)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_TRAINER)  # again: the line above lets SIGTERM through
        forkserver.set_forkserver_preload(list(modules))
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _num_workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))


def _modules(function: Any) -> list[str]:
    """What the server imports for all workers: the modules of ``function`` and of what it wraps, and their preload."""
    modules = [__name__]
    for _ in range(_MOST_WRAPPED):
        if function is not None:
            modules += [getattr(function, "__module__", None) or type(function).__module__]
            modules += getattr(function, "preload", ())
        function = getattr(function, "func", None) or getattr(function, "function", None)
    return [name for name in modules if name != "__main__"]


def _prepare() -> None:
    """Prepare a worker before its first row."""
    survive_closed_pipes()
    for number in _FOR_TRAINER:  # not SIG_IGN, which programs that a function starts would inherit
        signal.signal(number, lambda *_: None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_TRAINER)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a function prints is not for the trainer's terminal
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has none, and other systems other limits
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _run(function: bytes, row: bytes, seconds: float) -> bytes | Failure:
    """Run the function on one row, in a worker; returns the pickled value."""
    try:
        _alarm(_SPARE_SECONDS)
        call = _unpickled(function)
    except BaseException as error:
        return Failure("import", describe_error(error))
    try:
        _alarm(seconds)
        return pickle.dumps(to_plain(call(**pickle.loads(row))))
    except BaseException as error:  # sys.exit too: whatever it is, the next row is another one's
        return Failure("exception", describe_error(error))
    finally:
        _alarm(0)


def _alarm(seconds: float) -> None:
    """Let the kernel end this process after ``seconds``; with 0 not at all. Windows has no alarms."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _not_importable(function: Callable[..., Any], reason: str) -> ValueError:
    return ValueError(
        f"{single_line(repr(function)[:80])} cannot run in a worker process: {reason}; allowed are functions of a "
        "module that can be imported, with plain values as arguments"
    )


def _forget() -> None:
    """Forget the pool in a forked child, which has neither its threads nor the server as a child of its own."""
    global _pool, _is_forked
    _pool, _is_forked = None, True


atexit.register(close)
signals.on_hard_exit(_kill)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
