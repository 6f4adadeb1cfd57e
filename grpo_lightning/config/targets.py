"""Which objects a ``_target_`` may name, and which arguments they take.

A ``_target_`` is imported and called, and a recipe may be somebody else's. So the object has to be a part of this
package, of a library in ``ALLOWED_TARGETS``, the user's own code, which lies outside Python's library and installed
packages, or of a package in ``trusted=[…]``. What counts is the module that defines the object, not how the path
begins: ``my_rewards.os.system`` is a part of ``os``.
"""

import inspect
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_lightning.config.settings import nearest, walk
from grpo_lightning.console import single_line

_PARTS = (
    *("advantage", "callbacks", "data", "environment", "logger", "loss", "module", "policy", "reference", "reward"),
    *("rollout", "sampler", "schedule", "validation", "distributed.strategies", "checkpoint.io.AtomicCheckpointIO"),
    *("composition.live_object", "recording.RecordedCollector", "sweep.SweepRecorder"),
)
_OF_LIGHTNING = ("callbacks", "loggers", "strategies", "plugins", "profilers", "accelerators", "trainer", "Trainer")
ALLOWED_TARGETS = (
    *(f"grpo_lightning.{part}" for part in _PARTS),
    *("torch.optim", "bitsandbytes.optim", "transformers.optimization", "transformers.Adafactor"),
    *("lightning.Trainer", "lightning.fabric.plugins", *(f"lightning.pytorch.{part}" for part in _OF_LIGHTNING)),
)
"""Packages, modules and classes that settings may name besides the user's own."""
HYDRA_TARGETS = ("hydra._internal.core_plugins", "hydra.experimental.callbacks", "hydra_plugins", "optuna.samplers")
"""What Hydra's own settings may name as well: launchers, sweepers and callbacks."""
_REFUSED = (
    "settings may name parts of this package, torch's and bitsandbytes' optimizers, Lightning's trainer, callbacks, "
    "loggers, strategies, plugins, profilers and accelerators, your own Python files, and packages in trusted=[PACKAGE]"
)
_PYTHON = {"builtins", *sys.stdlib_module_names}


def trusted_packages(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The installed packages that ``trusted=[…]`` names; modules of Python are none."""
    return tuple(str(name) for name in config.get("trusted") or () if name not in _PYTHON)


def find_targets(config: Any, prefix: str = "", keys: Collection[str] = ("_target_",)) -> Iterator[tuple[str, Any]]:
    """Every ``_target_`` in nested settings, as pairs of dotted key and value; or other ``keys``."""
    return ((key, value) for key, value in walk(config, prefix) if key.rpartition(".")[2] in keys)


def target_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Problems of every ``_target_`` that its name alone shows; nothing is imported."""
    if not isinstance(config.get("trusted", []), list):
        yield f"trusted={config['trusted']}: must be a list of packages, such as trusted=[trl]"
        return
    for key, name in find_targets(config):
        if problem := _name_problem(name, trusted_packages(config), ALLOWED_TARGETS):
            yield f"{key}={name}: {problem}"


def import_target(path: str, trusted: Collection[str] = (), allowed: Collection[str] = ALLOWED_TARGETS) -> Any:
    """Import the function or class that a path such as ``torch.optim.AdamW`` names.

    Args:
        path: Dotted path.
        trusted: Packages that the user trusts.
        allowed: Packages, modules and classes that may be named besides the user's own code.

    Raises:
        ValueError: There is no such object, it cannot be called, or settings may not name it.
    """
    if problem := _name_problem(path, trusted, allowed):
        raise ValueError(problem)
    try:
        member = _import_path(path)
    except Exception as error:  # importing a user's file may raise anything
        reason = error if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"not found ({single_line(str(reason))})") from error
    if isinstance(member, ModuleType) or not callable(member):
        raise ValueError(f"must be a function or a class, and this is a {type(member).__name__}")
    home = _defining_module(member)
    place = f"{home}.{getattr(member, '__qualname__', '')}"
    is_private = place.startswith("grpo_lightning.") and "._" in place
    if home.partition(".")[0] in trusted or _is_own(home) or (_is_below(place, allowed) and not is_private):
        return member
    raise ValueError(f"is defined in {home}; {_REFUSED}")


