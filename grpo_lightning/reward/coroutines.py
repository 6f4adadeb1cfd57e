"""Rewards that are coroutines (``async def``): many calls at a time wait for answers, while others are sampled."""

import asyncio
import atexit
import contextlib
import logging
import os
import random
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from grpo_lightning.config.redaction import redact
from grpo_lightning.reward.spec import RewardError, describe_error, innermost, to_plain
from grpo_lightning.reward.workers import Failure

log = logging.getLogger(__name__)

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # s before the second try, and before any
_LONGEST_ASKED = 120.0  # s that a call may ask to wait before the next try

_told: set[str] = set()


class RetryableError(Exception):
    """A try that has failed, after which the same may be asked again.

    Args:
        message: What happened.
        after: Seconds before which another try is of no use.
    """

    def __init__(self, message: str, *, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class PermanentError(Exception):
    """A call that has failed, as every other try of it would."""


@dataclass(frozen=True)
class _Again:
    """A try that failed and may be repeated."""

    failure: Failure
    after: float = 0.0


class Calls:
    """The calls of one reward, so many at a time.

    Args:
        name: Of the reward, for messages.
        function: A coroutine function. If it, or what it wraps, has a coroutine ``aclose``, that is called at the end.
        seconds: The time for one try; None: as long as it takes.
        retries: How many more tries a call has that failed.
        concurrency: The most calls at a time; one that waits for its next try does not count.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], *, seconds: float | None, retries: int, concurrency: int
    ) -> None:
        self.name, self.function, self.seconds = name, function, seconds
        self._retries, self._concurrency = retries, concurrency
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(concurrency)
        self._pending: list[Pending] = []

    def submit(self, row: Mapping[str, Any]) -> "Pending":
        """Start ``function(**row)``."""
        pending = Pending(self, row)
        self._pending.append(pending)
        return pending

    def cancel(self) -> None:
        """End the calls that still run, whose results are not wanted any more."""
        for pending in self._pending:
            pending.cancel()
        self._pending.clear()

    async def outcome(self, pending: "Pending") -> Any:
        """What a call gives in the end, or a `Failure`; runs on the loop.

        Raises:
            RewardError: The function has raised it: no other call would fare better.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the first call, or the first after another loop was left
            self._loop, self._slots = loop, asyncio.Semaphore(self._concurrency)
        slots, tried = self._slots, 0
        while True:
            async with slots:
                found = await self._tried(pending)
            if not isinstance(found, _Again):
                return found
            if tried == self._retries:
                return found.failure
            tried += 1
            seconds = waiting(tried, repr(pending.row.get("completions"))) + min(found.after, _LONGEST_ASKED)
            if self.name not in _told:
                _told.add(self.name)
                text = redact(found.failure.message)
                log.warning("reward %r: %s; tried again in %.1f s (said once)", self.name, text, seconds)
            await asyncio.sleep(seconds)

    async def _tried(self, pending: "Pending") -> Any:
        """One try: a value, a `Failure` that stays, or `_Again`."""
        task = pending.task = asyncio.ensure_future(_called(self.function, pending.row))
        task.add_done_callback(_look_at)
        try:
            # Not `asyncio.timeout`, which would wait for a call that swallows its cancellation.
            await asyncio.wait({task}, timeout=self.seconds)
        finally:
            is_done = task.done()
            task.cancel()
        if not is_done:
            return _Again(Failure("timeout", f"took longer than {self.seconds:g} s"))
        if task.cancelled():
            return _Again(Failure("exception", "CancelledError"))
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, RewardError):
            raise RewardError(f"reward {self.name!r}: {error}") from error
        is_plain = isinstance(error, PermanentError | RetryableError)
        failure = Failure("exception", str(error) if is_plain else describe_error(error))
        return failure if isinstance(error, PermanentError) else _Again(failure, getattr(error, "after", 0.0))


class Pending:
    """A call that runs."""

    def __init__(self, calls: Calls, row: Mapping[str, Any]) -> None:
        self.row = row
        self.task: asyncio.Task[Any] | None = None
        """Its present try."""
        self._calls = calls
        self._start()

    def result(self, poll: Callable[[], None] | None = None) -> list[Any]:
        """Wait for it; a list with its value, or with a `Failure`.

        Args:
            poll: Called four times a second meanwhile; may raise to give up.

        Raises:
            RewardError: The call has said that no other one would fare better, or calls hold up one loop after another.
        """
        seconds = self._calls.seconds
        while not wait([self._future], timeout=SLICE).done or self._future.cancelled():
            if poll is not None:
                poll()
            if self._home.is_left:
                if self.task is not None and self.task is self._home.held_up_by:
                    return [Failure("timeout", f"took longer than {seconds:g} s without any await")]
                self._start()
            elif self._future.cancelled():
                return [Failure("exception", "CancelledError")]
            elif seconds is not None and self._home.is_held_up(seconds):
                _leave(self._home, self._calls.name, seconds)
        return [self._future.result()]

    def cancel(self) -> None:
        """End it, if it still runs."""
        if not self._home.is_left:
            self._future.cancel()

    def _start(self) -> None:
        self._home = running()
        if closer := getattr(innermost(self._calls.function), "aclose", None):
            self._home.will_close(id(closer.__self__), closer)
        self._future: Future[Any] = asyncio.run_coroutine_threadsafe(self._calls.outcome(self), self._home.loop)


