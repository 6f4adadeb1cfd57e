"""Data sets that the user's own code registers with reasoning_gym: strangers hand no arguments to that code."""

from collections.abc import Mapping
from typing import Any

from grpo_lightning import start


class OwnConfig(dict[str, Any]):
    """Arguments of a task's data set that the run's own settings give, and no row of a file."""


def check_chosen(task: str, config: Mapping[str, Any]) -> None:
    """Refuse a data set of the user's that settings name which the command brings along, and the command does not.

    Args:
        task: Name of a data set that is registered.
        config: Its arguments; of the task "composite", with those of other data sets.

    Raises:
        ValueError: It is one, or is composed of one.
    """
    places = ", ".join(start.settings_from())
    if not places:
        return
    if _is_of_user(task) and f"data.task={task}" not in start.words():
        raise ValueError(
            f"data.task={task}: a data set of yours, not said by the command itself, and the settings in {places} "
            "would choose what it is given; allowed is this key on the command line"
        )
    for spec in config.get("datasets") or ():
        name = spec.get("name") if isinstance(spec, Mapping) else None
        if isinstance(name, str) and _is_of_user(name):
            raise ValueError(
                f"data.task_config.datasets: {name}: a data set of yours; allowed in the settings of {places} are "
                "those of reasoning_gym itself"
            )


def check_arguments(task: str, config: Mapping[str, Any]) -> None:
    """Refuse arguments of a row of the data for a data set of the user's.

    Args:
        task: Name of a data set, as the row says it.
        config: `OwnConfig`, or what the row says.

    Raises:
        ValueError: There are such.
    """
    if config and not isinstance(config, OwnConfig) and _is_of_user(task):
        raise ValueError(
            f"task={task!r}: a data set of yours, and its row has arguments for it (task_config), which could name "
            "places; allowed in rows are arguments of reasoning_gym's own"
        )


def _is_of_user(task: str) -> bool:
    from reasoning_gym.factory import DATASETS  # takes two seconds; not every run needs it

    return task in DATASETS and not DATASETS[task][0].__module__.startswith("reasoning_gym.")
