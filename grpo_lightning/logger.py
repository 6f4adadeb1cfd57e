"""Loggers: a failure of one does not end the run, and a resumed run appends to the same logs."""

import csv
import io
import logging
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from grpo_lightning.console import escape_formula, single_line, write_atomic

log = logging.getLogger(__name__)
_warned: "weakref.WeakSet[Logger]" = weakref.WeakSet()
Row = dict[str, Any]


@contextmanager
def warn_on_failure(logger: Logger) -> Iterator[None]:
    """Context of using a logger: its first error becomes a warning, further ones are ignored."""
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
        return _NullWriter()

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


class _NullWriter:
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


class CSVLogger(SafeLogger, loggers.CSVLogger):
    """Writes ``metrics.csv`` with one row per step, tables as ``NAME.csv``, and the settings as ``hparams.yaml``.

    Lightning's logger of this name removes what an earlier process has written, and puts a validation into a row of its
    own; the arguments are its.
    """

    _experiment: "MetricsFile | None"

    def open(self) -> "MetricsFile":
        if self._experiment is None:
            self._experiment = MetricsFile(self.log_dir)
        return self._experiment

    @rank_zero_only
    def log_table(self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], *, step: int) -> None:
        """Append rows to ``KEY.csv``, where slashes are underscores, after the number of the step."""
        path = Path(self.log_dir) / f"{key.replace('/', '_')}.csv"
        rows = [{"step": step, **dict(zip(columns, map(escape_formula, row), strict=True))} for row in data]
        write_rows(path, [*read_rows(path), *rows])


class MetricsFile(ExperimentWriter):
    """Appends to ``metrics.csv``, which is written anew where columns are new or a step is written a second time."""

    def __init__(self, log_dir: str) -> None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        self.hparams: dict[str, Any] = {}
        self.metrics: list[Row] = []
        self.log_dir = log_dir
        self._path = Path(log_dir) / "metrics.csv"
        self._columns: list[str] = []
        self._last = -1

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Keep metrics of a step for the next `save`."""
        values = {name: v.item() if isinstance(v, Tensor) else v for name, v in metrics_dict.items()}
        self.metrics.append({"step": step or 0, **values})

    def save(self) -> None:
        """Write the metrics since the last `save`."""
        if not self.metrics:
            return
        rows: dict[int, Row] = {}
        for row in self.metrics:
            rows.setdefault(row["step"], {}).update(row)
        is_new = not {name for row in rows.values() for name in row} <= set(self._columns)
        if is_new or min(rows) <= self._last or not self._path.exists():
            new, rows = rows, {int(row["step"]): row for row in read_rows(self._path)}
            for step, row in new.items():
                rows.setdefault(step, {}).update(row)
            self._columns = write_rows(self._path, [rows[step] for step in sorted(rows)])
        else:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerows(rows.values())
        self._last = max(self._last, *rows)
        self.metrics = []


def rewind_csv(trainer_loggers: Iterable[Logger], step: int) -> None:
    """Remove what `CSVLogger` wrote of steps after ``step``, which will be made again; -1 removes all."""
    for place in (Path(logger.log_dir) for logger in trainer_loggers if isinstance(logger, CSVLogger)):
        for path in (place / "metrics.csv", *place.glob("completions_*.csv")):
            if rows := [row for row in read_rows(path) if int(row["step"]) <= step]:
                write_rows(path, rows)
            else:
                path.unlink(missing_ok=True)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, all values as text; none if there is no file. A row that was cut short is left out."""
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if None not in row.values() and None not in row and row.get("step", "").isdigit():
                    yield row


def write_rows(path: Path, rows: Sequence[Row]) -> list[str]:
    """Replace a file by rows, atomically; returns its columns, the step first."""
    columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.getvalue())
    return columns


class WandbLogger(SafeLogger, loggers.WandbLogger):
    """Logs to W&B, or with ``offline`` to files that ``wandb sync`` uploads.

    A run keeps its identifier when it continues; steps that are made again appear there twice. It ends with the
    training, so that another run in this process is another one there.

    Args:
        save_dir: The run directory, where W&B's files and the identifier are.
        options: The other arguments of Lightning's logger of this name.
    """

    def __init__(self, save_dir: str, **options: Any) -> None:
        self._file = Path(save_dir) / ".wandb_id"
        super().__init__(save_dir=save_dir, **{"id": _load_run_id(self._file) or secrets.token_hex(4), **options})
        self._wandb_init.pop("anonymous", None)  # W&B warns about it, whatever its value

    def open(self) -> Any:
        is_new, run = self._experiment is None, super().open()
        if is_new and self._experiment is not None:  # in the first process
            _save_run_id(self._file, str(self._id))
        return run

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(status != "success"))
            self._experiment = None


class MLFlowLogger(SafeLogger, loggers.MLFlowLogger):
    """Logs to an MLflow server or database.

    A run keeps its identifier when it continues; steps that are made again appear there twice. Settings stay those of
    its first start.

    Args:
        directory: The run directory, where the identifier is.
        options: The arguments of Lightning's logger of this name.
    """

    def __init__(self, directory: str, **options: Any) -> None:
        self._file = Path(directory) / ".mlflow_id"
        run_id = _load_run_id(self._file)
        self._continues = run_id is not None
        super().__init__(**{"run_id": run_id, **options})

    def open(self) -> Any:
        is_new, client = not self._initialized, super().open()
        if is_new and self._initialized:
            _save_run_id(self._file, str(self._run_id))
            client.update_run(self._run_id, status="RUNNING")
        return client

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars; ``val/pass@1`` is ``val/pass_at_1`` there, where names have no "@"."""
        super().log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Write the settings, once: MLflow refuses other values later."""
        if not self._continues:
            super().log_hyperparams(params)


def _load_run_id(file: Path) -> str | None:
    """The identifier of this directory's run at a service, if it has one."""
    return file.read_text(encoding="utf-8").strip() or None if file.is_file() else None


def _save_run_id(file: Path, name: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, f"{name}\n")