def waiting(tried: int, text: str) -> float:
    """Seconds before the next try: 0.5, 1, 2, … up to 30, less up to half of it, which the text decides.

    Args:
        tried: How many tries there were, at least 1.
        text: Of the call. The same call waits for the same time in every run, and different ones for different times.
    """
    longest = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (tried - 1))
    return longest * random.Random(f"{tried} {text}").uniform(0.5, 1.0)


async def _called(function: Callable[..., Any], row: Mapping[str, Any]) -> Any:
    """What a function returns and what that gives when it is awaited, as plain values."""
    try:
        value = function(**row)
        if isinstance(value, Awaitable):
            value = await value
        if isinstance(value, list | tuple):
            value = [await one if isinstance(one, Awaitable) else one for one in value]
        return to_plain(value)
    except (SystemExit, KeyboardInterrupt) as error:  # they would end the loop
        raise RuntimeError(describe_error(error)) from error


def _look_at(task: asyncio.Task[Any]) -> None:
    """Take note of what a try has raised; asyncio would complain of one that nobody has waited for."""
    if not task.cancelled():
        task.exception()


def _leave(home: "EventLoop", name: str, seconds: float) -> None:
    if (left := leave(home)) > MOST_LEFT:
        raise RewardError(
            f"reward {name!r}: {left} calls took longer than {seconds:g} s without any await; allowed is `async def` "
            f"whose waiting is awaited, or `def` with reward.{name}.timeout, which runs in worker processes"
        )


SLICE = 0.25
"""Seconds between two looks at whether a loop still answers."""
MOST_LEFT = 8
"""Loops that a process leaves because calls hold them up, until that is an error."""

_PATIENCE = 2.0  # s that cancelled calls have to end

_current: "EventLoop | None" = None
_num_left = 0


class EventLoop:
    """A thread with an event loop, which begins to run."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(_Threads())
        self.is_left = False
        """Whether nothing runs on it any more, except for what holds it up."""
        self.held_up_by: asyncio.Task[Any] | None = None
        """The task that it was left for."""
        self._closers: dict[int, Callable[[], Awaitable[None]]] = {}
        self._ends, self._answered, self._missed = False, True, 0
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def will_close(self, key: int, closer: Callable[[], Awaitable[None]]) -> None:
        """Have a coroutine function called at the end, once for each ``key``."""
        self._closers[key] = closer

    def is_held_up(self, seconds: float) -> bool:
        """Whether the loop has not answered for ``seconds``; to be asked once per `SLICE`.

        What counts is how often it was asked in vain, so that a machine that slept holds up nothing.
        """
        if self._answered:
            self._answered, self._missed = False, 0
            self.loop.call_soon_threadsafe(self._answer)
        else:
            self._missed += 1
        return self._missed * SLICE > seconds

    def leave(self) -> None:
        """Begin nothing more; what runs is cancelled as soon as the loop gets to it."""
        self.held_up_by = asyncio.current_task(self.loop)
        self.is_left = True
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(self._end)

    def join(self) -> None:
        """Wait until it has ended, unless a call holds it up."""
        self._thread.join(3 * _PATIENCE)

    def _answer(self) -> None:
        self._answered = True

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ends:
            try:
                self.loop.run_forever()
            except BaseException as error:  # sys.exit in a task that a reward has made itself, which ends that task
                log.warning("a task that a reward has started raised %s", describe_error(error))
        self.loop.close()

    def _end(self) -> None:
        self._ending = self._ending or self.loop.create_task(self._finish())

    async def _finish(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_PATIENCE)
        for closer in self._closers.values():
            with contextlib.suppress(Exception):
                await asyncio.wait_for(closer(), _PATIENCE)
        self._ends = True
        self.loop.stop()


class _Threads(ThreadPoolExecutor):
    """What `asyncio.to_thread` and the look-up of host names run in: threads for which no end of a process waits."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=run, name="rewards", daemon=True).start()
        return future


def running() -> EventLoop:
    """The loop of this process, which starts if there is none."""
    global _current
    if _current is None:
        _current = EventLoop()
    return _current


def leave(held_up: EventLoop) -> int:
    """Leave a loop to the call that holds it up; returns how many were left by now."""
    global _current, _num_left
    held_up.leave()
    _current, _num_left = (None if _current is held_up else _current), _num_left + 1
    return _num_left


def close() -> None:
    """Cancel what runs and end the thread; the next use, or waiting for a call that had not ended, starts another."""
    global _current
    ending, _current = _current, None
    if ending is not None:
        ending.leave()
        ending.join()


def _forget() -> None:
    """Forget the thread in a forked child, which does not have it."""
    global _current
    _current = None


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
