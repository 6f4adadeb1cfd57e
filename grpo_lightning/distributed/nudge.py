"""Ends what the main thread waits for, so that it handles a signal.

A signal that came just before the main thread began to wait, or to another thread, would be handled after the wait.
"""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

NUMBER = getattr(signal, "SIGURG", None)
"""What the main thread is sent; ignored by default, and None where there is none."""
_BETWEEN = 0.2  # s
_AGAIN = 5.0  # s for code that is broken off to end; where it has passed the exception by, it gets more of them


class Foreign:
    """Code that a signal breaks off by an exception, while it runs."""

    def __init__(self) -> None:
        self.caller: FrameType | None = None
        """The frame that calls it; None while none runs."""

    def goes_on(self, raised_at: float) -> bool:
        """Whether it runs though an exception was raised, at a time of `time.monotonic`, long ago."""
        return self.caller is not None and time.monotonic() - raised_at > _AGAIN

    def is_below(self, frame: FrameType | None) -> bool:
        """Whether it runs in ``frame``; an exception may have left it before it was noted that none runs."""
        while frame is not None and frame is not self.caller:
            frame = frame.f_back
        return frame is not None


def start(is_on: Callable[[], bool], may_raise: Callable[[], bool]) -> None:
    """Nudge the main thread, from another one, whenever a signal's handler would raise.

    Args:
        is_on: Whether signals are still handled.
        may_raise: Whether a handler would raise now.
    """
    if NUMBER is not None:
        threading.Thread(target=_nudge, args=(NUMBER, is_on, may_raise), name="nudge", daemon=True).start()


def _nudge(number: int, is_on: Callable[[], bool], may_raise: Callable[[], bool]) -> None:
    while is_on():
        time.sleep(_BETWEEN)
        if may_raise():
            signal.pthread_kill(threading.main_thread().ident or 0, number)
