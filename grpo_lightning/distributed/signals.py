"""Signals: a process that is asked to end does so between two generated tokens, or at once where nothing is trained.

Imports nothing but the standard library, since the code that calls rewards uses it, too.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from grpo_lightning.console import is_first_process

_NUMBERS = tuple(n for n in signal.Signals if n.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"))
_SAME_PRESS = 0.5  # s in which one Ctrl-C may arrive twice: from the terminal, and from a launcher that forwards it
_GRACE = 5.0  # s for launched processes to end by themselves, and for the main thread to react before training

_current: "Signals | None" = None


class Preempted(BaseException):
    """The process was asked to end by a signal; like KeyboardInterrupt no ``Exception``.

    Args:
        number: The signal.
        between_steps: Whether the weights are those of the last complete step, so that they can be saved.
        saved: What was saved, for the message.
    """

    def __init__(self, number: int, *, between_steps: bool = False, saved: str = "") -> None:
        self.number = signal.Signals(number)
        self.between_steps = between_steps
        how = "interrupted" if self.number == signal.SIGINT else f"asked to end by {self.number.name}"
        super().__init__(f"{how}: {saved}" if saved else how)

    @property
    def status(self) -> str:
        """The run's status: interrupted after Ctrl-C, preempted after any other signal."""
        return "interrupted" if self.number == signal.SIGINT else "preempted"

    @property
    def exit_status(self) -> int:
        """130 after Ctrl-C and 143 after any other signal: 128 + SIGINT or SIGTERM, as a shell reports it."""
        return 128 + (signal.SIGINT if self.number == signal.SIGINT else signal.SIGTERM)


class Signals:
    """Whether the process was asked to end: by SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1, unless these are ignored.

    Before the steps and after them a signal raises `Preempted` at once. During the steps `check` raises it, which is
    called between generated tokens. A second Ctrl-C ends the process and those that Lightning has launched.

    Outside of the context, under a Trainer of a program's own, `on_steps_start` makes SIGTERM known to `check`.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The first signal that came."""
        self.launcher: Any = None
        """Lightning's, with the processes that it has launched in ``procs``."""
        self._numbers: tuple[int, ...] = (signal.SIGTERM,)
        self._in_steps = self._is_raised = False
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self._wakeup: socket.socket | None = None

    def __enter__(self) -> "Signals":
        global _current
        self._numbers = tuple(number for number in _NUMBERS if signal.getsignal(number) is not signal.SIG_IGN)
        self._previous = {number: signal.signal(number, self._handle) for number in self._numbers}
        # Python calls handlers in the main thread, which may wait in C code for another process; this thread does not.
        reader, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        _current = self
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Preempted):
            self._end_launched(_GRACE if error.between_steps else 0.0)
        self.close()

    def close(self) -> None:
        """Handle no signals any more; the handlers from before are back."""
        global _current
        _current = None
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._wakeup is not None:
            self._wakeup.close()

    def on_steps_start(self, launcher: Any) -> None:
        """From now on a signal waits for `check`; replaces the handlers that Lightning sets in each stage."""
        self.launcher, self._in_steps = launcher, True
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                signal.signal(number, self._handle)
            if self._wakeup is not None:
                signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)

    def end_steps(self) -> None:
        """End the steps: from now on a signal raises at once, and one that came during a step raises now."""
        self.check()
        self._in_steps = False

    def check(self) -> None:
        """Raise `Preempted` if a signal has come."""
        if self.received is not None:
            self._is_raised = True
            raise Preempted(self.received, between_steps=self._in_steps)

    def preemption(self, error: BaseException, *, is_consequence: bool) -> Preempted | None:
        """The signal that has ended the process, if it was one.

        Args:
            error: What was raised.
            is_consequence: Whether ``error`` is due to the end of another process, which the same signal may have
                ended; before the steps every error after a signal counts, since libraries replace `Preempted`.
        """
        if isinstance(error, Preempted):
            # Another process may have got another signal than this one.
            return Preempted(self.received or error.number, between_steps=error.between_steps)
        if self.received is not None and (is_consequence or not self._in_steps):
            return Preempted(self.received)
        return None

    def _handle(self, number: int, frame: object) -> None:
        self.received = self.received or number
        if not (self._is_raised or self._in_steps):  # later signals must not disturb the saving
            self.check()

    def _watch(self, reader: socket.socket) -> None:
        """In a thread: end the process on a second Ctrl-C, or where the main thread does not react before training."""
        interrupted = None
        with reader:
            while came := reader.recv(1):
                if came[0] not in self._numbers:
                    continue
                self.received = self.received or came[0]
                if came[0] == signal.SIGINT:
                    interrupted = interrupted or time.monotonic()
                    if time.monotonic() - interrupted > _SAME_PRESS:
                        self._exit(128 + signal.SIGINT)
                if not self._in_steps:
                    self._end_launched()
                    time.sleep(_GRACE)
                    if not (self._in_steps or self._is_raised) and _current is self:
                        self._exit(_announce(self.received))

    def _exit(self, status: int) -> None:
        self._end_launched()
        os._exit(status)

    def _end_launched(self, seconds: float = 0.0) -> None:
        """Let the launched processes end by themselves within ``seconds``, and kill those that do not."""
        listed = getattr(self.launcher, "procs", None) or []
        processes = [*listed]
        listed.clear()  # else a thread of Lightning's kills this process when one of them fails
        until = time.monotonic() + seconds
        for process in processes:
            with suppress(Exception):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()


def handle_signals() -> AbstractContextManager[Signals]:
    """Context that handles signals, see `Signals`; outside the main thread it does nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    return Signals() if is_main else nullcontext(Signals())


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Context, before and after a run, in which a signal prints a line and ends the process at once."""

    def end(number: int, frame: object) -> None:
        os._exit(_announce(number))

    previous = {n: signal.signal(n, end) for n in _NUMBERS if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def current_signals() -> Signals:
    """The active `Signals`, or new ones where none are active."""
    return _current or Signals()


def _announce(number: int) -> int:
    """Print what has ended this process, and return its exit status: 0 for others than the first, which report it."""
    if not is_first_process():
        return 0
    os.write(2, f"{Preempted(number)}\n".encode())
    return Preempted(number).exit_status


def _reset_in_child() -> None:
    """Handle no signals in a forked child, such as a worker that loads data: it shares the socket with its parent."""
    if _current is not None:
        with suppress(ValueError):  # not in the main thread
            _current.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
