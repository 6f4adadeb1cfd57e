"""Data sets that the user's own code registers with reasoning_gym: what settings say of one is given to that code."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_lightning.settings.walk import each_target

_OFTEN = ("spell_backward", "composite", "basic_arithmetic", "simple_equations")
"""Of reasoning_gym's own, what conf/ names: to know others takes an import of two seconds."""


def of_user(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each data set of the user's that settings name, as key and name."""
    for key, node in each_target(config):
        task, arguments = node.get("task"), {f"{key}.task_config": node.get("task_config")}
        if not str(node["_target_"]).startswith("grpo_lightning.data.reasoning_gym.") or not isinstance(task, str):
            continue
        levels = node.get("levels")
        arguments[f"{key}.levels.{task}"] = levels.get(task) if isinstance(levels, Mapping) else None
        if not _is_known(task):
            yield f"{key}.task", task
        for place, part in arguments.items():
            for one, name in composed_of(part, place):
                if not _is_known(name):
                    yield f"{one}.name", name


def _is_known(task: str) -> bool:
    is_untouched = "reasoning_gym.factory" not in sys.modules  # nothing is registered before it is imported
    return (task in _OFTEN and is_untouched) or is_of_library(task)


def composed_of(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The data sets that the arguments of a composite name, also those of composites in it.

    Args:
        config: The arguments.
        prefix: Where they stand.

    Yields:
        Where a data set stands, and its name.
    """
    listed = config.get("datasets") if isinstance(config, Mapping) else None
    for number, one in enumerate(listed) if isinstance(listed, list | tuple) else ():
        if isinstance(one, Mapping):
            place = f"{prefix}.datasets.{number}"
            yield place, str(one.get("name"))
            yield from composed_of(one.get("config"), f"{place}.config")


def is_of_library(task: str) -> bool:
    """Whether this is the name of one of reasoning_gym's own data sets."""
    from reasoning_gym.factory import DATASETS  # takes two seconds; not every run needs it

    return task in DATASETS and all(part.__module__.startswith("reasoning_gym.") for part in DATASETS[task])
