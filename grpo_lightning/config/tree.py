"""All settings one after the other, wherever they stand."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

PARTS = (
    *("advantage", "callbacks", "correction", "data", "environment", "logger", "loss", "module", "optimizer", "policy"),
    *("reference", "reward", "rollout", "sampler", "schedule", "taught", "trainer", "validation"),
)
"""Of a run, which others have copies of; another key at the top is nobody's."""
BUILT = tuple(part for part in PARTS if part not in ("callbacks", "environment", "logger", "reward", "taught"))
"""Those that are one object each; the others are none, or several by name."""
HELD: Mapping[str, tuple[str, ...]] = {
    "module": ("loss", "optimizer", "policy", "reference", "rollout", "sampler", "schedule", "validation"),
    "rollout": ("advantage", "environment", "reward"),
    "validation": ("environment", "reward"),
    "trainer": ("callbacks", "logger"),
    "loss": ("correction",),
}
"""Part -> others that it has as its own settings."""


def each_target(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every mapping with a ``_target_``, wherever it stands, with its dotted key."""
    yield from _targets(config, {key: part for key, part in config.items() if key in PARTS})


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
            if not (_is_held(prefix, key) and _is_copy(value, parts.get(key))):
                yield f"{prefix}.{key}" if prefix else str(key), value
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for index, value in enumerate(node):
            yield f"{prefix}.{index}", value


def _is_held(prefix: str, key: Any) -> bool:
    """Whether a part has another one at a place, as ``module.rollout`` has ``reward``."""
    names = prefix.split(".") if prefix else []
    return bool(names) and all(below in HELD.get(part, ()) for part, below in pairwise((*names, key)))


def _is_copy(value: Any, part: Any) -> bool:
    """Whether a value is what ``${part}`` stands for, or the list of a part's values; by text, since NaN is not NaN."""
    if not isinstance(part, Mapping) or not isinstance(value, Mapping | list):
        return False
    return repr(value) == repr(part if isinstance(value, Mapping) else list(part.values()))


def value_at(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value at a dotted key, or ``default`` where there is none."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node
