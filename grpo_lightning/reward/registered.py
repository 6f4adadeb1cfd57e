"""Data sets that the user's own code registers with reasoning_gym: rows of a file hand no arguments to that code."""

from collections.abc import Mapping
from typing import Any


class OwnConfig(dict[str, Any]):
    """Arguments of a task's data set that the run's own settings give, and no row of a file."""


def check_arguments(task: str, config: Mapping[str, Any]) -> None:
    """Refuse arguments of a row of the data for a data set of the user's.

    Args:
        task: Name of a data set, as the row says it.
        config: `OwnConfig`, or what the row says.

    Raises:
        ValueError: There are such.
    """
    if config and not isinstance(config, OwnConfig) and not is_of_library(task):
        raise ValueError(
            f"task={task!r}: no data set of reasoning_gym itself, and its row has arguments for it (task_config), "
            "which could name places; allowed are those of reasoning_gym's own"
        )


def is_of_library(task: str) -> bool:
    """Whether this is the name of one of reasoning_gym's own data sets."""
    from reasoning_gym.factory import DATASETS  # takes two seconds; not every run needs it

    return task in DATASETS and DATASETS[task][0].__module__.startswith("reasoning_gym.")
