"""Reading nested settings: the value at a dotted key, and a walk over all of them."""

from collections.abc import Iterator, Mapping
from typing import Any


def value_at(config: Any, key: str, default: Any = None) -> Any:
    """The value at a dotted key, or ``default`` where there is none; items of lists are numbered from 0."""
    for name in key.split("."):
        if isinstance(config, list) and name.isdigit() and int(name) < len(config):
            config = config[int(name)]
        elif isinstance(config, Mapping) and name in config:
            config = config[name]
        else:
            return default
    return config


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every node of nested settings, parents first, as pairs of dotted key and value.

    A part of a run that others contain, as ``module.loss`` is ``${loss}``, is visited once, where it stands by itself.

    Args:
        config: All settings, or those at a key.
        prefix: This key; empty for all settings.
    """
    yield from _walk(config, prefix, {} if prefix else config)


def _walk(node: Any, prefix: str, parts: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    pairs = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else ()
    for name, value in pairs:
        if not prefix or not _is_copy(value, parts.get(name)):
            key = f"{prefix}.{name}" if prefix else str(name)
            yield key, value
            yield from _walk(value, key, parts)


def _is_copy(value: Any, part: Any) -> bool:
    """Whether a value is a whole part, or the list of a part's values; compared as text, since nan differs from nan."""
    if not isinstance(part, Mapping) or not isinstance(value, Mapping | list):
        return False
    return repr(value) == repr(part if isinstance(value, Mapping) else list(part.values()))


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value of nested settings with its dotted key; see `walk`."""
    return ((key, value) for key, value in walk(config, prefix) if not isinstance(value, Mapping | list | tuple))


def each_target(config: Any, prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every mapping with a ``_target_`` in nested settings with its dotted key; see `walk`."""
    pairs = [(prefix, config), *walk(config, prefix)] if prefix else walk(config)
    return ((key, value) for key, value in pairs if isinstance(value, Mapping) and "_target_" in value)
