"""Rewards of this project are called once without completions, and environments made: they refuse what is of no use."""

import inspect
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from grpo_lightning.output.terminal import one_line

TRIED = {
    f"grpo_lightning.{name}"
    for name in (
        "reward.format.pattern",
        "reward.format.keyword",
        "reward.format.json_schema",
        "reward.length.length",
        "reward.length.repetition",
        "reward.format.reasoning_steps",
        "reward.countdown.countdown",
        "reward.code.code",
        "reward.judge.ChatJudge",
        "environment.gymnasium.Gymnasium",
        "environment.python.Python",
    )
}
"""What needs no heavy library and reads its settings before any completion: functions, and classes."""

JUDGE = "grpo_lightning.reward.judge.ChatJudge"


def reward_problems(node: Mapping[str, Any], key: str) -> Iterator[str]:
    """What a reward function or an environment refuses of its own settings.

    Args:
        node: Settings with a ``_target_``.
        key: The dotted key of these settings.
    """
    target = node["_target_"]
    given = {name: value for name, value in node.items() if not name.startswith("_")}
    if target not in TRIED or any(isinstance(value, Mapping) and "_target_" in value for value in given.values()):
        return
    module, _, name = target.rpartition(".")
    function = getattr(import_module(module), name)
    columns: dict[str, list[Any]] = {
        parameter.name: []
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    if inspect.isfunction(function):  # whose columns no settings give: it would score completions of theirs
        given = {name: value for name, value in given.items() if name not in columns}
    try:
        function(**{**columns, **given})
    except TypeError:
        return  # arguments that are missing, unknown or of a wrong type are reported as such
    except ValueError as error:
        yield one_line(f"{key}.{_said(str(error), given)}")


def key_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """The environment variables that hold the keys of judges, where they are not set."""
    if config.get("mode") == "export":
        return
    for name, reward in (config.get("reward") or {}).items():
        function = reward.get("function") if isinstance(reward, Mapping) else None
        if isinstance(function, Mapping) and function.get("_target_") == JUDGE:
            variable = function.get("api_key_env")
            if variable is not None and not os.environ.get(variable, "").strip():
                yield (
                    f"reward.{name}.function.api_key_env={variable}: allowed is an environment variable that is set, "
                    "or null for a server that asks for no key"
                )


def _said(message: str, given: Mapping[str, Any]) -> str:
    """The function's own words, in the form that all settings are reported in."""
    name, _, rest = message.partition(": expected ")
    allowed, _, got = rest.rpartition(", got ")
    if name not in given or not allowed:
        return message
    shown = f"{given[name]!r:.80}"
    reason = got.removeprefix(shown).lstrip(": ")
    return f"{name}={shown.strip(chr(39))}: allowed is {allowed}{f' ({reason})' if reason and reason != got else ''}"
