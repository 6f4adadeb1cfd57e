"""Signals: a process is asked to end, and does so between two generated tokens, or at once where nothing is trained.

Imports nothing but the standard library, since what calls rewards uses it, too.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ASKING = tuple(
    number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGBREAK")
)
_SAME_PRESS = 0.5  # s in which one Ctrl-C may arrive twice: from the terminal, and from a launcher that hands it on
_GRACE = 5.0  # s for started processes to end by themselves, and for the main thread to notice a signal before training

_current: "Signals | None" = None
_abandoned: list[Callable[[], object]] = []


class Preempted(BaseException):
    """The process was asked to end by a signal.

    Like KeyboardInterrupt no ``Exception``, so that nothing that handles errors takes it for one.

    Args:
        number: The signal.
        between_steps: Whether the weights are those of the last complete step, so that they can be saved.
        saved: What is said of what was saved.
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


class Launched:
    """The processes that a launcher of Lightning's has started to train with this one."""

    def __init__(self) -> None:
        self._launcher: Any = None
        self._taken: list[subprocess.Popen[Any]] = []

    def attach(self, launcher: Any) -> None:
        """Take note of what has them in ``procs``; None, or one without, starts none."""
        self._launcher = launcher

    def ask_to_end(self) -> None:
        """Send them SIGTERM: not SIGINT, which the terminal has sent them, too, and of which two end at once."""
        for process in getattr(self._launcher, "procs", None) or ():
            process.send_signal(signal.SIGTERM)

    def take_over(self) -> None:
        """Let Lightning forget them: a thread of its kills this process when one of them does not end well."""
        processes = getattr(self._launcher, "procs", None) or []
        self._taken += processes
        processes.clear()

    def end(self, seconds: float) -> None:
        """Let them end by themselves within ``seconds``, and kill those that do not."""
        self.take_over()
        until = time.monotonic() + seconds
        for process in self._taken:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in self._taken:
            process.kill()


