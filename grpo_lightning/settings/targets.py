"""What a ``_target_`` may name, and which arguments it takes."""

import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from grpo_lightning.settings.values import REWARD, RULES

TRUSTED = ("grpo_lightning", "torch", "lightning", "transformers", "bitsandbytes", "torchmetrics", "peft", "datasets")
"""Packages whose members a ``_target_`` may name, besides files below the working directory."""


def target_problems(node: Mapping[str, Any], key: str) -> Iterator[str]:
    """What is wrong with the ``_target_`` of ``node`` and with its arguments, one text for each mistake.

    Args:
        node: Settings with a ``_target_``.
        key: The dotted key of these settings.
    """
    name = node["_target_"]
    if not isinstance(name, str) or "." not in name:
        yield f"{key}._target_={name}: allowed is a dotted path, package.module.function"
        return
    if not trusted(name):
        yield (
            f"{key}._target_={name}: allowed are members of {', '.join(TRUSTED)} and of Python files below the "
            "working directory"
        )
        return
    try:
        signature, hints = _signature(name)
    except (ImportError, AttributeError) as error:
        yield f"{key}._target_={name}: not found ({error})"
        return
    missing = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name not in node
    ]
    if missing and not node.get("_partial_"):
        yield (
            f"{key}: {name} needs {', '.join(missing)} (or `_partial_: true`, which hands over the function instead of "
            "what it returns)"
        )
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for argument, value in node.items():
        if argument.startswith("_"):
            continue
        if argument not in signature.parameters:
            if not takes_any:
                yield f"{key}.{argument}: unknown; {name} takes {', '.join(signature.parameters)}"
        elif not _has_rule(key, argument) and not _fits(value, hints.get(argument, Any)):
            yield f"{key}.{argument}={value}: allowed is {_words(hints[argument])}"


def _has_rule(key: str, argument: str) -> bool:
    """Whether the value of an argument is checked by a rule, so that its type needs no check here."""
    return f"{key}.{argument}" in RULES or (key.startswith("reward.") and argument in REWARD)


def trusted(name: str) -> bool:
    """Whether a ``_target_`` may be imported: a member of ``TRUSTED``, or of a file below the working directory."""
    top = name.partition(".")[0]
    if top in TRUSTED:
        return True
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    # Built-in and frozen modules have no location: "frozen" is no path.
    places = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
    here = Path.cwd().resolve()
    return any(
        here in (path := Path(place).resolve()).parents and not {"site-packages", "dist-packages"} & set(path.parts)
        for place in places
    )


def _signature(name: str) -> tuple[inspect.Signature, dict[str, Any]]:
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            member: Any = importlib.import_module(".".join(parts[:cut]))
            break
        except ModuleNotFoundError as error:
            if error.name is None or not ".".join(parts[:cut]).startswith(error.name):
                raise
    else:
        raise ImportError(f"no module {parts[0]!r}")
    for part in parts[cut:]:
        member = getattr(member, part)
    try:
        hints = get_type_hints(member.__init__ if inspect.isclass(member) else member)
    except (NameError, TypeError):
        hints = {}
    return inspect.signature(member), hints


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value can be what the annotation says; built parts and other annotations pass."""
    if isinstance(value, Mapping) or hint is Any:
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
