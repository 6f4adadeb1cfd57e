"""Which files of conf/ a run is composed of."""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

Choices = dict[str, str | list[str]]
"""Group of conf/ -> the name of its file, or the names where there are several; of rewards always a list."""


def chosen(overrides: Sequence[str], config: Mapping[str, Any] | None = None, *, name: str = "train") -> Choices:
    """The choices that overrides lead to, those of an algorithm, a policy or an experiment among them.

    Args:
        overrides: As on the command line.
        config: The settings composed of them, which name the rewards also where objects or deletions made them others.
        name: The primary settings file.
    """
    loader = GlobalHydra.instance().config_loader()
    listed = loader.compute_defaults_list(name, list(overrides), RunMode.RUN).defaults
    found: dict[str, list[str]] = {}
    for one in listed:
        group, _, file = (one.config_path or "").rpartition("/")
        if group and group.split("/")[0] != "hydra" and not _is_inherited(one, group):
            found.setdefault(group, []).append(file)
    if config is not None:
        found["reward"] = [str(reward) for reward in config.get("reward") or ()]
    return {group: files if group == "reward" or len(files) > 1 else files[0] for group, files in found.items()}


def _is_inherited(one: ResultDefault, group: str) -> bool:
    """Whether a file only stands below another one of its group."""
    return (one.parent or "").rpartition("/")[0] == group
