"""What becomes of settings that a command brings along, once all files and the command's own words are one."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from grpo_lightning.composition.brought_files import TRUSTED, as_list, is_plain_code, parameters, values_of
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings.trust import is_of_library
from grpo_lightning.settings.walk import at, every_target

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def whole_problems(
    composed: Mapping[str, Any], brought: Sequence[tuple[str, Mapping[str, Any]]], words: Sequence[str] = ()
) -> list[str]:
    """What settings that are brought along give to code for which they were not allowed to say it.

    Code of the user's is given nothing of theirs, and what they may say beside a plain function goes to such a one.

    Args:
        composed: All settings, not resolved.
        brought: Pairs of the name of a file, or an override, and what it says, not resolved.
        words: The user's overrides; what these say is theirs alone.
    """
    given = {word.partition("=")[0].lstrip("+~") for word in words}
    users = {key: node for key, node in every_target(composed) if _is_users(node["_target_"])}
    handed = [(key, str(node["_target_"])) for node in users.values() for key in _referred(composed, node, set())]
    found = {(source, *one) for source, said in brought for one in _strays(composed, said, handed, given)}
    return [
        f"{one_line(source)}: {one_line(key)} would be given to {one_line(target)}; allowed is this setting on the "
        f"command line, or {TRUSTED}=true there if you know what is brought along"
        for source, key, target in sorted(found)
    ]


def _is_users(target: Any) -> bool:
    """Whether a path is one of the user's own code; one that is put together stands for some verifier's."""
    return "$" not in str(target) and not is_of_library(str(target))


def _referred(composed: Mapping[str, Any], node: Any, seen: set[str]) -> set[str]:
    """The dotted keys of values for which something in a node stands, itself or by what that stands for.

    Args:
        composed: All settings, not resolved.
        node: Settings of some code; what stands there itself is left out.
        seen: What has been found, to be added to.
    """
    for _, value in values_of(node) if isinstance(node, Mapping) else [("", node)]:
        for key in _REFERENCE.findall(str(value)):
            there = at(composed, key.split("."))
            is_built = isinstance(there, Mapping) and "_target_" in there  # an object is handed over
            if key not in seen and not is_built:
                seen |= {key, *(f"{key}.{name}" for name, _ in values_of(there) if isinstance(there, Mapping))}
                _referred(composed, there, seen)
    return seen


def _strays(
    composed: Mapping[str, Any],
    said: Mapping[str, Any],
    handed: Sequence[tuple[str, str]],
    given: Collection[str],
) -> Iterator[tuple[str, str]]:
    """Keys, and the code that would be given what is said there or below it.

    Args:
        composed: All settings, not resolved.
        said: What is brought along.
        handed: Keys whose values are given to code elsewhere, and that code.
        given: Keys whose values are the user's.
    """
    values = dict(values_of({key: value for key, value in said.items() if key != "hydra"}))
    for key in (*values, *(str(key).lstrip("+") for key in parameters(said.get("hydra")))):
        *node, name = key.split(".")
        now = str(at(composed, [*node, "_target_"]))
        is_other = is_plain_code(str(values.get(key))) and not is_plain_code(now)
        if name == "_target_" and (is_other or _is_users(now)):  # what they leave out, such as a switch, counts, too
            yield ".".join(node), now
        if key in given:
            continue
        # What says how a node is built is the node's own; the node itself is given to what stands above it.
        depth = len(node) - name.startswith("_")
        above = [at(composed, [*node[:count], "_target_"]) for count in range(1, depth + 1)]
        yield from ((key, str(target)) for target in above if target is not None and _is_users(target))
        if any(isinstance(one, str) for one in as_list(values.get(key))):
            yield from ((key, target) for other, target in handed if other == key)
