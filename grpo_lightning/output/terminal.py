"""What a run says on a terminal: safe to show, and no reason for a run to end."""

import errno
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TextIO

from grpo_lightning.output.redaction import hide

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_COMMAND = re.compile(r"\x1b(?=[\]PX^_])|[\x90\x98\x9d-\x9f\u202a-\u202e\u2066-\u2069]")
"""Begins what tells a terminal more than colours and places, such as the clipboard's content, or turns text around."""
WIDTH = 80
"""Columns that a line fits into, except for a path or a command that is longer by itself."""
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_NO_WORDS = re.compile(r"[\w/.,:=@%~+-]+", re.ASCII)
_MOST_QUOTED = 80
_WITHIN = str.maketrans("“”", '""')
"""Characters."""
_MORE = "\n  | "
"""How further lines begin of what others say, so that none of them looks like one of this program's own."""
_LIBRARIES = (
    *("accelerate", "datasets", "huggingface_hub", "lightning", "lightning.pytorch", "optuna", "peft", "torch"),
    *("transformers", "vllm"),
)
_SEQUENCE = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]"
_OFFER = re.compile(
    rf"(?:^|(?<=\r))(?=(?:{_SEQUENCE}|[^\w|\n]|[\u115f\u1160\u3164\uffa0])*+"  # the last are letters that nobody sees
    r"(asked\sto\send|continue\swith|exported\sto|interrupted|look\sat|stopped|this\stable|what\sis\snot)\b)",
    re.MULTILINE | re.IGNORECASE,
)
"""Begins a line that offers a command or says how a run has ended."""
_is_own: ContextVar[bool] = ContextVar("_is_own", default=False)
"""Whether this program is printing, and no library."""
_GONE = (errno.EPIPE, errno.EIO, errno.ENOTCONN, errno.ESHUTDOWN)


def printable(text: str) -> str:
    r"""``text`` with its control characters as escapes, such as ``\x1b``; tabs and ends of lines stay.

    Completions and the messages of exceptions may hold sequences that clear a terminal, rename its window or turn the
    direction of writing around, so that it shows something else than is there.
    """
    return _CONTROL.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode("ascii")


def one_line(text: str) -> str:
    r"""`printable`, with ends of lines as ``\n``: a value that a stranger may have written, in a sentence."""
    return "\\n".join(printable(text).splitlines())


def quoted(text: str) -> str:
    """The beginning of `one_line` in quotes: words of a stranger's in a sentence of this program, which end none."""
    told = one_line(text).translate(_WITHIN)
    return f"“{told[:_MOST_QUOTED]}{'…' * (len(told) > _MOST_QUOTED)}”"


def name_of_file(text: str) -> str:
    """A name that a stranger may have given a file, as it stands if it is no words, and else as `quoted`."""
    return text if _NO_WORDS.fullmatch(text) else quoted(text)


def brief(value: float, digits: int) -> str:
    """A number with so many decimals, as in .979, or where that says nothing with as many leading digits and one."""
    if value and not 0.5 * 10**-digits <= abs(value) < 10:
        return bare(f"{value:.{digits + 1}g}")
    return bare(f"{value:.{digits}f}")


def bare(number: str) -> str:
    """``number`` without the zero before its point."""
    return number.replace("0.", ".", 1) if number.startswith(("0.", "-0.")) else number


def show(line: str) -> None:
    """Print a line of this program's own to stderr; what others print there may not begin as its offers do."""
    before = _is_own.set(True)
    try:
        print(hide(printable(_marked(line))), file=sys.stderr, flush=True)
    finally:
        _is_own.reset(before)


def say(line: str) -> None:
    """Print a line to stderr, and write it to the log file of the run, if there is one."""
    show(line)
    logging.getLogger(__name__).info("%s", line, extra={"shown": True})


def _marked(text: str) -> str:
    """``text`` with a mark before its further lines, so that only its first one can be a line of this program's own."""
    return re.sub(r"\n(  \| |  (?=\S))?", lambda _: _MORE, text)


