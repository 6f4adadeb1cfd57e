"""Where in the settings a part of this package or of a library may stand, and which of them may be called later.

What builds a policy is no reward: as one it would be called with the columns of a data set, and a row could say what no
settings may, such as ``trust_remote_code``.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_lightning.allowed import LIVE
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings.allowlist import CALLED, PLACES
from grpo_lightning.settings.trust import may_name
from grpo_lightning.settings.walk import HELD, every_target

_TEMPLATE = "template_kwargs"
"""Arguments of a chat template, which comes with a model."""


def role_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What stands where it is not meant to, by key.

    Args:
        config: Resolved settings.
    """
    places: dict[str, str] = {}
    for key, node in every_target(config):
        if problem := _problem(str(node["_target_"]), key, bool(node.get("_partial_"))) or _misplaced(node, key):
            places[problem] = min(places.get(problem, key), key, key=lambda one: one.count("."))  # not at its copies
    yield from (f"{key}.{problem}" for problem, key in places.items())


def _misplaced(node: Mapping[str, Any], key: str) -> str | None:
    """What is wrong where settings name an object of a program's at another place than the one it was given for."""
    if node["_target_"] != LIVE:
        return None
    own, name = own_key(key), str(node.get("name"))
    listed = re.fullmatch(r"(callbacks|logger)\.\d+", own)  # a trainer's, one after the other
    if own in (name, f"{name}.function") or (listed and name.startswith(f"{listed[1]}.")):
        return None
    return f"_target_={LIVE}: allowed for {one_line(repr(name))} is its own place, where compose puts it"


def _problem(name: str, key: str, is_called: bool) -> str | None:
    part = part_of(key)
    if _TEMPLATE in key.split("."):
        return f"_target_={name}: allowed are plain values, which a chat template cannot call"
    allowed = _longest(PLACES, name)
    if allowed is None or not may_name(name) or not (part in HELD or any(part in one for one in PLACES.values())):
        return None  # no part of this package or of a library, refused anyway, or where nothing is built
    if part not in PLACES[allowed]:
        return f"_target_={name}: allowed below {', '.join(PLACES[allowed])}"
    if is_called and _longest(CALLED, name) is None:
        return f"_partial_=true: allowed for {name} is false, as it is made once, with arguments of the settings"
    return None


def part_of(key: str) -> str:
    """The part of a run that a dotted key belongs to: reward for rollout.reward.format, and for reward.format."""
    return own_key(key).partition(".")[0]


def own_key(key: str) -> str:
    """The same key without the parts that have the part as theirs: reward.format for rollout.reward.format."""
    parts = key.split(".")
    while len(parts) > 1 and parts[1] in HELD.get(parts[0], ()):
        del parts[0]
    return ".".join(parts)


def _longest(prefixes: Any, name: str) -> str | None:
    """The longest of some dotted prefixes that a path begins with."""
    found = [prefix for prefix in prefixes if name == prefix or name.startswith(f"{prefix}.")]
    return max(found, key=len, default=None)
