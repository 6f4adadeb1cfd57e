"""Which code a ``_target_`` may name, and which arguments it takes.

Settings may come from somebody else, and a ``_target_`` is imported and called. So what it leads to has to be a part of
this package, of the libraries in ``ALLOWED_TARGETS``, the user's own code, which lies outside of Python's library and
its packages, or of a package in ``trusted=[…]``. What counts is the module in which the object is defined, not how the
path begins: ``my_rewards.os.system`` is a part of ``os``.
"""

import importlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from functools import cache, partial
from inspect import Signature
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from grpo_lightning.config.redaction import single_line
from grpo_lightning.config.rules import REWARD, RULES
from grpo_lightning.config.suggestions import nearest

_PARTS = ("callbacks", "loggers", "strategies", "plugins", "profilers", "accelerators", "trainer", "Trainer")
_OWN = (
    *("advantage", "callbacks", "correction", "data", "environment", "logger", "loss", "module", "policy", "reference"),
    *("reward", "rollout", "sampler", "schedule", "validation", "distributed.strategies"),
    *("composition.part", "sweep.SweepRecorder", "checkpoint.io.AtomicCheckpointIO"),
)
"""Parts of this package that settings build; its other functions are not meant for settings."""
ALLOWED_TARGETS = (
    *(f"grpo_lightning.{part}" for part in _OWN),
    *("torch.optim", "bitsandbytes.optim", "transformers.optimization", "transformers.Adafactor"),
    *("lightning.Trainer", "lightning.fabric.plugins", *(f"lightning.pytorch.{part}" for part in _PARTS)),
)
"""Packages, modules and classes that settings may name."""
HYDRA_TARGETS = ("hydra._internal.core_plugins", "hydra.experimental.callbacks", "hydra_plugins", "optuna.samplers")
"""What Hydra's own settings may name beside: launchers, sweepers and callbacks."""
ALLOWED = (
    "allowed are parts of this package, torch's and bitsandbytes' optimizers, Lightning's trainer, callbacks, loggers, "
    "strategies, plugins, profilers and accelerators, your own Python files, and packages that trusted=[PACKAGE] names"
)
_LISTS = {"grpo_lightning.environment.tools.Tools": "tools"}
"""Target -> its setting that is a list of dotted paths."""
_PYTHON = {"builtins", *sys.stdlib_module_names}
_PLAIN = {kind.__name__: kind for kind in (int, float, bool, str)}


def find_targets(node: Any, prefix: str = "", keys: Collection[str] = ("_target_",)) -> Iterator[tuple[str, Any]]:
    """Every ``_target_`` in nested settings, as pairs of its dotted key and its value; or other ``keys``."""
    pairs: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        name = f"{prefix}.{key}" if prefix else str(key)
        if key in keys:
            yield name, value
        yield from find_targets(value, name, keys)


