"""Calls beside the trainer: in worker processes that are ended after a time, and coroutines on a thread.

One pool of processes for all rewards and environments, started at first use and forked from a fresh server, without the
trainer's threads and GPU. A call's time limit is an alarm of the kernel: it ends C code that never returns to Python,
even when the trainer is gone. A script that calls this needs ``if __name__ == "__main__":``.
"""

import asyncio
import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import pickle
import random
import resource
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import count
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from grpo_lightning.console import redact, single_line
from grpo_lightning.reward.spec import (
    Failure,
    PermanentError,
    RewardError,
    RewardSpec,
    describe_error,
    innermost,
    to_plain,
)

log = logging.getLogger(__name__)

Poll = Callable[[], None]
MAX_WORKERS = 8
_POLL_SECONDS = 0.25  # between two calls of ``poll`` while a result is waited for
_MAX_MEMORY = 4 * 2**30  # bytes that one worker may allocate
_MAX_STARTS = 3  # of workers for the same call
_SPARE_SECONDS = 60.0  # to import a function; also, how late a call is ended that switches its alarm off
_FIRST_WAIT, _MAX_WAIT = 0.5, 30.0  # s before the second try of a coroutine, and before any
_CLOSE_SECONDS = 2.0  # that cancelled coroutines have to end
_TRAINER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_pool: ProcessPool | None = None
_loop: asyncio.AbstractEventLoop | None = None
_is_forked = False
_unpickled = functools.lru_cache(maxsize=16)(pickle.loads)
_warned: set[str] = set()


# --- worker processes


class Pending:
    """A call that a worker process makes; see `submit`."""

    def __init__(self, function: Callable[..., Any], task: tuple[bytes, bytes, float]) -> None:
        self._function, self._task = function, task
        self._start()

    def result(self, poll: Poll | None = None) -> Any:
        """Wait for the call; returns its value or a `Failure`. ``poll`` is called meanwhile and may raise to give up.

        A ValueError says that a worker cannot import the function, a RuntimeError that workers cannot be started.
        """
        for _ in range(_MAX_STARTS):
            while not wait([self._future], timeout=_POLL_SECONDS).done and self._pool.active:
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
            close_pool()

    def _outcome(self) -> Any:
        late = Failure("timeout", f"took longer than {self._task[2]:g} s")
        try:
            value = self._future.result()
        except TimeoutError:
            return late
        except ProcessExpired as error:
            died = Failure("crash", f"its worker died with exit code {error.exitcode}")
            return late if error.exitcode == -signal.SIGALRM else died
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


def close_pool() -> None:
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
        close_pool()
    if _pool is None:
        if not _is_forked:
            _start_server(function)
        context: Any = multiprocessing.get_context("spawn" if _is_forked else "forkserver")
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
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _not_importable(function: Callable[..., Any], reason: str) -> ValueError:
    name = single_line(repr(function)[:80])
    return ValueError(f"{name} cannot run in a worker process: {reason}; use a function of an importable module")


# --- coroutines


class Coroutines:
    """The calls of one reward that is a coroutine function, at most ``concurrency`` at a time.

    A call that waits for its next try does not count.
    """

    def __init__(self, name: str, spec: RewardSpec) -> None:
        self._name, self._spec, self._slots = name, spec, asyncio.Semaphore(spec.concurrency)
        self._futures: list[Future[Any]] = []

    def submit(self, arguments: Mapping[str, Any]) -> Callable[[Poll | None], Any]:
        """Start ``function(**arguments)``; returns what `Pending.result` is for a call in a worker."""
        future = asyncio.run_coroutine_threadsafe(self._call(arguments), _running_loop())
        self._futures.append(future)

        def result(poll: Poll | None = None) -> Any:
            while not wait([future], timeout=_POLL_SECONDS).done:
                if poll is not None:
                    poll()
            return Failure("exception", "CancelledError") if future.cancelled() else future.result()

        return result

    def cancel(self) -> None:
        """Cancel the calls that still run."""
        for future in self._futures:
            future.cancel()

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        """A call with its retries: the value, or a `Failure`."""
        for tried in count(1):
            try:
                async with self._slots:
                    # Not `asyncio.timeout`, which would wait for a call that swallows its cancellation.
                    task = asyncio.ensure_future(_await(self._spec.function, arguments))
                    try:
                        done, _ = await asyncio.wait({task}, timeout=self._spec.timeout)
                    finally:
                        task.cancel()
                    if done:
                        return task.result()
                failure = Failure("timeout", f"took longer than {self._spec.timeout} s")
            except RewardError as error:
                raise RewardError(f"reward {self._name!r}: {error}") from error
            except PermanentError as error:
                return Failure("exception", str(error))
            except Exception as error:
                failure = Failure("exception", describe_error(error))
            if tried > self._spec.retries:
                return failure
            # 0.5, 1, 2, … up to 30 s, less up to half of it, drawn from the text of the call.
            jitter = random.Random(f"{tried} {arguments.get('completions')}").uniform(0.5, 1.0)
            seconds = min(_MAX_WAIT, _FIRST_WAIT * 2.0 ** (tried - 1)) * jitter
            if self._name not in _warned:
                _warned.add(self._name)
                message = "reward %r: %s; tried again in %.1f s (logged once)"
                log.warning(message, self._name, redact(failure.message), seconds)
            await asyncio.sleep(seconds)
        return None


def close_loop() -> None:
    """Cancel the coroutines that run and end their thread; the next use starts another."""
    global _loop
    loop, _loop = _loop, None
    if loop is None:
        return

    async def finish() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)

    with contextlib.suppress(TimeoutError):  # of a call that never awaits
        asyncio.run_coroutine_threadsafe(finish(), loop).result(3 * _CLOSE_SECONDS)
    loop.call_soon_threadsafe(loop.stop)


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
        threading.Thread(target=_run_loop, args=[_loop], name="rewards", daemon=True).start()
    return _loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _await(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        value = function(**arguments)
        if isinstance(value, Awaitable):
            value = await value
        if isinstance(value, list | tuple):  # of a PerCompletion
            value = [await item if isinstance(item, Awaitable) else item for item in value]
        return to_plain(value)
    except (SystemExit, KeyboardInterrupt) as error:  # they would end the loop
        raise RuntimeError(describe_error(error)) from error


def _forget() -> None:  # a forked child has neither the pool's threads, nor the server as its child, nor the loop
    global _pool, _loop, _is_forked
    _pool, _loop, _is_forked = None, None, True


atexit.register(close_pool)
atexit.register(close_loop)
os.register_at_fork(after_in_child=_forget)
