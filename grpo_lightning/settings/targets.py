"""What a ``_target_`` may name, and which arguments it takes."""

from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import Signature
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from grpo_lightning.allowed import MODULES_OF_PEFT
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings.signatures import signature
from grpo_lightning.settings.source import Absent, NoCallable, Unreadable
from grpo_lightning.settings.suggestions import nearest
from grpo_lightning.settings.trust import is_of_library, may_name
from grpo_lightning.settings.values import REWARD, RULES

Read = Callable[[str], Signature]
"""Dotted path -> signature; raises ``Absent``, ``NoCallable`` or ``Unreadable``."""


def target_problems(
    node: Mapping[str, Any], key: str, trusted: Collection[str] = (), *, read: Read = signature
) -> Iterator[str]:
    """What is wrong with the ``_target_`` of ``node`` and with its arguments, one text for each mistake.

    Args:
        node: Settings with a ``_target_``.
        key: The dotted key of these settings.
        trusted: Packages that the user trusts.
        read: Gives signatures; what it cannot read is not judged.
    """
    name = node["_target_"]
    if not isinstance(name, str) or "." not in name:
        yield f"{key}._target_={one_line(str(name))}: allowed is a dotted path, package.module.function"
        return
    if not may_name(name, trusted):
        return  # reported by `trust.problems`
    if "_args_" in node and is_of_library(name):
        yield f"{key}._args_: allowed are arguments by name, as rules look for them"
    try:
        parameters = read(name).parameters
    except NoCallable as error:
        yield f"{key}._target_={name}: allowed is a function or a class; {one_line(str(error))}"
        return
    except Absent as error:
        yield f"{key}._target_={name}: not found ({one_line(str(error))})"
        return
    except Unreadable:
        return
    missing = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name not in node
    ]
    if missing and not node.get("_partial_"):
        yield (
            f"{key}: {name} needs {', '.join(missing)} (or `_partial_: true`, which hands over the function instead of "
            "what it returns)"
        )
    given = {argument: value for argument, value in node.items() if not argument.startswith("_")}
    ruled = {argument for argument in given if _has_rule(key, argument)}
    yield from argument_problems(Signature(list(parameters.values())), given, key, name, ruled=ruled)


def adapter_problems(policy: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with ``policy.adapter``, which are arguments of a class of peft that no ``_target_`` names."""
    adapter, name = policy.get("adapter"), "peft.LoraConfig"
    if adapter is None:
        return
    if not isinstance(adapter, Mapping):
        yield (
            f"policy.adapter={one_line(str(adapter))}: allowed are arguments of peft's LoraConfig, such as "
            "{r: 16, lora_alpha: 32}, or null"
        )
        return
    if "task_type" in adapter:
        yield "policy.adapter.task_type: unknown; the task is always CAUSAL_LM"
    for module in MODULES_OF_PEFT:
        if module in adapter:
            yield f"policy.adapter.{module}: unknown; no adapter may name a module that peft would import"
    try:
        yield from argument_problems(signature(name), adapter, "policy.adapter", name)
    except (Absent, Unreadable):
        return


def argument_problems(
    signature: Signature, given: Mapping[str, Any], key: str, name: str, *, ruled: Collection[str] = ()
) -> Iterator[str]:
    """What is wrong with arguments: those that nobody takes, and those of another type than they are declared to be.

    Args:
        signature: With plain types or ``Any`` as annotations.
        given: Argument -> value.
        key: The dotted key of these settings.
        name: What takes them.
        ruled: Arguments whose values have rules, so that their types need no check here.
    """
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [p.name for p in parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for argument, value in given.items():
        if argument not in named:
            if not takes_any:
                meant = nearest(argument, named)
                guess = f"the nearest is {meant}; " if meant else ""
                yield f"{key}.{one_line(argument)}: unknown; {guess}{name} takes {', '.join(parameters)}"
        elif argument not in ruled and not _fits(value, hint := parameters[argument].annotation):
            shown = "null" if value is None else one_line(str(value))
            yield f"{key}.{argument}={shown}: allowed is {_words(hint)}"


def _has_rule(key: str, argument: str) -> bool:
    """Whether the value of an argument is checked by a rule, so that its type needs no check here."""
    return f"{key}.{argument}" in RULES or (key.startswith("reward.") and argument in REWARD)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value can be what the annotation says; built parts and other annotations pass."""
    if hint is Any or (isinstance(value, Mapping) and "_target_" in value):
        return True
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not set(options) <= {int, float, bool, str, NoneType}:
        return True
    if value is None:
        return NoneType in options
    if isinstance(value, bool | str):
        return type(value) in options
    return type(value) in options or (isinstance(value, int) and float in options)


def _words(hint: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return " or ".join(names[option] for option in options)