def trusted_packages(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The packages that ``trusted=[…]`` names."""
    named = config.get("trusted") or ()
    return tuple({*map(str, named)} - _PYTHON) if isinstance(named, list | tuple) else ()


def target_problems(config: Mapping[str, Any], libraries: Collection[str] = ALLOWED_TARGETS) -> Iterator[str]:
    """What is wrong with the paths that settings name, by key, as far as it can be said without importing them.

    Args:
        config: Resolved settings.
        libraries: What they may name beside the user's own code.
    """
    trusted = config.get("trusted") or []
    if not isinstance(trusted, list | tuple):
        yield f"trusted={trusted}: allowed is a list of packages, such as trusted=[trl]"
    elif wrong := _PYTHON & {*map(str, trusted)}:
        yield f"trusted={sorted(wrong)}: allowed are installed packages, and these are parts of Python"
    shortest: dict[str, str] = {}  # a part that others have a copy of is told where it stands
    for key, name in find_targets(config):
        shortest[str(name)] = min(shortest.get(str(name), key), key, key=lambda one: one.count("."))
    for name, key in shortest.items():
        if not all(part.isidentifier() for part in name.split(".")) or "." not in name:
            yield single_line(f"{key}={name}: allowed is a dotted path, package.module.function")
        elif not _is_below(name, libraries) and (problem := _top_problem(name, trusted_packages(config))):
            yield f"{key}={name}: {problem}"


def import_target(path: str, trusted: Collection[str] = (), libraries: Collection[str] = ALLOWED_TARGETS) -> Any:
    """Import what a path leads to.

    Args:
        path: Of a function or a class, such as ``torch.optim.AdamW``.
        trusted: Packages that the user trusts.
        libraries: What may be named beside the user's own code.

    Raises:
        ValueError: There is no such object, it is no function or class, or it is defined where settings may name none.
    """
    if not _is_below(path, libraries) and (problem := _top_problem(path, trusted)):
        raise ValueError(problem)
    try:
        found = _imported(path)
    except Exception as error:  # importing a user's file may raise anything
        told = error if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"not found ({single_line(str(told))})") from error
    if isinstance(found, ModuleType) or not callable(found):
        raise ValueError(f"allowed is a function or a class, and this is a {type(found).__name__}")
    home = _home(found)
    if home.partition(".")[0] in trusted or _is_own(home):
        return found
    place = f"{home}.{getattr(found, '__qualname__', '')}"
    if not _is_below(place, libraries) or (place.startswith("grpo_lightning.") and "._" in place):
        raise ValueError(f"is defined in {home}; {ALLOWED}")
    if inspect.isclass(_imported(path.rpartition(".")[0])):  # such as one that reads a pickle
        raise ValueError("allowed is a function or a class, and this is a method")
    return found


def argument_problems(node: Mapping[str, Any], key: str, trusted: Collection[str] = ()) -> Iterator[str]:
    """What is wrong with the ``_target_`` of ``node``, which is imported, and with its arguments.

    Args:
        node: Settings with a ``_target_``.
        key: The dotted key of these settings.
        trusted: Packages that the user trusts.
    """
    name = str(node["_target_"])
    try:
        signature = signature_of(import_target(name, trusted))
    except ValueError as error:
        yield f"{key}._target_={name}: {error}"
        return
    if signature is None or "_args_" in node:
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
    given = {argument: value for argument, value in node.items() if not argument.startswith("_")}
    yield from _unfit(signature, given, key, name)


def adapter_problems(policy: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with ``policy.adapter``, the arguments of peft's ``LoraConfig``, which is imported."""
    adapter = policy.get("adapter")
    if adapter is None:
        return
    if not isinstance(adapter, Mapping):
        yield (
            f"policy.adapter={single_line(str(adapter))}: allowed are arguments of peft's LoraConfig, such as "
            "{r: 16, lora_alpha: 32}, or null"
        )
        return
    if "task_type" in adapter:
        yield "policy.adapter.task_type: unknown; the task is always CAUSAL_LM"
    if signature := signature_of(_imported("peft.LoraConfig")):
        yield from _unfit(signature, adapter, "policy.adapter", "peft.LoraConfig")


def signature_of(member: Any) -> Signature | None:
    """The signature of a function or class, with types as annotations; None where it does not say what it takes."""
    try:
        found = inspect.signature(member)
    except (TypeError, ValueError):
        return None
    try:
        hints = get_type_hints(member.__init__ if inspect.isclass(member) else member)
    except Exception:  # whatever evaluating a foreign annotation raises
        hints = {}
    return found.replace(
        parameters=[
            one.replace(annotation=hints.get(one.name, _PLAIN.get(str(one.annotation), Any)))
            for one in found.parameters.values()
        ]
    )


def with_targets(node: Any) -> Any:
    """The same settings, with ``{_target_: PATH, _partial_: true}`` for each dotted path in lists of functions.

    So they are checked and imported as every other ``_target_`` is.

    Args:
        node: Resolved settings, or a part of them.
    """
    if isinstance(node, list):
        return [with_targets(one) for one in node]
    if not isinstance(node, dict):
        return node
    name = _LISTS.get(str(node.get("_target_")))
    made = {key: with_targets(value) for key, value in node.items()}
    if name in made and isinstance(made[name], list):
        made[name] = [{"_target_": one, "_partial_": True} if isinstance(one, str) else one for one in made[name]]
    return made


def _top_problem(path: str, trusted: Collection[str]) -> str | None:
    """Why settings may not name the package that a path begins with; None if they may."""
    top = path.partition(".")[0]
    if top in trusted or _is_own(top):
        return None
    if top not in _PYTHON and _place(top) is None:
        return f"not found (there is no module {top} in the working directory or on Python's path)"
    return ALLOWED


def _is_own(module: str) -> bool:
    """Whether a module is the user's: none of Python's library, and of no installed package."""
    top = module.partition(".")[0]
    place = _place(top)
    if place is None or top == "grpo_lightning" or {"site-packages", "dist-packages"} & set(place.parts):
        return False
    return not any(installed in place.parents for installed in _library())


def _place(top: str) -> Path | None:
    """The file or folder of a top-level module; None if there is none, as of those built into Python."""
    if top == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        return Path(file).resolve() if file else Path.cwd()
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    file = spec.origin if spec.has_location else folders[0] if folders else None
    return Path(file).resolve() if file else None


@cache
def _library() -> tuple[Path, ...]:
    """The folders of Python's own library."""
    return tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})


def _imported(path: str) -> Any:
    """What a path leads to: a member, or where a package has none of that name, its module."""
    top, *names = path.split(".")
    found: Any = importlib.import_module(top)
    for number, name in enumerate(names, start=1):
        if hasattr(found, name) or not isinstance(found, ModuleType):
            found = getattr(found, name)
            continue
        module = f"{found.__name__}.{name}"
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise AttributeError(f"{'.'.join([top, *names[: number - 1]])} has no member {name!r}") from None
    return found


def _home(member: Any) -> str:
    """The module in which a function, a class, or the function behind a ``partial`` is defined."""
    if isinstance(member, partial):
        return _home(member.func)
    bound = getattr(member, "__self__", None)
    if bound is not None and not isinstance(bound, ModuleType):  # a method of a class or of an object
        return str((bound if inspect.isclass(bound) else type(bound)).__module__)
    return str(getattr(member, "__module__", None) or type(member).__module__)


def _is_below(path: str, prefixes: Collection[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def _unfit(signature: Signature, given: Mapping[str, Any], key: str, name: str) -> Iterator[str]:
    """What is wrong with arguments: those that nobody takes, and those of another type than they are declared to be.

    Args:
        signature: With types or ``Any`` as annotations.
        given: Argument -> value.
        key: The dotted key of these settings.
        name: What takes them.
    """
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [p.name for p in parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for argument, value in given.items():
        if argument not in named:
            if not takes_any:
                meant = nearest(argument, named)
                guess = f"the nearest is {meant}; " if meant else ""
                yield f"{key}.{single_line(argument)}: unknown; {guess}{name} takes {', '.join(parameters)}"
        elif not _has_rule(key, argument) and not _fits(value, hint := parameters[argument].annotation):
            shown = "null" if value is None else single_line(str(value))
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
