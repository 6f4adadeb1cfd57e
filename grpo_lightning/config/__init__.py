"""Settings are checked as a whole, before any weights load: every mistake is reported at once, by its key.

Hydra catches keys that do not exist; what it lets through is caught here: values of a wrong type or out of range,
arguments that a target does not take, targets outside the trusted packages, and settings that contradict one another.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from grpo_lightning.config.contradiction import CONTRADICTIONS, Unsound, lookup, reader
from grpo_lightning.config.rule import MAY_VARY, REWARD, RULES, VARYING
from grpo_lightning.config.target import target_problems

_SECRET = re.compile(r"(token|secret|password|api_?key|credential)s?$", re.IGNORECASE)
_NOT_SECRET = re.compile(r"(max_new_tokens|microbatch_tokens)$")


class ConfigError(ValueError):
    """Settings that cannot work, all of them."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("the settings cannot work:\n" + "\n".join(f"  {problem}" for problem in problems))


def check(config: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` with everything that is wrong in the resolved settings ``config``."""
    values = dict(_values(config))
    contradictions = []
    for rule in CONTRADICTIONS:
        try:
            contradictions += rule(reader(config, values.keys()))
        except Unsound:
            continue  # what it would compare is broken or absent, and reported if broken
    if problems := [*values.values(), *_targets(config, config.keys()), *contradictions]:
        raise ConfigError(problems)


def arithmetic(config: Mapping[str, Any]) -> str:
    """What a step amounts to, in words."""
    steps, prompts = config["steps"], config["data"]["prompts_per_step"]
    if "rollout" not in config["module"]:
        return f"{prompts} demonstrations per step, {steps} steps"
    group, epochs = config["rollout"]["group_size"], config["module"]["ppo_epochs"]
    completions = prompts * group
    trained = prompts * ((config["rollout"]["downsample"] or {}).get("size") or group)
    updates = epochs * (trained // (config["module"]["minibatch_size"] or trained))
    return (
        f"{prompts} prompts x {group} completions = {completions} completions per rollout"
        f"{f', of which {trained} are trained on' * (trained != completions)}; "
        f"{updates} optimizer step{'s' * (updates > 1)} per rollout; "
        f"{steps} rollouts = {steps * completions} completions, {steps * updates} optimizer steps in total"
    )


def redacted(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the values of keys that name secrets replaced."""
    return {
        key: redacted(value)
        if isinstance(value, Mapping)
        else "<redacted>"
        if value is not None and _SECRET.search(key) and not _NOT_SECRET.search(key)
        else value
        for key, value in config.items()
    }


def _values(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, problem) of every value that breaks its rule or is not finite."""
    rules = RULES | {
        f"reward.{name}.{setting}": rule for name in config.get("reward") or {} for setting, rule in REWARD.items()
    }
    for key, rule in rules.items():
        value = lookup(config, key)
        for name, one in _varied(key, value):
            if one is not KeyError and (problem := rule.problem(name, one)):
                yield key, problem
    for key, value in _leaves(config, config.keys()):
        if key not in rules and isinstance(value, float) and not math.isfinite(value):
            yield key, f"{key}={value}: allowed is a finite number"


def _varied(key: str, value: Any) -> list[tuple[str, Any]]:
    """(key, value) of every value that a number may have during the run: one, unless it varies."""
    target = value.get("_target_") if isinstance(value, Mapping) else None
    if not (key.startswith(MAY_VARY) and isinstance(target, str) and target.startswith(VARYING)):
        return [(key, value)]
    several = value.get("values")
    named = {f"{key}.{name}": value[name] for name in ("start", "end", "lowest", "highest") if name in value}
    listed = {f"{key}.values.{i}": one for i, one in enumerate(several)} if isinstance(several, list) else {}
    return list({**named, **listed}.items())


def _children(node: Any, prefix: str, parts: Collection[str]) -> Iterator[tuple[str, Any]]:
    """(key, value) below a node, without the parts that it embeds: they are checked where they are written."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if not (prefix and key in parts and isinstance(value, Mapping)):
                yield f"{prefix}.{key}" if prefix else str(key), value
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for index, value in enumerate(node):
            yield f"{prefix}.{index}", value


def _leaves(node: Any, parts: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(node, Mapping | list):
        yield prefix, node
    for key, value in _children(node, prefix, parts):
        yield from _leaves(value, parts, key)


def _targets(node: Any, parts: Collection[str], prefix: str = "") -> Iterator[str]:
    if isinstance(node, Mapping) and "_target_" in node:
        yield from target_problems(node, prefix)
    for key, value in _children(node, prefix, parts):
        yield from _targets(value, parts, key)
