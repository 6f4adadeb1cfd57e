"""Rewards that are coroutines (``async def``): calls run on a thread with an event loop until the run ends."""

import asyncio
import atexit
import contextlib
import logging
import os
import random
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, wait
from itertools import count
from typing import Any

from grpo_lightning.console import redact
from grpo_lightning.reward.spec import RewardError, RewardSpec, describe_error, innermost, to_plain
from grpo_lightning.reward.workers import POLL_SECONDS, Failure

log = logging.getLogger(__name__)

_FIRST_WAIT, _MAX_WAIT = 0.5, 30.0  # s before the second try, and before any
_MAX_RETRY_AFTER = 120.0  # s that a call may ask to wait before the next try
_CLOSE_SECONDS = 2.0  # that cancelled calls have to end

_thread: "_LoopThread | None" = None
_warned: set[str] = set()


class RetryableError(Exception):
    """A try has failed, and the same call may be made again, ``after`` seconds at the earliest."""

    def __init__(self, message: str, *, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class PermanentError(Exception):
    """A call has failed, as every other try of it would."""


class Calls:
    """The calls of one reward whose function is a coroutine, at most ``concurrency`` at a time.

    A call that waits for its next try does not count. If the function, or what it wraps, has a coroutine ``aclose``,
    that is called when the loop ends.
    """

    def __init__(self, name: str, spec: RewardSpec) -> None:
        global _thread
        self._name, self._spec = name, spec
        self._slots = asyncio.Semaphore(spec.concurrency)
        self._futures: list[Future[Any]] = []
        self._loop_thread = _thread = _thread or _LoopThread()
        if closer := getattr(innermost(spec.function), "aclose", None):
            self._loop_thread.closers[id(closer.__self__)] = closer

    def submit(self, arguments: Mapping[str, Any]) -> "Pending":
        """Start ``function(**arguments)``."""
        future = asyncio.run_coroutine_threadsafe(self._call(arguments), self._loop_thread.loop)
        self._futures.append(future)
        return Pending(future)

    def cancel(self) -> None:
        """Cancel the calls that still run."""
        for future in self._futures:
            future.cancel()

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        """A call with its retries: the value, or a `Failure`."""
        for tried in count(1):
            after = 0.0
            try:
                async with self._slots:
                    return await self._try(arguments)
            except RewardError as error:
                raise RewardError(f"reward {self._name!r}: {error}") from error
            except PermanentError as error:
                return Failure("exception", str(error))
            except RetryableError as error:
                failure, after = Failure("exception", str(error)), min(error.after, _MAX_RETRY_AFTER)
            except _Late:
                failure = Failure("timeout", f"took longer than {self._spec.timeout} s")
            except Exception as error:
                failure = Failure("exception", describe_error(error))
            if tried > self._spec.retries:
                return failure
            # 0.5, 1, 2, … up to 30 s, less up to half of it, drawn from the text of the call.
            wait_seconds = min(_MAX_WAIT, _FIRST_WAIT * 2.0 ** (tried - 1))
            seconds = after + wait_seconds * random.Random(f"{tried} {arguments.get('completions')}").uniform(0.5, 1.0)
            if self._name not in _warned:
                _warned.add(self._name)
                message = "reward %r: %s; tried again in %.1f s (logged once)"
                log.warning(message, self._name, redact(failure.message), seconds)
            await asyncio.sleep(seconds)
        return None

    async def _try(self, arguments: Mapping[str, Any]) -> Any:
        task = asyncio.ensure_future(_awaited(self._spec.function, arguments))
        try:
            # Not `asyncio.timeout`, which would wait for a call that swallows its cancellation.
            done, _ = await asyncio.wait({task}, timeout=self._spec.timeout)
        finally:
            task.cancel()
        if not done:
            raise _Late
        return task.result()


class Pending:
    """A call that runs; see `Calls.submit`."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def result(self, poll: Callable[[], None] | None = None) -> Any:
        """Wait for the call; returns its value or a `Failure`, or raises the function's RewardError."""
        while not wait([self._future], timeout=POLL_SECONDS).done:
            if poll is not None:
                poll()
        return Failure("exception", "CancelledError") if self._future.cancelled() else self._future.result()


class _Late(Exception):
    """A try took longer than the reward's timeout."""


class _LoopThread:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.closers: dict[int, Callable[[], Awaitable[None]]] = {}  # called at the end
        self._thread = threading.Thread(target=self.loop.run_forever, name="rewards", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel what runs and end the thread, unless a call that never awaits holds it up."""
        asyncio.run_coroutine_threadsafe(self._finish(), self.loop)
        self._thread.join(3 * _CLOSE_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        for closer in self.closers.values():
            with contextlib.suppress(Exception):
                await asyncio.wait_for(closer(), _CLOSE_SECONDS)
        self.loop.stop()


def close() -> None:
    """Cancel what runs and end the thread; the next use starts another."""
    global _thread
    thread, _thread = _thread, None
    if thread is not None:
        thread.close()


async def _awaited(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        value = function(**arguments)
        if isinstance(value, Awaitable):
            value = await value
        if isinstance(value, list | tuple):  # of a PerCompletion
            value = [await item if isinstance(item, Awaitable) else item for item in value]
        return to_plain(value)
    except (SystemExit, KeyboardInterrupt) as error:  # they would end the loop
        raise RuntimeError(describe_error(error)) from error


def _forget() -> None:  # a forked child does not have the thread
    global _thread
    _thread = None


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
