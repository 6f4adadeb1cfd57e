"""A table that every kind of logger can take, in the form that suits it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    Example:
        ``Table("completions/train", ("prompt", "total"), [("2+2?", 1.0)], page)``
    """

    name: str
    """What the table is of; loggers show names with the same beginning together."""
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    page: str
    """The same as Markdown, for people."""


def log_table(logger: Logger, table: Table, *, step: int) -> None:
    """Hand a table to a logger: as a text to TensorBoard, as a file to MLflow, as a table to any that takes tables.

    A logger takes tables if it has ``log_table(key, columns, data, step=)``, as W&B's has; others get none.
    """
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text(table.name, table.page, step)
    elif isinstance(logger, MLFlowLogger):
        content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        logger.experiment.log_dict(logger.run_id, content, f"{table.name}/{step:06d}.json")
    elif hasattr(logger, "log_table"):
        takes: Any = logger
        takes.log_table(table.name, list(table.columns), [list(row) for row in table.rows], step=step)
