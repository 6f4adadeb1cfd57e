"""Settings are checked as a whole, before any weights load: every mistake is reported at once, by its key.

Hydra catches keys that do not exist; what it lets through is caught here: values of a wrong type or out of range,
targets that settings may not name, and settings that contradict one another. Nothing heavy is imported for it, so that
a wrong value is answered at once. `check_runtime` imports the targets, and checks what each is called with.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_lightning.config.consistency import (
    CONTRADICTIONS,
    Unsound,
    key_problems,
    reader,
    recorded_problems,
    reward_problems,
    sweep_metric_problems,
    trainer_problems,
)
from grpo_lightning.config.redaction import redact, single_line
from grpo_lightning.config.rules import MAY_VARY, VARYING, rules_of
from grpo_lightning.config.shell import format_override, quote_value
from grpo_lightning.config.suggestions import unknown_key
from grpo_lightning.config.targets import adapter_problems, argument_problems, target_problems, trusted_packages
from grpo_lightning.config.tree import BUILT, PARTS, each_target, leaves, value_at

SMALL_GROUP = 4
"""Groups with fewer completions are warned about: at a success rate of .18, 70 % of groups of 2 are all wrong or all
right, 45 % of groups of 4 and 20 % of groups of 8."""

_PRESETS = ("algorithm", "debug", "experiment", "sweep")
"""Folders of conf/ whose files set parts, and are none."""
_ABSENT = object()
_PACKAGES = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}
"""Class -> the package that it needs, which is also the name of this project's extra that installs it."""
_SANDBOXED = ("grpo_lightning.reward.code.code", "grpo_lightning.environment.python.Python")
"""What runs programs in the sandbox."""
_SANDBOX, _DEVICES = "grpo_lightning.sandbox.client", "grpo_lightning.distributed.devices"
"""Parts that check this machine; by name, since both have settings and import this package."""


class ConfigError(ValueError):
    """Settings that cannot work; the message lists everything that is wrong with them, by key."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(redact(single_line(problem)) for problem in problems)
        super().__init__("the settings cannot work:\n" + "\n".join(f"  {problem}" for problem in self.problems))


def check_config(config: Mapping[str, Any]) -> None:
    """Check the resolved settings of a run.

    Raises:
        ConfigError: Something is wrong with them; the error lists everything that is.
    """
    named = {f"{key}._target_": node["_target_"] for key, node in each_target(config)}
    if odd := {key: name for key, name in named.items() if not isinstance(name, str)}:
        raise ConfigError([f"{key}={name}: allowed is a text, a dotted name" for key, name in odd.items()])
    rewards = config.get("reward")
    if plain := {name: one for name, one in (rewards or {}).items() if not isinstance(one, Mapping)}:
        told = "allowed are the settings of a reward, such as its weight: reward.NAME.weight=1.0"
        raise ConfigError([f"reward.{name}={single_line(str(one))}: {told}" for name, one in plain.items()])
    values = dict(_values(config))
    contradictions: list[str] = []
    for rule in (*CONTRADICTIONS, trainer_problems, sweep_metric_problems, recorded_problems):
        try:
            contradictions += rule(reader(config, values.keys()))
        except Unsound:
            continue  # what it would compare is broken or absent, and reported if broken
    tried = [problem for key, node in each_target(config) for problem in reward_problems(node, key)]
    if problems := [
        *_unknown(config),
        *_unchosen(config),
        *values.values(),
        *target_problems(config),
        *tried,
        *contradictions,
        *_logger_problems(config),
        *directory_problems(_places(config)),
    ]:
        raise ConfigError(problems)


def check_runtime(config: Mapping[str, Any]) -> None:
    """Check resolved settings against what they name and against this machine; `check_config` comes before.

    Nothing is built: targets are imported, and devices are counted.

    Raises:
        ConfigError: Something is wrong; the error lists everything that is.
    """
    trusted = trusted_packages(config)
    problems = [problem for key, node in each_target(config) for problem in argument_problems(node, key, trusted)]
    problems += [*adapter_problems(config.get("policy") or {}), *import_module(_DEVICES).device_problems(config)]
    problems += key_problems(config)
    if problems := [*problems, *sandbox_problems(config)]:
        raise ConfigError(problems)


def sandbox_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Why this machine has no sandbox, if settings need one: a program in it tries to get out."""
    client = import_module(_SANDBOX)
    for key, node in each_target(config):
        if node["_target_"] in _SANDBOXED:
            try:
                client.check()
            except RuntimeError as error:
                yield single_line(f"{key}: {error}")
            finally:
                client.close()  # workers have their own


def describe_sizes(config: Mapping[str, Any]) -> str:
    """How many completions and optimizer steps the settings amount to, in words."""
    steps, prompts = config["steps"], config["data"]["prompts_per_step"]
    if "rollout" not in config["module"]:
        return f"{prompts} demonstrations per step, {steps} steps"
    group = config["rollout"]["group_size"]
    completions, trained, updates = prompts * group, _trained(config), _updates(config)
    return (
        f"{prompts} prompts x {group} completions = {completions} completions per rollout"
        f"{f', of which {trained} are trained on' * (trained != completions)}; "
        f"{updates} optimizer step{'s' * (updates > 1)} per rollout; "
        f"{steps} rollouts = {steps * completions} completions, {steps * updates} optimizer steps in total"
    )


