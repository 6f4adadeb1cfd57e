"""Settings are checked as a whole, before any weights load: every mistake is reported at once, by its key.

Hydra catches keys that do not exist; what it lets through is caught here: values of a wrong type or out of range,
arguments that a target does not take, targets outside the trusted packages, and settings that contradict one another.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from grpo_lightning.settings.contradictions import CONTRADICTIONS, Unsound, lookup, reader
from grpo_lightning.settings.targets import target_problems
from grpo_lightning.settings.values import MAY_VARY, REWARD, RULES, VARYING

SMALL_GROUP = 4
"""Groups with fewer completions are warned about: at a success rate of .18, 70 % of groups of 2 are all wrong or all
right, 45 % of groups of 4 and 20 % of groups of 8."""
_SECRET = re.compile(r"(token|secret|password|api_?key|credential)s?$", re.IGNORECASE)
_NOT_SECRET = re.compile(r"(max_new_tokens|microbatch_tokens)$")


class ConfigError(ValueError):
    """Settings that cannot work; the message lists everything that is wrong with them, by key."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("the settings cannot work:\n" + "\n".join(f"  {problem}" for problem in problems))


def check(config: Mapping[str, Any]) -> None:
    """Check the resolved settings of a run.

    Raises:
        ConfigError: Something is wrong with them; the error lists everything that is.
    """
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
    """How many completions and optimizer steps the settings amount to, in words."""
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


def cautions(config: Mapping[str, Any]) -> list[str]:
    """Warnings about settings that work and are probably not meant."""
    warnings: list[str] = []
    if "rollout" not in config.get("module", {}):
        return warnings
    sizes = [size for _, size in _varied("rollout.group_size", lookup(config, "rollout.group_size"))]
    if any(isinstance(size, int) and size < SMALL_GROUP for size in sizes):
        warnings.append(
            f"rollout.group_size={min(sizes)}: the mean of so few completions is a noisy baseline, and most groups are "
            f"all right or all wrong; {SMALL_GROUP} or more compare better, 8 to 16 are usual"
        )
    shaped = {key: lookup(config, f"rollout.{key}") for key in ("top_p", "top_k", "min_p")}
    neutral = {"top_p": 1, "top_k": 0, "min_p": 0}
    if any(value is not KeyError and value != neutral[key] for key, value in shaped.items()):
        listed = ", ".join(f"{key}={value}" for key, value in shaped.items())
        warnings.append(f"rollout.{listed} sample another distribution than the one that is trained")
    return warnings


def redacted(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the values of keys that name secrets replaced by "<redacted>"."""
    return {
        key: redacted(value)
        if isinstance(value, Mapping)
        else "<redacted>"
        if value is not None and _SECRET.search(key) and not _NOT_SECRET.search(key)
        else value
        for key, value in config.items()
    }


def _values(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every value that breaks its rule or is not finite, as pairs of its key and what is wrong."""
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
    """Every value that a number may have during the run, one unless it varies, as pairs of key and value."""
    target = value.get("_target_") if isinstance(value, Mapping) else None
    if not (key.startswith(MAY_VARY) and isinstance(target, str) and target.startswith(VARYING)):
        return [(key, value)]
    several = value.get("values")
    named = {f"{key}.{name}": value[name] for name in ("start", "end", "lowest", "highest") if name in value}
    listed = {f"{key}.values.{i}": one for i, one in enumerate(several)} if isinstance(several, list) else {}
    return list({**named, **listed}.items())


def _children(node: Any, prefix: str, parts: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Pairs of key and value below a node, without the parts that it embeds: they are checked where they stand."""
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
