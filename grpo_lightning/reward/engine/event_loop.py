"""One thread with an event loop, for rewards that are coroutines.

It starts at first use and ends with the run, which cancels what still runs on it. A call that never awaits holds up all
others, and no thread can be ended from outside: such a loop is left to itself, and another takes its place.
"""

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from grpo_lightning.reward.engine.foreign import described

log = logging.getLogger(__name__)

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
                log.warning("a task that a reward has started raised %s", described(error))
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
