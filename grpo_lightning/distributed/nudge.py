"""Ends what the main thread waits for, so that it handles a signal.

A signal that came just before the main thread began to wait, or to another thread, would be handled after the wait.
"""

import signal
import threading
from collections.abc import Callable

NUMBER = getattr(signal, "SIGURG", None)
"""What the main thread is sent; ignored by default, and None where there is none."""
_BETWEEN = 0.2  # s


def nothing(*_: object) -> None:
    """The handler of `NUMBER`: any handler ends a wait."""


def start(has_raised: threading.Event, is_on: Callable[[], bool], may_raise: Callable[[], bool]) -> None:
    """Nudge the main thread, from another one, until a signal's handler has raised.

    Args:
        has_raised: Set when it has.
        is_on: Whether signals are still handled.
        may_raise: Whether a handler would raise now.
    """
    if NUMBER is not None:
        threading.Thread(target=_nudge, args=(NUMBER, has_raised, is_on, may_raise), name="nudge", daemon=True).start()


def _nudge(number: int, has_raised: threading.Event, is_on: Callable[[], bool], may_raise: Callable[[], bool]) -> None:
    while is_on() and not has_raised.wait(_BETWEEN):
        if may_raise():
            signal.pthread_kill(threading.main_thread().ident or 0, number)