def sentence(error: BaseException) -> str:
    """What an exception says, in words that can stand alone; of those that others raise with their type.

    Their words may be a stranger's, such as a chat template's, and tell of a command as this program does.
    """
    text = str(error).strip()
    text = text if hasattr(error, "problems") else _marked(text)  # which are a line each
    expected = type(error).__module__.startswith("grpo_lightning") or type(error) in (ValueError, RuntimeError)
    if isinstance(error, FloatingPointError) or (expected and text and _is_raised_here(error)):
        return hide(printable(text))
    return hide(printable(f"{type(error).__name__}: {text}" if text else type(error).__name__))


def _is_raised_here(error: BaseException) -> bool:
    """Whether this package has raised an exception, or nobody yet."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is None or str(place.tb_frame.f_globals.get("__name__")).startswith("grpo_lightning")


class FileFormatter(logging.Formatter):
    """Formats records for the log file of a run: with time and traceback, without secrets and control characters."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        return _marked(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)  # with the text of an exception as it is
        return hide(printable(text if getattr(record, "shown", False) else _OFFER.sub("| ", text)))


class TerminalFormatter(FileFormatter):
    """Formats records for the terminal: one line each, tracebacks are in the file."""

    def format(self, record: logging.LogRecord) -> str:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":  # Hydra's name for it
            return super().format(record)
        kept = record.exc_info, record.exc_text, record.stack_info
        record.exc_info = record.exc_text = record.stack_info = None
        try:
            return super().format(record)
        finally:
            record.exc_info, record.exc_text, record.stack_info = kept


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


class ForeignFormatter(logging.Formatter):
    """Formats records of a library for the terminal as the library does, without secrets, control characters, colours.

    Args:
        own: The library's formatter; None: it has none.
    """

    def __init__(self, own: logging.Formatter | None) -> None:
        super().__init__()
        self._own = own or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        return hide(printable(_marked(_COLOUR.sub("", self._own.format(record)))))


def show_printable(libraries: Sequence[str] = _LIBRARIES) -> None:
    """Let what libraries log and warn of, such as names in a stranger's files, do nothing to a terminal.

    Args:
        libraries: The names of the loggers that have handlers of their own.
    """
    for library in libraries:
        for handler in logging.getLogger(library).handlers:
            if not isinstance(handler.formatter, FileFormatter | ForeignFormatter):
                handler.setFormatter(ForeignFormatter(handler.formatter))
    if not isinstance(warnings.showwarning, _Shown):
        warnings.showwarning = _Shown(warnings.showwarning)


class _Shown:
    """Shows warnings as ``warnings.showwarning`` does, printable.

    Args:
        own: How they were shown before.
    """

    def __init__(self, own: Callable[..., None]) -> None:
        self._own = own

    def __call__(self, message: Warning | str, *place: Any, **more: Any) -> None:
        self._own(hide(printable(_marked(str(message)))), *place, **more)


def is_unseen(record: logging.LogRecord) -> bool:
    """A logging filter for the terminal: leaves out what was printed there already, and what a job says itself."""
    is_job = record.name.startswith("hydra.") and record.getMessage().startswith("\t#")
    return not is_job and not getattr(record, "shown", False)


def unseen() -> Any:
    """The filter `is_unseen`, for the configuration of a log."""
    return is_unseen


class Lasting:
    """A stream to print on that outlives its reader, shows no secrets, and no offers but this program's own.

    When the reader is gone, as in ``python train.py | head -2`` or where a terminal was closed, what is printed from
    then on goes nowhere, and the program goes on.

    Args:
        stream: The stream, such as ``sys.stdout``; everything but writing is its own.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text``, or nothing if nobody reads any more."""
        try:
            shown = text if _is_own.get() else _COMMAND.sub(_escaped, _OFFER.sub("| ", text))
            self._stream.write(hide(shown))
            return len(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Hand over what was written, if anybody reads it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if error.errno not in _GONE:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # also for what other libraries write, and for the last flush
        os.close(nowhere)


def last_through_closed_pipes() -> None:
    """Make ``sys.stdout`` and ``sys.stderr`` of this process `Lasting`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Lasting):
            setattr(sys, name, Lasting(stream))
