"""Metrics and tables as CSV files that a continued run goes on with."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from grpo_lightning.console import escape_formula, write_atomic
from grpo_lightning.logger.base import SafeLogger

Row = dict[str, Any]


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
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"step": step, **dict(zip(columns, map(escape_formula, row), strict=True))} for row in data]
        write_rows(path, [*read_rows(path), *rows])


class MetricsFile(ExperimentWriter):
    """Appends to ``metrics.csv``, which is written anew where columns are new or a step is written a second time."""

    def __init__(self, log_dir: str) -> None:
        self.hparams: dict[str, Any] = {}
        self.metrics: list[Row] = []
        self.log_dir = log_dir
        self._path = Path(log_dir) / "metrics.csv"
        self._columns: list[str] = []
        self._last = -1

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Keep metrics of a step for the next `save`."""
        values = {escape_formula(key): v.item() if isinstance(v, Tensor) else v for key, v in metrics_dict.items()}
        step = self._last + 1 if step is None else step
        if self.metrics and self.metrics[-1]["step"] == step:
            self.metrics[-1].update(values)
        else:
            self.metrics.append({"step": step, **values})

    def save(self) -> None:
        """Write the metrics since the last `save`."""
        if not self.metrics:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._columns or not self._path.exists():
            present = list(read_rows(self._path))
            self._columns = _columns(present)
            self._last = max((int(row["step"]) for row in present), default=-1)
        steps = [row["step"] for row in self.metrics]
        if {key for row in self.metrics for key in row} <= set(self._columns) and min(steps) > self._last:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerows(self.metrics)
        else:
            rows: dict[int, Row] = {}
            for row in (*read_rows(self._path), *self.metrics):
                rows.setdefault(int(row["step"]), {}).update(row)
            self._columns = write_rows(self._path, [rows[step] for step in sorted(rows)])
        self._last = max(self._last, *steps)
        self.metrics = []

    def log_hparams(self, params: dict[str, Any]) -> None:
        """Write the settings."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        super().log_hparams(params)


def rewind(trainer_loggers: Iterable[loggers.Logger], step: int) -> None:
    """Remove what was written of steps after ``step``, which will be made again; -1 removes all.

    Args:
        trainer_loggers: A trainer's; only those of `CSVLogger` have such files.
        step: The last that is kept.
    """
    for place in (Path(logger.log_dir) for logger in trainer_loggers if isinstance(logger, CSVLogger)):
        for path in (place / "metrics.csv", *place.glob("completions_*.csv")):
            if rows := [row for row in read_rows(path) if int(row["step"]) <= step]:
                write_rows(path, rows)
            else:
                path.unlink(missing_ok=True)


def read_rows(path: Path) -> Iterable[Row]:
    """The rows of a file, all values as text; none if there is no file. A row that was cut short is left out."""
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if None not in row.values() and None not in row and row.get("step", "").isdigit():
                    yield row


def write_rows(path: Path, rows: Sequence[Row]) -> list[str]:
    """Replace a file by rows, atomically; returns its columns, the step first."""
    columns, text = _columns(rows), io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())
    return columns


def _columns(rows: Iterable[Row]) -> list[str]:
    names = dict.fromkeys(["step"])
    for row in rows:
        names |= dict.fromkeys(row)
    return list(names)
