"""Loggers whose failures do not end a run, and the identifiers of runs at logging services."""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers
from lightning.pytorch.loggers import Logger

from grpo_lightning.console import single_line, write_atomic

log = logging.getLogger(__name__)
_warned: "weakref.WeakSet[Logger]" = weakref.WeakSet()


@contextmanager
def warn_on_failure(logger: Logger) -> Iterator[None]:
    """Inside, a logger is used; its first error is a warning, further ones are ignored."""
    try:
        yield
    except Exception as error:
        while error.__cause__ is not None:  # Lightning says of all of TensorBoard's errors that a value is wrong
            error = error.__cause__  # type: ignore[assignment]
        if logger not in _warned:
            _warned.add(logger)
            place = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None) or "its service"
            log.warning(
                "%s of %s failed (%s): training goes on, checkpoints are saved, and logs may have gaps",
                *(type(logger).__name__, place, single_line(f"{type(error).__name__}: {error}")[:300]),
            )
        if isinstance(logger, SafeLogger):
            logger.reset()


class SafeLogger(Logger):
    """To inherit from before one of Lightning's loggers: the first error of its methods is a warning."""

    @property
    def experiment(self) -> Any:
        """The object that writes; where it cannot be made, one that does nothing."""
        with warn_on_failure(self):
            return self.open()
        return _Nothing()

    def open(self) -> Any:
        """The object that writes, made on first use."""
        return super().experiment  # type: ignore[misc]

    def reset(self) -> None:
        """Prepare for further use after a failure."""

    def log_metrics(self, *args: Any, **options: Any) -> None:
        with warn_on_failure(self):
            super().log_metrics(*args, **options)  # type: ignore[safe-super]

    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        with warn_on_failure(self):
            super().log_hyperparams(*args, **options)  # type: ignore[safe-super]

    def save(self) -> None:
        with warn_on_failure(self):
            super().save()

    def finalize(self, *args: Any, **options: Any) -> None:
        with warn_on_failure(self):
            super().finalize(*args, **options)


class _Nothing:
    """Accepts every call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class TensorBoardLogger(SafeLogger, loggers.TensorBoardLogger):
    """Lightning's logger of this name; after a failure it begins a new file."""

    def reset(self) -> None:
        writer, self._experiment = self._experiment, None  # its thread is dead
        if writer is not None:
            with suppress(Exception):
                writer.close()


def load_run_id(file: Path) -> str | None:
    """The identifier of this directory's run at a service, if it has one; a continued run keeps it."""
    return file.read_text(encoding="utf-8").strip() or None if file.is_file() else None


def save_run_id(file: Path, name: str) -> None:
    """Write an identifier for `load_run_id`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, f"{name}\n")