def _name_problem(path: Any, trusted: Collection[str], allowed: Collection[str]) -> str | None:
    """Why settings may not name what a path begins with; None if they may."""
    if not isinstance(path, str) or "." not in path or not all(part.isidentifier() for part in path.split(".")):
        return "must be a dotted path, package.module.function"
    top = path.partition(".")[0]
    if top in trusted or _is_below(path, allowed) or _is_own(top):
        return None
    is_missing = top not in _PYTHON and _location(top) is None
    return (
        f"not found (there is no module {top} in the working directory or on Python's path)" if is_missing else _REFUSED
    )


def _is_below(path: str, prefixes: Collection[str]) -> bool:
    return any(f"{path}.".startswith(f"{prefix}.") for prefix in prefixes)


def _is_own(module: str) -> bool:
    """Whether a module is the user's: outside Python's library and of installed packages."""
    top = module.partition(".")[0]
    place = _location(top)
    if place is None or top == "grpo_lightning" or {"site-packages", "dist-packages"} & set(place.parts):
        return False
    return not any(Path(sysconfig.get_path(name)).resolve() in place.parents for name in ("stdlib", "platstdlib"))


def _location(top: str) -> Path | None:
    """The file or folder of a top-level module; None if there is none, as of those built into Python."""
    if top == "__main__":
        return Path(getattr(sys.modules["__main__"], "__file__", None) or Path.cwd() / "script.py").resolve()
    try:
        spec = find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
    places = [spec.origin if spec.has_location else None, *(spec.submodule_search_locations or ())] if spec else []
    return next((Path(place).resolve() for place in places if place), None)


def _import_path(path: str) -> Any:
    """What a path names: a member, or where there is none of that name, a module."""
    top, *names = path.split(".")
    found: Any = import_module(top)
    for name in names:
        is_module = hasattr(found, "__path__") and not hasattr(found, name) and find_spec(f"{found.__name__}.{name}")
        found = import_module(f"{found.__name__}.{name}") if is_module else getattr(found, name)
    return found


def _defining_module(member: Any) -> str:
    """The module in which a function, a class, the function of a ``partial`` or an object's class is defined."""
    if isinstance(member, partial):
        return _defining_module(member.func)
    bound = getattr(member, "__self__", None)
    if bound is not None and not isinstance(bound, ModuleType):  # a method of a class or of an object
        return str((bound if inspect.isclass(bound) else type(bound)).__module__)
    return str(getattr(member, "__module__", None) or type(member).__module__)


def argument_problems(node: Mapping[str, Any], key: str, trusted: Collection[str] = ()) -> Iterator[str]:
    """What is wrong with the ``_target_`` of the settings ``node`` at ``key``, which is imported, and its arguments."""
    target = str(node["_target_"])
    try:
        member = import_target(target, trusted)
    except ValueError as error:
        yield f"{key}._target_={target}: {error}"
        return
    if "_args_" in node:
        return
    try:
        parameters = dict(inspect.signature(member).parameters)
    except (TypeError, ValueError):  # it does not say what it takes
        return
    named = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    required = [name for name, p in named.items() if p.default is p.empty and p.kind is not p.POSITIONAL_ONLY]
    if (missing := [name for name in required if name not in node]) and not node.get("_partial_"):
        yield f"{key}: {target} needs {', '.join(missing)} (or `_partial_: true`, which passes on the function itself)"
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        made = inspect.signature(member).return_annotation  # functions of ours pass the rest on to what they return
        if not (inspect.isclass(made) and made.__module__.startswith("grpo_lightning.")):
            return
        parameters = {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
        parameters |= inspect.signature(made).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    named |= parameters
    for name in node:
        if name not in named and not name.startswith("_"):
            meant = nearest(name, named)
            guess = f"the nearest is {meant}; " if meant else ""
            yield f"{key}.{name}: unknown; {guess}{target} takes {', '.join(parameters)}"


def with_targets(config: Any) -> Any:
    """Turn the tools that resolved settings name by dotted paths into targets, in place."""
    for key, tools in list(walk(config, "config")):
        if key.endswith(".tools") and isinstance(tools, list):
            tools[:] = [{"_target_": tool, "_partial_": True} if isinstance(tool, str) else tool for tool in tools]
    return config
