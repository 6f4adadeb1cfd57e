"""Loggers whose failures end no run, and under which name a service knows a run."""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from grpo_lightning.config.redaction import single_line
from grpo_lightning.console import write_atomic

log = logging.getLogger(__name__)
_warned: "weakref.WeakSet[Logger]" = weakref.WeakSet()


@contextmanager
def attempt(logger: Logger) -> Iterator[None]:
    """Inside, a logger is used; an error is a warning, the first time."""
    try:
        yield
    except Exception as error:  # whatever a logger raises, training is worth more
        while error.__cause__ is not None:  # Lightning says of all of TensorBoard's that a value is of a wrong type
            error = error.__cause__  # type: ignore[assignment]
        if logger not in _warned:
            _warned.add(logger)
            place = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None) or "its service"
            log.warning(
                "%s of %s failed (%s): training goes on, checkpoints are saved, and logs may have gaps",
                *(type(logger).__name__, place, single_line(f"{type(error).__name__}: {error}")[:300]),
            )
        if isinstance(logger, Guarded):
            logger.reset()


class Guarded(Logger):
    """To inherit from before a class of Lightning's loggers: what its methods raise is a warning, the first time."""

    @property
    def experiment(self) -> Any:
        """What writes; where it cannot be made, what does nothing."""
        with attempt(self):
            return self.begin()
        return _Nothing()

    def begin(self) -> Any:
        """What writes, made when it is first asked for."""
        return super().experiment  # type: ignore[misc]

    def reset(self) -> None:
        """Make ready to be used again after a failure."""

    def log_metrics(self, *args: Any, **options: Any) -> None:
        with attempt(self):
            super().log_metrics(*args, **options)  # type: ignore[safe-super]

    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        with attempt(self):
            super().log_hyperparams(*args, **options)  # type: ignore[safe-super]

    def save(self) -> None:
        with attempt(self):
            super().save()

    def finalize(self, *args: Any, **options: Any) -> None:
        with attempt(self):
            super().finalize(*args, **options)


class _Nothing:
    """Stands for what writes: whatever it is asked to do, it does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def known_id(file: Path) -> str | None:
    """The name that a service has given to the run of a directory, so that a continued run is the same run there."""
    return file.read_text(encoding="utf-8").strip() or None if file.is_file() else None


def keep_id(file: Path, name: str) -> None:
    """Write a name down for `known_id`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, f"{name}\n")
