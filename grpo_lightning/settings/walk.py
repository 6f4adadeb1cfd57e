"""All settings one after the other, wherever they stand."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PARTS = (
    *("advantage", "callbacks", "correction", "data", "environment", "logger", "loss", "module", "optimizer", "policy"),
    *("reference", "reward", "rollout", "sampler", "schedule", "taught", "trainer", "validation"),
)
"""Of a run, which others have copies of; another key at the top is nobody's."""
_NAMED = ("callbacks", "logger", "reward")
"""Parts whose settings have names of the user's, which may be those of other parts."""


def each_target(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every mapping with a ``_target_``, wherever it stands, with its dotted key."""
    yield from _targets(config, {key: part for key, part in config.items() if key in PARTS})


def every_target(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The same, with copies of whole parts at each of their places: what a target is called with may differ there."""
    yield from _targets(config, {})


def leaves(node: Any, parts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value below a node, with its dotted key."""
    if not isinstance(node, Mapping | list):
        yield prefix, node
    for key, value in _children(node, prefix, parts):
        yield from leaves(value, parts, key)


def _targets(node: Any, parts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(node, Mapping) and "_target_" in node:
        yield prefix, node
    for key, value in _children(node, prefix, parts):
        yield from _targets(value, parts, key)


def _children(node: Any, prefix: str, parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Pairs of key and value below a node, without copies of whole parts: those are checked where they stand."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            may_be_copy = prefix and prefix.rpartition(".")[2] not in _NAMED
            if not (may_be_copy and _is_copy(value, parts.get(key))):
                yield f"{prefix}.{key}" if prefix else str(key), value
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for index, value in enumerate(node):
            yield f"{prefix}.{index}", value


def _is_copy(value: Any, part: Any) -> bool:
    """Whether a value is what ``${part}`` stands for, or the list of a part's values; by text, since NaN is not NaN."""
    if not isinstance(part, Mapping) or not isinstance(value, Mapping | list):
        return False
    return repr(value) == repr(part if isinstance(value, Mapping) else list(part.values()))
