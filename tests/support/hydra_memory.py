"""Hydra with the files of conf/ read and merged once in a process of tests: composing takes a quarter of the time."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.override_parser.types import Override

_LISTED: dict[tuple[str | None, ...], DefaultsList] = {}
_COMPOSED: dict[str, Any] = {}
_compose = ConfigLoaderImpl._compose_config_from_defaults_list


def _listed_once(
    repo: CachingConfigRepository, config_name: str | None, overrides_list: Sequence[Override], **others: Any
) -> DefaultsList:
    """Which files are merged: it depends on those overrides only that choose from a group, as Hydra tells them."""
    values = [o for o in overrides_list if isinstance(o.value(), dict) or not repo.group_exists(o.key_or_group)]
    groups = [override for override in overrides_list if override not in values]
    key = (config_name, *(str(other) for other in others.values()), *(override.input_line for override in groups))
    if key not in _LISTED:
        _LISTED[key] = create_defaults_list(repo, config_name, groups, **others)
    return replace(_LISTED[key], defaults=copy.deepcopy(_LISTED[key].defaults), config_overrides=values)


def _composed_once(loader: ConfigLoaderImpl, defaults: list[Any], repo: CachingConfigRepository) -> Any:
    """The files of a list of defaults merged, before single values are set."""
    key = repr(defaults)
    if key not in _COMPOSED:
        _COMPOSED[key] = _compose(loader, defaults, repo)
    return copy.deepcopy(_COMPOSED[key])


@contextmanager
def files_read_once() -> Iterator[None]:
    """Let Hydra remember its files; only where all of them are those of conf/."""
    with (
        patch.object(config_loader_impl, "create_defaults_list", _listed_once),
        patch.object(ConfigLoaderImpl, "_compose_config_from_defaults_list", _composed_once),
    ):
        yield