class Signals:
    """Knows whether the process was asked to end: by SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1.

    As a context it handles these signals, but those that are ignored, as under nohup. Before the steps and after them
    a signal raises `Preempted` at once. During the steps `check` raises it, which is called between generated tokens.
    A second Ctrl-C ends the process and those that it has started.

    Outside of such a context, under a Trainer of a program's own, `begin_steps` makes SIGTERM known to `check`.
    """

    def __init__(self) -> None:
        self.heard: int | None = None
        """The first signal that came."""
        self.launched = Launched()
        self._numbers: tuple[int, ...] = (signal.SIGTERM,)
        self.is_importing = False
        self._in_steps = self._is_raised = self._is_handed_on = False
        self._interrupted_at: float | None = None
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self._wake: socket.socket | None = None
        # One that Lightning started ends with the first, which would wait for it in vain, or be killed with it.
        self._is_launched = os.environ.get("LOCAL_RANK", "0") != "0" and os.environ.get("TORCHELASTIC_RUN_ID") is None

    def __enter__(self) -> "Signals":
        global _current
        self._numbers = tuple(number for number in _ASKING if signal.getsignal(number) is not signal.SIG_IGN)
        self._previous = {number: signal.signal(number, self._handle) for number in self._numbers}
        # The handler waits for the main thread, which may wait for another process in C code. This thread does not.
        reader, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        _current = self
        return self

    def __exit__(self, *_: object) -> None:
        """Handle no signals any more; what handled them before does so again."""
        global _current
        _current = None
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._wake is not None:
            self._wake.close()

    @contextmanager
    def part(self) -> Iterator["Signals"]:
        """A part of what runs in this context, such as one job of a sweep, that may start processes of its own."""
        try:
            yield self
        except Preempted as error:
            self.launched.end(_GRACE if error.between_steps else 0.0)
            raise
        finally:
            self.launched, self._in_steps = Launched(), False

    def begin_steps(self, launcher: Any) -> None:
        """From now on a signal waits for `check`; also where Lightning has put its own handlers, as in each stage."""
        self.launched.attach(launcher)
        self._in_steps = True
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                signal.signal(number, self._handle)
            if self._wake is not None:
                signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def end_steps(self) -> None:
        """From now on a signal raises at once again; one that came before raises now."""
        self.check()
        self._in_steps = False

    def check(self) -> None:
        """Raise `Preempted` if a signal has come."""
        if self.heard is not None:
            self._is_raised = True
            raise Preempted(self.heard, between_steps=self._in_steps)

    def asked(self, error: BaseException, *, is_consequence: bool) -> Preempted | None:
        """What ended the process, if it was a signal.

        Args:
            error: What was raised.
            is_consequence: Whether ``error`` comes of the end of another process, which the same signal may have ended;
                before the steps every error does that follows a signal, since libraries make others of `Preempted`.
        """
        if isinstance(error, Preempted):
            # Another process may have told this one of another signal than the one that this one has passed on.
            return Preempted(self.heard or error.number, between_steps=error.between_steps)
        return Preempted(self.heard) if self.heard is not None and (is_consequence or not self._in_steps) else None

    def _handle(self, number: int, frame: object) -> None:
        """Python calls it in the main thread, when that thread gets to it."""
        if self._wake is None:
            self._note(number)
        self.heard = self.heard or number
        if self.is_importing:
            self._end_untrained()
        if not (self._is_raised or self._in_steps or self._is_launched):  # later ones must not disturb the saving
            self.check()

    def _watch(self, reader: socket.socket) -> None:
        """React to signals in a thread of its own, as soon as they come."""
        with reader:
            while True:
                try:
                    came = reader.recv(1)
                except TimeoutError:  # the main thread waits in C code, and there is nothing to lose
                    if not (self._in_steps or self._is_raised or self._is_launched):
                        self._end_untrained()
                    came = b"\0"
                if not came:
                    return
                if came[0] in self._numbers:
                    reader.settimeout(_GRACE)
                    self._note(came[0])

    def _note(self, number: int) -> None:
        self.heard = self.heard or number
        if not self._is_handed_on:
            self._is_handed_on = True
            if self._in_steps:
                self.launched.ask_to_end()
            elif not self._is_launched:
                self.launched.take_over()  # they may end before they handle signals
        if number == signal.SIGINT and not self._is_launched:
            now = time.monotonic()
            self._interrupted_at = self._interrupted_at or now
            if now - self._interrupted_at > _SAME_PRESS:
                self._end_at_once(128 + signal.SIGINT)

    def _end_untrained(self) -> None:
        asked = Preempted(self.heard or signal.SIGTERM)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, f"{asked}\n".encode())
        self._end_at_once(asked.exit_status)

    def _end_at_once(self, exit_status: int) -> None:
        with contextlib.suppress(Exception):
            self.launched.end(0.0)
        for end in _abandoned:
            with contextlib.suppress(Exception):
                end()
        os._exit(exit_status)


@contextmanager
def listening() -> Iterator[Signals]:
    """Handle signals inside, see `Signals`; outside the main thread it does nothing."""
    with contextlib.ExitStack() as entered:
        signals = _current or Signals()
        if _current is None and threading.current_thread() is threading.main_thread():
            entered.enter_context(signals)
        yield entered.enter_context(signals.part())


def current() -> Signals:
    """What handles the process's signals, or would."""
    return _current or Signals()


@contextmanager
def importing() -> Iterator[None]:
    """Inside, a signal ends the process at once: C code that is being imported would make any error of another."""
    signals = current()
    signals.is_importing = True
    try:
        yield
    finally:
        signals.is_importing = False


def when_abandoned(end: Callable[[], object]) -> None:
    """Have ``end`` called, from another thread, before a second Ctrl-C ends the process without further ado."""
    _abandoned.append(end)


def _leave_to_parent() -> None:
    """Handle no signals in a forked child, such as a worker that loads data: else they would be its parent's, too."""
    if _current is not None:
        with contextlib.suppress(ValueError):  # not in the main thread
            _current.__exit__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