def _trained(config: Mapping[str, Any]) -> int:
    """Completions of a rollout that are trained on."""
    rollout = config["rollout"]
    size: int = config["data"]["prompts_per_step"] * (
        (rollout["downsample"] or {}).get("size") or rollout["group_size"]
    )
    return size


def _updates(config: Mapping[str, Any]) -> int:
    """Optimizer steps per rollout."""
    trained, module = _trained(config), config["module"]
    count: int = module["ppo_epochs"] * (trained // (module["minibatch_size"] or trained))
    return count


def config_warnings(config: Mapping[str, Any]) -> list[str]:
    """Warnings about settings that work and are probably not meant."""
    warnings: list[str] = []
    if "rollout" not in config.get("module", {}):
        return warnings
    sizes = [size for _, size in _varied("rollout.group_size", value_at(config, "rollout.group_size"))]
    if any(isinstance(size, int) and size < SMALL_GROUP for size in sizes):
        warnings.append(
            f"rollout.group_size={min(sizes)}: the mean of so few completions is a noisy baseline, and most groups are "
            f"all right or all wrong; {SMALL_GROUP} or more compare better, 8 to 16 are usual"
        )
    kind = str(value_at(config, "correction._target_")).rpartition(".")[2]
    if kind.endswith("_truncation") and _updates(config) > 1:
        warnings.append(
            f"correction={kind} has no effect with several optimizer steps per rollout, where the ratio of the loss is "
            "to the sampler already; a mask has, and so has one step: module.ppo_epochs=1 module.minibatch_size=null"
        )
    return warnings


TOP = (
    *("mode", "steps", "seed", "checkpoint", "sweep_metric", "run_dir", "trusted", "preflight", "task_name", "tags"),
    *_PRESETS,
    *PARTS,
)
"""The parts and the settings that belong to none."""


def _unknown(config: Mapping[str, Any]) -> Iterator[str]:
    """Settings that were added at the top, have no effect there, and are called much like others or as elsewhere."""
    for key, value in config.items():
        if key not in TOP and (said := unknown_key(key, quote_value(str(value)), TOP)):
            yield single_line(said)


def _unchosen(config: Mapping[str, Any]) -> Iterator[str]:
    """Parts of which nothing says what they are, and files of one's own that choose nothing, as by ``loss: dapo``."""
    for name in (*PARTS, *_PRESETS):
        node = config.get(name)
        if name in BUILT and isinstance(node, Mapping) and "_target_" not in node:
            yield (
                f"{name}: no _target_ says what it is; allowed is a file of conf/{name}, or one of your own that "
                "begins with 'defaults: [NAME]', the name of one of these"
            )
        elif isinstance(node, str) and name != "logger":
            yield (
                f"{format_override(name, node)} chooses nothing in a file; allowed is a line '- override /{name}: "
                "NAME' among its defaults"
            )
        elif name in _PRESETS and node is not None:
            yield (
                f"nothing reads the settings below {name}; allowed is a file whose first line is '# @package _global_'"
            )


def _logger_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Loggers that were not chosen, or whose package is not installed."""
    loggers = config.get("logger", {})  # replay has some parts of a run's settings only
    if not isinstance(loggers, Mapping):
        yield f"logger={loggers}: allowed is one of csv, mlflow, none, tensorboard, wandb, or a list of them"
        return
    chosen = [name for name, logger in loggers.items() if isinstance(logger, Mapping) and "_target_" in logger]
    for name, logger in loggers.items():
        if name not in chosen:
            yield f"logger.{name}: no such logger was chosen; allowed is {format_override('logger', [*chosen, name])}"
            continue
        package = _PACKAGES.get(str(logger["_target_"]).rpartition(".")[2])
        if package and find_spec(package) is None:
            yield f"logger.{name}: needs the package {package}; pip install 'grpo-lightning[{package}]' brings it"


def directory_problems(places: Mapping[str, Any]) -> Iterator[str]:
    """Directories that cannot be made or written to.

    Args:
        places: Key -> directory; what is no text is passed by.
    """
    told: set[str] = set()
    for key, place in places.items():
        why = directory_obstacle(Path(place)) if isinstance(place, str) else None
        if why and why not in told:
            told.add(why)
            yield single_line(f"{key}={place}: allowed is a directory that can be written to; {why}")


def _places(config: Mapping[str, Any]) -> dict[str, Any]:
    """Key -> directory that the run and its callbacks write to."""
    callbacks = (config.get("callbacks") or {}) if config.get("mode") == "fit" else {}
    return {"hydra.run.dir": config.get("run_dir")} | {
        f"callbacks.{name}.directory": value_at(node, "directory") for name, node in callbacks.items()
    }


def directory_obstacle(directory: Path) -> str | None:
    """Why a directory cannot be made or written to; None if nothing is known against it."""
    there = next((place for place in (directory, *directory.absolute().parents) if os.path.lexists(place)), None)
    if there is None:
        return None
    if not there.exists():
        return f"{there} is a link to nothing"
    if not there.is_dir():
        return f"{there} is no directory"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} must not be written to"


def _values(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every value that breaks its rule or is not finite, as pairs of its key and what is wrong."""
    rules = rules_of(config)
    for key, rule in rules.items():
        value = value_at(config, key, default=_ABSENT)
        for name, one in _varied(key, value):
            if one is not _ABSENT and (problem := rule.problem(name, one)):
                yield key, single_line(problem)
    for key, value in leaves(config, config):
        is_ruled = key in rules or key.rpartition(".")[0] in rules
        if not is_ruled and isinstance(value, float) and not math.isfinite(value):
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
