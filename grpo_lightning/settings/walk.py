"""All settings one after the other, wherever they stand."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from grpo_lightning.output.terminal import one_line

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

_NAMED = ("callbacks", "logger", "reward")
"""Parts whose keys are names, of which metrics, files and messages are made."""
_NAME = re.compile(r"[\w-]+")


def each_target(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every mapping with a ``_target_``, wherever it stands, with its dotted key."""
    yield from _targets(config, {key: part for key, part in config.items() if key in PARTS})


def every_target(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The same, with copies of whole parts at each of their places: what a target is called with may differ there."""
    yield from _targets(config, {})


def key_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys that hold more than a name, so that what stands below would be taken for what stands at another place."""
    yield from _unnamed(config, {key: part for key, part in config.items() if key in PARTS})
    for part in _NAMED:
        for name in config[part] if isinstance(config.get(part), Mapping) else ():
            if not _NAME.fullmatch(str(name)):
                yield one_line(f"{part}.{name}: allowed are names of letters, digits, '_' and '-'")


def leaves(node: Any, parts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value below a node, with its dotted key."""
    if not isinstance(node, Mapping | list):
        yield prefix, node
    for key, value in _children(node, prefix, parts):
        yield from leaves(value, parts, key)


def at(node: Any, path: Sequence[str]) -> Any:
    """What stands at a path; None where there is nothing."""
    for part in path:
        if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            node = node.get(part) if isinstance(node, Mapping) else None
    return node


def nodes_called(node: Any, wanted: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What stands under a name at any depth, as pairs of its dotted key and itself."""
    pairs: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        name = f"{prefix}.{key}" if prefix else str(key)
        if key == wanted:
            yield name, value
        yield from nodes_called(value, wanted, name)


def _targets(node: Any, parts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(node, Mapping) and "_target_" in node:
        yield prefix, node
    for key, value in _children(node, prefix, parts):
        yield from _targets(value, parts, key)


def _unnamed(node: Any, parts: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in node if isinstance(node, Mapping) else ():
        is_name = isinstance(key, str) and key != "" and "." not in key
        if not is_name and isinstance(node[key], Mapping | list):
            where = f"{prefix}.{key}" if prefix else key
            yield one_line(f"{where}: {str(key)!r} is a key of settings; allowed is a text without '.'")
    for key, value in _children(node, prefix, parts):
        yield from _unnamed(value, parts, key)


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
