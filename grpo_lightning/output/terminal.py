"""What a run says on a terminal and in its log file: without control characters and secrets."""

import errno
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from grpo_lightning.config.redaction import escape_control, redact

WIDTH = 80
"""Columns that a line fits into, except for a path or a command that is longer by itself."""


def brief(value: float, digits: int) -> str:
    """A number with so many decimals, as in .979, or where that says nothing with as many leading digits and one."""
    if value and not 0.5 * 10**-digits <= abs(value) < 10:
        return bare(f"{value:.{digits + 1}g}")
    return bare(f"{value:.{digits}f}")


def bare(number: str) -> str:
    """``number`` without the zero before its point."""
    return number.replace("0.", ".", 1) if number.startswith(("0.", "-0.")) else number


def show(line: str) -> None:
    """Print a line to stderr."""
    print(redact(escape_control(line)), file=sys.stderr, flush=True)


def say(line: str) -> None:
    """Print a line to stderr, and write it to the log file of the run, if there is one."""
    show(line)
    logging.getLogger(__name__).info("%s", line, extra={"shown": True})


def sentence(error: BaseException) -> str:
    """What an exception says, in words that can stand alone: other kinds than ValueError are named."""
    text, kind = str(error).strip(), type(error)
    is_plain = kind.__module__.startswith("grpo_lightning") or kind in (ValueError, RuntimeError, FloatingPointError)
    return redact(escape_control(text if text and is_plain else f"{kind.__name__}: {text}" if text else kind.__name__))


class FileFormatter(logging.Formatter):
    """Formats records for the log file of a run: with time and traceback, without secrets and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(escape_control(super().format(record)))


class TerminalFormatter(FileFormatter):
    """Formats records for the terminal: tracebacks are in the file, unless HYDRA_FULL_ERROR=1."""

    def format(self, record: logging.LogRecord) -> str:
        if os.environ.get("HYDRA_FULL_ERROR") != "1":
            without = {"exc_info": None, "exc_text": None, "stack_info": None}
            record = logging.makeLogRecord(vars(record) | without)
        return super().format(record)


class TerminalHandler(logging.StreamHandler[Any]):
    """Writes to what ``sys.stderr`` is at the moment: while a progress bar is shown, above it.

    Args:
        stream: Not looked at; logging's own handler has it.
    """

    def __init__(self, stream: object = None) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        """What is written to."""
        return sys.stderr


def unseen() -> Any:
    """A logging filter for the terminal: leaves out what was printed there already."""
    return lambda record: not getattr(record, "shown", False)


class Lasting:
    """A stream that outlives its reader: what is printed after ``| head -2`` has ended goes nowhere.

    Args:
        stream: The stream, such as ``sys.stdout``; everything but writing is its own.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text``, or nothing if nobody reads any more."""
        self._outlive(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Hand over what was written, if anybody reads it."""
        self._outlive(self._stream.flush)

    def _outlive(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOTCONN, errno.ESHUTDOWN):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # also for what libraries write, and for the last flush
            os.close(nowhere)


def last_through_closed_pipes() -> None:
    """Make ``sys.stdout`` and ``sys.stderr`` of this process `Lasting`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Lasting):
            setattr(sys, name, Lasting(stream))
