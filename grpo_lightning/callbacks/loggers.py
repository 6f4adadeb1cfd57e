"""Loggers that cannot stop a run: what goes wrong in one is said once, and training goes on."""

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from grpo_lightning.output.terminal import one_line

log = logging.getLogger(__name__)

_TOLD = "_grpo_lightning_told"
_BROKEN = "_grpo_lightning_broken"
_ours: set[type] = set()


def guard(loggers: Iterable[Logger]) -> None:
    """Make failures of loggers warnings: each logger's first one is logged, and later calls are tried at every save.

    Args:
        loggers: A trainer's; they stay of their classes.
    """
    for logger in loggers:
        if type(logger) not in _ours:
            _ours.add(kind := _guarded(type(logger)))
            logger.__class__ = kind
    if not isinstance(threading.excepthook, _QuietWriters):
        threading.excepthook = _QuietWriters(threading.excepthook)


@contextmanager
def attempt(logger: Logger) -> Iterator[None]:
    """Inside, a logger is used; an error is a warning, the first time."""
    try:
        yield
    except Exception as error:  # whatever a logger raises, training is worth more
        _fail(logger, error)


class _QuietWriters:
    """Says nothing of errors in TensorBoard's writing threads, which their writers raise again when they are used."""

    def __init__(self, otherwise: Any) -> None:
        self._otherwise = otherwise

    def __call__(self, error: Any) -> None:
        if type(error.thread).__name__ != "_AsyncWriterThread":
            self._otherwise(error)


@cache
def _guarded(kind: Any) -> Any:
    """A class that catches what the methods of a class of loggers raise; a logger can become one of it."""

    class Guarded(kind):  # not one that inherits from two: no logger that already is could become one
        @property
        def experiment(self) -> Any:
            if not vars(self).get(_BROKEN):
                with attempt(self):
                    return super().experiment
            return _DummyExperiment()

        def log_metrics(self, *args: Any, **options: Any) -> None:
            _call(self, super().log_metrics, *args, **options)

        def log_hyperparams(self, *args: Any, **options: Any) -> None:
            _call(self, super().log_hyperparams, *args, **options)

        def log_graph(self, *args: Any, **options: Any) -> None:
            _call(self, super().log_graph, *args, **options)

        def after_save_checkpoint(self, *args: Any, **options: Any) -> None:
            _call(self, super().after_save_checkpoint, *args, **options)

        def finalize(self, *args: Any, **options: Any) -> None:
            _call(self, super().finalize, *args, **options)

        def save(self) -> None:
            self.__dict__[_BROKEN] = False  # there may be room again
            _reopen(self)
            _call(self, super().save)

    Guarded.__name__, Guarded.__qualname__, Guarded.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Guarded


def _call(logger: Any, method: Any, *args: Any, **options: Any) -> None:
    if not vars(logger).get(_BROKEN):
        with attempt(logger):
            method(*args, **options)


def _fail(logger: Logger, error: Exception) -> None:
    logger.__dict__[_BROKEN] = True
    first: BaseException = error
    while first.__cause__ is not None:  # Lightning says of all errors of TensorBoard's that a value is of a wrong type
        first = first.__cause__
    _tell(logger, f"{type(first).__name__}: {first}")
    if isinstance(logger, TensorBoardLogger):
        _close(logger)  # its thread is dead: a later writer takes a new file


def _tell(logger: Logger, what: str) -> None:
    if not vars(logger).get(_TOLD):
        logger.__dict__[_TOLD] = True
        place = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None) or "its service"
        log.warning(
            "%s of %s failed (%s): training goes on, checkpoints are saved, and logs may have gaps",
            type(logger).__name__,
            place,
            one_line(what)[:300],
        )


def _reopen(logger: Any) -> None:
    """Let a writer whose file was removed begin a new one: Linux goes on writing into the file that nobody can open."""
    directory = getattr(logger, "log_dir", None)
    writer: Any = vars(logger).get("_experiment")
    if not isinstance(directory, str) or writer is None:
        return
    if isinstance(logger, TensorBoardLogger):
        file = getattr(getattr(getattr(writer, "file_writer", None), "event_writer", None), "_file_name", None)
        if isinstance(file, str) and not os.path.exists(file):
            _tell(logger, f"{file} was removed")
            _close(logger)
    elif getattr(writer, "has_written", True) and not os.path.isdir(directory):
        _tell(logger, f"{directory} was removed")
        with suppress(OSError):
            os.makedirs(directory)


def _close(logger: TensorBoardLogger) -> None:
    writer, logger._experiment = logger._experiment, None
    if writer is not None:
        with suppress(Exception):
            writer.close()
