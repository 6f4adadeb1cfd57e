"""Worker processes for functions that could hang, crash or eat the memory on odd text.

One pool for all rewards and environments of a process, started at first use and forked from a fresh server, without the
trainer's threads and GPU. A call's time limit is an alarm of the kernel: it ends C code that never returns to Python,
even when the trainer is gone. A script that calls this needs ``if __name__ == "__main__":``.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from grpo_lightning.console import single_line
from grpo_lightning.reward.spec import describe_error, innermost, to_plain

MAX_WORKERS = 8
POLL_SECONDS = 0.25
"""Between two calls of ``poll`` while a result is waited for."""
_MAX_MEMORY = 4 * 2**30  # bytes that one worker may allocate
_MAX_STARTS = 3  # of workers for the same call
_SPARE_SECONDS = 60.0  # to import a function; also, how late a call is ended that switches its alarm off
_TRAINER_SIGNALS = [
    number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
]
_IS_POSIX = os.name == "posix"  # Windows has no alarms: there pebble ends calls, later

_pool: ProcessPool | None = None
_is_forked = False
_unpickled = functools.lru_cache(maxsize=16)(pickle.loads)


@dataclass(frozen=True)
class Failure:
    """What a call gives instead of a value."""

    kind: str
    """What happened: timeout, exception or crash; of environments also reply, which the policy cannot read."""
    message: str


class Pending:
    """A call that a worker process makes; see `submit`."""

    def __init__(self, function: Callable[..., Any], task: tuple[bytes, bytes, float]) -> None:
        self._function, self._task = function, task
        self._start()

    def result(self, poll: Callable[[], None] | None = None) -> Any:
        """Wait for the call; returns its value or a `Failure`. ``poll`` is called meanwhile and may raise to give up.

        A ValueError says that a worker cannot import the function, a RuntimeError that workers cannot be started.
        """
        for _ in range(_MAX_STARTS):
            while not wait([self._future], timeout=POLL_SECONDS).done and self._pool.active:
                if poll is not None:
                    poll()
            if self._future.done() and not isinstance(self._future.exception(), BrokenProcessPool):
                return self._outcome()
            self._start()  # all workers died between two calls, or the pool was closed
        raise RuntimeError(
            "the worker processes of rewards do not start, for reasons that they wrote above: a script needs "
            '`if __name__ == "__main__":` around what it does, and a daemonic process cannot have any'
        )

    def _start(self) -> None:
        try:
            self._pool = _running_pool(self._function)
            self._future = self._pool.schedule(_run, args=self._task, timeout=self._task[2] + _SPARE_SECONDS)
        except (RuntimeError, OSError, AssertionError) as error:
            self._future = ProcessFuture()
            self._future.set_exception(BrokenProcessPool(str(error)))
            close()

    def _outcome(self) -> Any:
        late = Failure("timeout", f"took longer than {self._task[2]:g} s")
        try:
            value = self._future.result()
        except TimeoutError:
            return late
        except ProcessExpired as error:
            is_alarm = _IS_POSIX and error.exitcode == -signal.SIGALRM
            return late if is_alarm else Failure("crash", f"its worker died with exit code {error.exitcode}")
        except Exception as error:
            return Failure("exception", describe_error(error))
        if isinstance(value, bytes):
            return pickle.loads(value)
        if value.kind == "import":
            raise _not_importable(self._function, value.message)
        return value


def submit(function: Callable[..., Any], arguments: Mapping[str, Any], *, seconds: float) -> Pending:
    """Start ``function(**arguments)`` in the next worker that is free.

    The function is pickled to the workers, so it must be importable: of a module, not a lambda. Each worker unpickles
    it once, which does not count as the call's time.

    Args:
        function: Of a module.
        arguments: By name.
        seconds: Time limit of the call from its start; a worker that takes longer is ended and replaced.

    Raises:
        ValueError: ``function`` or an argument cannot be pickled.
    """
    try:
        task = (pickle.dumps(function), pickle.dumps(dict(arguments)), seconds)
    except Exception as error:
        raise _not_importable(function, describe_error(error)) from error
    return Pending(function, task)


def close() -> None:
    """End the workers; the next use, or waiting for a call that was not finished, starts others."""
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        pool.stop()
        for process in multiprocessing.active_children() if not _is_forked else ():  # a fork's list has its parent's
            if process.name == "pebble_pool_worker":
                process.kill()  # pebble would give every one that is busy some seconds
        pool.join()


def _running_pool(function: Callable[..., Any]) -> ProcessPool:
    global _pool
    if _pool is not None and not _pool.active:
        close()
    if _pool is None:
        has_server = _IS_POSIX and not _is_forked
        if has_server:
            _start_server(function)
        context: Any = multiprocessing.get_context("forkserver" if has_server else "spawn")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        _pool = ProcessPool(max_workers=min(MAX_WORKERS, share), context=context, initializer=_prepare)
    return _pool


def _start_server(function: Any) -> None:
    """Start the server that forks the workers, unless it runs: with the function's modules imported.

    The trainer's signals are blocked in it, since a cluster may send them to all processes of a job.
    """
    from multiprocessing import forkserver, resource_tracker

    called = innermost(function)
    modules = [__name__, getattr(called, "__module__", None) or type(called).__module__]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _TRAINER_SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _TRAINER_SIGNALS)  # again: the line above unblocks SIGTERM
        forkserver.set_forkserver_preload([name for name in modules if name != "__main__"])
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _prepare() -> None:
    for number in _TRAINER_SIGNALS:  # not SIG_IGN, which programs that a function starts would inherit
        signal.signal(number, lambda *_: None)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a function prints is not for the trainer's terminal
    if _IS_POSIX:
        import resource

        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TRAINER_SIGNALS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
            resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _run(function: bytes, arguments: bytes, seconds: float) -> bytes | Failure:
    """Make one call, in a worker; returns the pickled value."""
    try:
        _set_alarm(_SPARE_SECONDS)
        try:
            call = _unpickled(function)
        except BaseException as error:
            return Failure("import", describe_error(error))
        _set_alarm(seconds)
        return pickle.dumps(to_plain(call(**pickle.loads(arguments))))
    except BaseException as error:  # sys.exit too: the next call is another one's
        return Failure("exception", describe_error(error))
    finally:
        _set_alarm(0)


def _set_alarm(seconds: float) -> None:
    """Let the kernel end this process after ``seconds``; with 0 not at all."""
    if _IS_POSIX:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _not_importable(function: Callable[..., Any], reason: str) -> ValueError:
    name = single_line(repr(function)[:80])
    return ValueError(f"{name} cannot run in a worker process: {reason}; use a function of an importable module")


def _forget() -> None:
    # A forked child has neither the pool's threads nor the server as a child of its own.
    global _pool, _is_forked
    _pool, _is_forked = None, True


atexit.register(close)
if _IS_POSIX:
    os.register_at_fork(after_in_child=_forget)
