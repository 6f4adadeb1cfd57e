"""Signals: a process is asked to end, and does so between two generated tokens, or at once where nothing is trained.

Imports nothing but the standard library, since what calls rewards uses it, too.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from grpo_lightning.distributed import nudge
from grpo_lightning.distributed.launched import Launched

_ASKING = tuple(
    number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGBREAK")
)
_SAME_PRESS = 0.5  # s in which one Ctrl-C may arrive twice: from the terminal, and from a launcher that hands it on
_GRACE = 5.0  # s for started processes to end by themselves, once this one has saved
_PATIENCE = 3.0  # s for the main thread to notice a signal where nothing is trained yet

GiveUp = Callable[["Preempted"], object]
"""Called from another thread, just before it ends a process whose main thread waits for something that never comes."""

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
        self._numbers: tuple[int, ...] = (signal.SIGTERM,)
        self.launched = Launched()
        """The processes that this one has started to train with it."""
        self._in_steps = False
        self._foreign = nudge.Foreign()
        self._is_importing = False
        self._raised_at: float | None = None
        self._give_up: GiveUp | None = None
        self._interrupted_at: float | None = None
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self._was_handed_on = False
        self._wake: socket.socket | None = None
        # One that Lightning started ends with the first, which would wait for it in vain, or be killed with it.
        self._is_launched = os.environ.get("LOCAL_RANK", "0") != "0" and os.environ.get("TORCHELASTIC_RUN_ID") is None

    def __enter__(self) -> "Signals":
        global _current
        self._numbers = tuple(number for number in _ASKING if signal.getsignal(number) is not signal.SIG_IGN)
        self._previous = {number: signal.signal(number, self._handle) for number in self._numbers}
        if nudge.NUMBER is not None:
            self._previous[nudge.NUMBER] = signal.signal(nudge.NUMBER, self._raise_again)
        # The handler has to wait for the main thread, which may be waiting for another process, say. This one does not.
        reader, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        _current = self
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end_part(error)
        self.forget()

    @contextmanager
    def part(self, give_up: GiveUp | None) -> Iterator["Signals"]:
        """A part of what runs in this context, such as one job of a sweep, that may start processes of its own."""
        self._give_up = give_up
        try:
            yield self
        except BaseException as error:
            self._end_part(error)
            raise
        self._end_part(None)

    def _end_part(self, error: BaseException | None) -> None:
        if isinstance(error, Preempted):
            self.launched.end(_GRACE if error.between_steps else 0.0)
        self.launched, self._give_up, self._in_steps = Launched(), None, False

    def forget(self) -> None:
        """Handle no signals any more; what handled them before does so again."""
        global _current
        _current = None
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._wake is not None:
            self._wake.close()

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
            self._raised_at = self._raised_at or time.monotonic()
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

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Inside, a signal ends the process at once: C code that is being imported would make any error of another."""
        self._is_importing = True
        try:
            yield
        finally:
            self._is_importing = False

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """Inside, a signal raises `Preempted` at once, and again while what is inside has swallowed it and goes on."""
        self._foreign.caller = sys._getframe(2)  # of the function with the ``with`` statement, below contextlib's
        try:
            self.check()  # once a signal would raise: one that came just before has not
            yield
        finally:
            self._foreign.caller = None
            self.check()

    def _handle(self, number: int, frame: object) -> None:
        """Python calls it in the main thread, when that thread gets to it."""
        if self._wake is None:
            self._note(number)
        self.heard = self.heard or number
        if self._is_importing:
            asked = Preempted(self.heard)
            if os.environ.get("LOCAL_RANK", "0") == "0":
                os.write(2, f"{asked}\n".encode())
            self._end_at_once(asked.exit_status)
        if self._raised_at is None and self._may_raise():
            self.check()

    def _may_raise(self) -> bool:
        if self._raised_at is not None:  # later signals must not disturb the saving
            return self._foreign.goes_on(self._raised_at)
        return self._foreign.caller is not None or not (self._in_steps or self._is_launched)

    def _raise_again(self, number: int, frame: FrameType | None) -> None:
        """Handle a nudge: any handler ends a wait; one where `Preempted` was passed by raises another."""
        if self._raised_at is not None and self._may_raise() and self._foreign.is_below(frame):
            self.check()

    def _watch(self, reader: socket.socket) -> None:
        """React to signals in a thread of its own, as soon as they come."""
        with reader:
            while came := reader.recv(1):
                if came[0] in self._numbers:
                    self._note(came[0])

    def _note(self, number: int) -> None:
        self.heard = self.heard or number
        if not self._was_handed_on:
            self._was_handed_on = True
            nudge.start(lambda: _current is self, self._may_raise)
            if self._in_steps:
                self.launched.ask_to_end()
            elif not self._is_launched:
                self.launched.take_over()  # they may end before they handle signals
                if self._wake is not None:
                    timer = threading.Timer(_PATIENCE, self._end_for_lack_of_answer)
                    timer.daemon = True  # else Python would wait for it at the end
                    timer.start()
        if number == signal.SIGINT and not self._is_launched:
            now = time.monotonic()
            self._interrupted_at = self._interrupted_at or now
            if now - self._interrupted_at > _SAME_PRESS:
                self._end_at_once()

    def _end_for_lack_of_answer(self) -> None:
        """End the process though its main thread does not answer: it may wait for a process that has ended already."""
        if self.heard is None or self._in_steps or self._raised_at is not None or self._give_up is None:
            return
        asked = Preempted(self.heard)
        with contextlib.suppress(Exception):
            self._give_up(asked)
        self._end_at_once(asked.exit_status)

    def _end_at_once(self, exit_status: int = 128 + signal.SIGINT) -> None:
        self.launched.kill()
        for end in _abandoned:
            with contextlib.suppress(Exception):
                end()
        os._exit(exit_status)


@contextmanager
def listening(give_up: GiveUp | None = None) -> Iterator[Signals]:
    """Handle signals inside, see `Signals`; outside the main thread it does nothing.

    Args:
        give_up: Has the last word where the main thread does not answer, before anything is trained.
    """
    with contextlib.ExitStack() as entered:
        signals = _current or Signals()
        if _current is None and threading.current_thread() is threading.main_thread():
            entered.enter_context(signals)
        yield entered.enter_context(signals.part(give_up))


def current() -> Signals:
    """What handles the process's signals, or would."""
    return _current or Signals()


def breaking_off() -> contextlib.AbstractContextManager[None]:
    """Inside, foreign code runs that may take long: `Signals.breaking_off`, where signals are handled."""
    return contextlib.nullcontext() if _current is None else _current.breaking_off()


@contextmanager
def importing() -> Iterator[None]:
    """Inside, libraries are imported, and nothing is there to lose: `Signals.importing`, where signals are handled."""
    with contextlib.nullcontext() if _current is None else _current.importing():
        yield


def when_abandoned(end: Callable[[], object]) -> None:
    """Have ``end`` called, from another thread, before a second Ctrl-C ends the process without further ado."""
    _abandoned.append(end)


def _leave_to_parent() -> None:
    """Handle no signals in a forked child, such as a worker that loads data: else they would be its parent's, too."""
    if _current is not None:
        with contextlib.suppress(ValueError):  # not in the main thread
            _current.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
