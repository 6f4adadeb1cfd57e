"""Ends what the main thread waits for, so that it handles a signal.

A signal that came just before the main thread began to wait, or to another thread, would be handled after the wait.
"""

import signal
import threading
import time
from collections.abc import Callable

NUMBER = getattr(signal, "SIGURG", None)
"""What the main thread is sent; ignored by default, and None where there is none."""
_BETWEEN = 0.2  # s


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
