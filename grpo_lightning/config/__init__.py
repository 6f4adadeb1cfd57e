"""Settings are checked as a whole, before any weights load: every mistake is reported at once, by its key.

Hydra catches keys that do not exist; `check_config` catches values of a wrong type or out of range, targets that
settings may not name, and settings that contradict one another. Nothing heavy is imported for it, so that a wrong value
is answered at once. `check_runtime` imports the targets and looks at this machine.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from grpo_lightning.config.rules import consistency_problems, device_problems, value_problems
from grpo_lightning.config.settings import each_target, format_override, quote_value, unknown_key, value_at
from grpo_lightning.config.targets import argument_problems, target_problems, trusted_packages
from grpo_lightning.console import redact, single_line

_OBJECTS = (
    *("advantage", "correction", "data", "loss", "module", "optimizer", "policy", "reference", "rollout", "sampler"),
    *("schedule", "trainer", "validation"),
)
"""Parts that are one object each; the others are none, or several by name."""
_PRESETS = ("algorithm", "debug", "experiment", "sweep")
"""Folders of conf/ whose files set parts, and are none."""
TOP = (
    *("mode", "steps", "seed", "checkpoint", "sweep_metric", "run_dir", "trusted", "preflight", "task_name", "tags"),
    *("callbacks", "environment", "logger", "reward", "taught"),
    *(*_OBJECTS, *_PRESETS),
)
"""Keys at the top of the settings."""
_SANDBOXED = ("grpo_lightning.reward.code.code", "grpo_lightning.environment.python.Python")
_JUDGE = "grpo_lightning.reward.judge.ChatJudge"


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
    values = dict(value_problems(config))
    if problems := [
        *_key_problems(config),
        *values.values(),
        *target_problems(config),
        *consistency_problems(config, values),
        *_logger_problems(config),
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
    if "trainer" in config:
        problems += device_problems(config)
    if problems := [*problems, *_credential_problems(config), *_sandbox_problems(config)]:
        raise ConfigError(problems)


def _key_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys that nothing reads, and parts of which nothing says what they are."""
    for key, value in config.items():
        if key not in TOP:
            yield unknown_key(key, quote_value(str(value)), TOP) or f"{key}={quote_value(str(value))}: nothing reads it"
    for name, callback in (config.get("callbacks") or {}).items():
        if callback is not None and not value_at(callback, "_target_"):
            yield f"callbacks.{name}: nothing reads it, as no _target_ says what it is"
    for key in (config.get("preflight") or {}).keys() - {"prompts"}:
        yield f"preflight.{key}: nothing reads it; there is preflight.prompts"
    for name in (*_OBJECTS, "reward", "callbacks", "environment", *_PRESETS):
        node = config.get(name)
        if isinstance(node, str):
            choice = format_override(name, node)
            yield f"{choice} chooses nothing in a file; its defaults need '- override /{name}: NAME'"
        elif name in _PRESETS and node is not None:
            yield f"nothing reads the settings below {name}; the file's first line must be '# @package _global_'"
        elif name in _OBJECTS and isinstance(node, Mapping) and "_target_" not in node:
            yield (
                f"{name}: no _target_ says what it is; choose a file of conf/{name}, or begin your own with "
                "'defaults: [NAME]', the name of one of these"
            )


def _credential_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Judges whose keys are in environment variables that are not set, and an upload without a token."""
    for key, node in each_target(config):
        variable = node.get("api_key_env") if node["_target_"] == _JUDGE and config.get("mode") != "export" else None
        if variable is not None and not os.environ.get(variable, "").strip():
            yield f"{key}.api_key_env={variable}: this environment variable is not set; use null without a key"
    name = value_at(config, "callbacks.export.push_to_hub")
    if name is not None and config["mode"] in ("fit", "export") and not import_module("huggingface_hub").get_token():
        yield f"callbacks.export.push_to_hub={name}: there is no token of the hub: run `hf auth login` or set HF_TOKEN"


def _sandbox_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Why this machine has no sandbox, if settings need one: a program in it tries to get out."""
    for key in [key for key, node in each_target(config) if node["_target_"] in _SANDBOXED]:
        client = import_module("grpo_lightning.sandbox.client")  # by name: that package imports this one
        try:
            client.check()
        except client.SandboxUnavailable as error:
            yield f"{key}: {error}"
        finally:
            client.close()  # workers have their own


def _logger_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Settings of loggers that were not chosen."""
    loggers = config.get("logger") or {}
    if not isinstance(loggers, Mapping):
        yield f"logger={loggers}: must be one of csv, mlflow, none, tensorboard, wandb, or a list of them"
        return
    chosen = [name for name, logger in loggers.items() if value_at(logger, "_target_")]
    for name in loggers.keys() - set(chosen):
        yield f"logger.{name}: this logger is not chosen; choose {format_override('logger', [*chosen, name])}"


def describe_sizes(config: Mapping[str, Any]) -> str:
    """How many completions and optimizer steps the settings amount to, in words."""
    steps, prompts = config["steps"], config["data"]["prompts_per_step"]
    if "rollout" not in config["module"]:
        return f"{prompts} demonstrations per step, {steps} steps"
    group = config["rollout"]["group_size"]
    completions, (trained, updates) = prompts * group, _updates(config)
    return (
        f"{prompts} prompts x {group} completions = {completions} completions per rollout"
        f"{f', of which {trained} are trained on' * (trained != completions)}; "
        f"{updates} optimizer step{'s' * (updates > 1)} per rollout; {steps} rollouts"
    )


def _updates(config: Mapping[str, Any]) -> tuple[int, int]:
    """Completions of a rollout that are trained on, and optimizer steps per rollout."""
    size = value_at(config, "rollout.downsample.size") or config["rollout"]["group_size"]
    trained, module = config["data"]["prompts_per_step"] * size, config["module"]
    return trained, module["ppo_epochs"] * (trained // (module["minibatch_size"] or trained))


def config_warnings(config: Mapping[str, Any]) -> list[str]:
    """Warnings about settings that work and are probably not meant."""
    size, correction = value_at(config, "rollout.group_size"), str(value_at(config, "correction._target_"))
    warnings = []
    if "rollout" in config["module"] and isinstance(size, int) and size < 4:
        warnings.append(
            f"rollout.group_size={size}: the mean of so few completions is a noisy baseline, and most groups are all "
            "right or all wrong; 4 or more compare better, 8 to 16 are usual"
        )
    if correction.endswith("_truncation") and _updates(config)[1] > 1:
        warnings.append(
            f"{correction} has no effect with several optimizer steps per rollout, where the ratio of the loss is to "
            "the sampler already; a mask has, and so has one step: module.ppo_epochs=1 module.minibatch_size=null"
        )
    return warnings
