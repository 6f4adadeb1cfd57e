"""Whether the settings are what the command says, by which ways soever files that it brings along may change them.

What the user says has rules of its own, such as whose code is trusted. They go by the words of the command, so these
have to be what the settings come to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grpo_lightning.composition import CONF
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings import TOP


def taken_for_choices(overrides: Sequence[Any], repo: Any) -> Iterator[str]:
    """What is wrong with overrides of settings that Hydra takes for the choice of a file.

    It does where there is a folder called as the setting is, be it empty.

    Args:
        overrides: As Hydra has parsed them.
        repo: Where Hydra looks for files of settings.
    """
    for override in overrides:
        key = override.key_or_group
        if _is_setting(key) and repo.group_exists(key):
            yield (
                f"{one_line(str(override.input_line))}: {one_line(key)} is a setting, and where settings are looked "
                "for there is a folder of this name; allowed are other names of folders"
            )


def changed(overrides: Sequence[Any], composed: Mapping[str, Any], is_group: Callable[[str], bool]) -> Iterator[str]:
    """What is wrong with settings that are not what the command says.

    Looked at are plain values and lists of them that no later override is about; Hydra's own settings and choices of
    files have other rules.

    Args:
        overrides: As Hydra has parsed them.
        composed: All settings, not resolved.
        is_group: Whether Hydra finds a folder of files to choose from.
    """
    values = [override for override in overrides if not _is_choice(override, is_group)]
    for number, override in enumerate(values, 1):
        key, value = override.key_or_group, None if override.is_sweep_override() else override.value()
        is_value = not override.is_delete() and not override.is_sweep_override() and _is_plain(value)
        is_last = not any(_are_related(key, later.key_or_group) for later in values[number:])
        if is_value and is_last and (there := _at(composed, key)) != value:
            yield (
                f"{one_line(str(override.input_line))}: with the files that the command brings along it comes to "
                f"{one_line(f'{key}={there}')}; allowed are files that leave it as it is"
            )


def _is_setting(key: str) -> bool:
    """Whether no folder may be called so, for a user to choose from."""
    return "." in key or (key in TOP and not (CONF / key).is_dir())


def _is_choice(override: Any, is_group: Callable[[str], bool]) -> bool:
    key = override.key_or_group
    is_file = not _is_setting(key) and is_group(key)
    is_file = is_file and (override.is_sweep_override() or not isinstance(override.value(), dict))
    return "/" in key or override.package is not None or is_file or key.startswith("hydra.")


def _are_related(key: str, other: str) -> bool:
    """Whether one of two dotted keys is the other one, or below it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(one) for one in value)
    return value == value and not (isinstance(value, str) and {*"$\\"} & {*value}) and not isinstance(value, dict)


def _at(node: Any, key: str) -> Any:
    """What stands at a dotted key; a text where there is nothing."""
    for part in key.split("."):
        if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, Mapping) and part in node:
            node = node[part]
        else:
            return "nothing"
    return node
