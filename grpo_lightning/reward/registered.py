"""Data sets that the user's own code registers with reasoning_gym: rows of a file say nothing of what that does."""

from collections.abc import Iterator, Mapping
from typing import Any

_own: set[str] = set()
_named: set[str] = set()


def note_own(task: str, config: Mapping[str, Any]) -> None:
    """Take note of a task and its arguments of which the run's own settings make rows, with which these come back."""
    _own.add(f"{task} {dict(config)!r}")
    _named.update((task, *(name for _, name in composed_of(config))))


def forget() -> None:
    """Forget what was noted, at the start of a run: its rows may be others than those of a run before it."""
    _own.clear()
    _named.clear()


def noted() -> tuple[set[str], set[str]]:
    """What was noted in this process, for `note` in another one."""
    return {*_own}, {*_named}


def note(own: set[str], named: set[str]) -> None:
    """Take note of what another process has `noted`."""
    _own.update(own)
    _named.update(named)


def check_task(task: str, config: Mapping[str, Any]) -> None:
    """Refuse a row of a data set of the user's that the run's own settings do not name, or further arguments for it.

    Verifiers evaluate what their own data sets have put into a row, some as Python; the row may be a stranger's.

    Args:
        task: Name of a data set, as the row says it.
        config: Its arguments, as the row says them; size and seed are allowed.

    Raises:
        ValueError: It is such a row, or its arguments are not those of the run's own settings.
    """
    from reasoning_gym.factory import DATASETS

    if task in DATASETS and task not in _named and not is_of_library(task):
        raise ValueError(
            f"task={task!r}: a data set of your own, whose verifier would get what this row says; allowed are "
            "reasoning_gym's own, the one of data.task, and a function of your own as data.verifier"
        )
    named = next(_further(config), None)
    tasks = (task, *(name for _, name in composed_of(config)))
    if named and f"{task} {dict(config)!r}" not in _own and not all(map(is_of_library, tasks)):
        raise ValueError(
            f"task={task!r}: no data set of reasoning_gym itself, and task_config of its row has {named!r}; allowed "
            "are size and seed, the arguments of data.task_config, and those of reasoning_gym's own"
        )


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


def _further(node: Any) -> Iterator[str]:
    """The keys of all but sizes and seeds, in a mapping and in those in it."""
    is_listed = isinstance(node, list | tuple)
    for key, value in node.items() if isinstance(node, Mapping) else enumerate(node) if is_listed else ():
        is_number = isinstance(value, int | float | None) and not isinstance(value, bool)
        if not isinstance(value, Mapping | list | tuple) and not (is_number and key in ("seed", "size")):
            yield str(key)
        yield from _further(value)
