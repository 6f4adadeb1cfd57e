"""Which code settings may name.

A ``_target_`` is imported and called with arguments that settings choose too, so that whoever writes settings could run
anything if it might name anything. It may name a member of ``OWN`` or ``LIBRARIES``, and what files of the user define:
those below the directory in which the program was started, and packages that ``trusted=[…]`` lists. What a path leads
to counts, not how it begins: ``torch.os.system`` is no member of torch. Settings that a command brings along may be a
stranger's, who would say what such files are given: beside these they may not be named.
"""

import importlib
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_lightning import start
from grpo_lightning.settings.allowlist import DEFINED, LIBRARIES, OWN, PLAIN

_PROJECT = ("benchmarks", "conf", "tests", "train")
"""Beside this package in a checkout, and no files of the user's."""

PACKAGE = "pkg://"
"""Begins a path inside an installed package."""
OWN_FILES = "Python files below the directory where the program was started"
ALLOWED = (
    "parts of this package, torch's and bitsandbytes' optimizers, Lightning's trainer, callbacks, loggers and "
    f"strategies, and what is defined in {OWN_FILES} or in packages that trusted=[…] names"
)


class Elsewhere(ValueError):
    """A path leads to code that settings may not name."""


class NoCode(ValueError):
    """A path leads to something that cannot be called."""


def problems(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with the code that settings name, wherever it stands in them; nothing is imported.

    Args:
        config: Resolved settings.

    Returns:
        One text for every path, at the shortest key that has it: others are copies of parts.
    """
    listed, trusted = packages(config)
    found: dict[str, str] = {}
    for key, name in targets(config):
        if isinstance(name, str) and "." in name and not may_name(name, trusted):
            found[name] = min(found.get(name, key), key, key=lambda one: one.count("."))
    listed += [_refusal(key, name, trusted) for name, key in found.items()]
    for key, value in values(config):
        if not isinstance(value, str | int | float | None):  # a tag of YAML makes bytes, and paths
            listed.append(f"{key}: allowed are texts and numbers, and this is of type {type(value).__name__}")
        elif isinstance(value, str) and value.startswith(PACKAGE) and not may_read(value, trusted):
            listed.append(f"{key}={value}: allowed are weights in this package and in packages that trusted=[…] names")
    return listed


def packages(config: Mapping[str, Any]) -> tuple[list[str], tuple[str, ...]]:
    """What is wrong with ``trusted``, and the packages that it names."""
    given = config.get("trusted") or []
    if not isinstance(given, list | tuple):
        return [f"trusted={given}: allowed is a list of packages, such as trusted=[trl]"], ()
    wrong = [
        name
        for name in given
        if not isinstance(name, str) or not name.isidentifier() or name in sys.stdlib_module_names
    ]
    found = [
        f"trusted={name}: allowed are names of installed packages outside the standard library, such as trusted=[trl]"
        for name in wrong
    ]
    return found, tuple(name for name in given if name not in wrong)


def may_read(path: str, trusted: Collection[str] = ()) -> bool:
    """Whether ``pkg://package/folder`` names a package of which weights may be read."""
    package = path.removeprefix(PACKAGE).partition("/")[0]
    return package == "grpo_lightning" or package in trusted


def values(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value in nested settings, as pairs of its dotted key and itself."""
    pairs: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else None
    if pairs is None:
        yield prefix, node
        return
    for key, value in pairs:
        yield from values(value, f"{prefix}.{key}" if prefix else str(key))


def targets(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every ``_target_`` in nested settings, as pairs of its dotted key and its value."""
    pairs: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        name = f"{prefix}.{key}" if prefix else str(key)
        if key == "_target_":
            yield name, value
        yield from targets(value, name)


def may_name(name: str, trusted: Collection[str] = ()) -> bool:
    """Whether settings may name a dotted path, as far as the path itself and the place of its package tell.

    Args:
        name: The path, such as ``torch.optim.AdamW``.
        trusted: Packages that the user trusts.
    """
    parts = name.split(".")
    if any(not part.isidentifier() or part.startswith("_") for part in parts):
        return False
    if parts[0] == "grpo_lightning":
        own = ".".join(parts[1:])
        return _below(DEFINED.get(own, own), OWN)
    return _below(name, LIBRARIES) or (is_of_user(parts[0], trusted) and not start.settings_from())


def _refusal(key: str, name: str, trusted: Collection[str]) -> str:
    top = name.partition(".")[0]
    is_own = top.isidentifier() and not is_of_library(name) and is_of_user(top, trusted)
    return beside_brought(key, name) if is_own and start.settings_from() else f"{key}={name}: allowed are {ALLOWED}"


def beside_brought(key: str, name: str) -> str:
    """What is said of code that the user trusts where settings are brought along, which may be a stranger's."""
    return (
        f"{key}={name}: this code may be given what settings of {', '.join(start.settings_from())} say; if you know "
        "them, allowed is trusted_settings=true on the command line"
    )


def is_of_library(path: str) -> bool:
    """Whether a path is one of this package or of the libraries that settings may name, whose arguments have rules."""
    return _below(path, ("grpo_lightning", *LIBRARIES))


def is_of_user(top: str, trusted: Collection[str] = ()) -> bool:
    """Whether a package or module is one of the user's: trusted by name, or below the directory of the start."""
    if top in trusted:
        return True
    return top not in sys.stdlib_module_names and not _is_of_project(top) and _lies_below(top, start.place())


def resolved(name: str, trusted: Collection[str] = (), *, key: str = "_target_") -> Any:
    """What a path leads to, imported.

    Args:
        name: A path that `may_name` allows.
        trusted: Packages that the user trusts.
        key: Where the path stands in the settings, for messages.

    Raises:
        Elsewhere: It is not allowed, or leads to something that was defined elsewhere.
        NoCode: It cannot be called.
        ImportError: A module cannot be imported.
        AttributeError: A module has no such member.
    """
    if not may_name(name, trusted):
        raise Elsewhere(_refusal(key, name, trusted))
    parts = name.split(".")
    is_listed = is_of_library(name)
    if not is_listed:  # a file here is none of those, also where they are absent
        start.make_importable(parts[0])
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if _is_method(found, part):
            raise NoCode(f"{key}={name}: allowed is a function or a class, and this is a method")
        found = _member(found, part, ".".join(parts[:number]))
        if isinstance(found, ModuleType) and number < len(parts) and not _below(found.__name__, parts[:1]):
            raise Elsewhere(f"{key}={name}: leads to the module {found.__name__}; allowed are {ALLOWED}")
        is_between = number < len(parts) and not isinstance(found, ModuleType) and not is_listed
        if is_between and not _is_made_by_the_user(found, str(getattr(found, "__module__", None) or ""), trusted):
            raise Elsewhere(
                f"{key}={name}: leads to {'.'.join(parts[:number])} of another package; allowed are {ALLOWED}"
            )
    if isinstance(found, ModuleType) or not callable(found):
        raise NoCode(f"{key}={name}: allowed is a function or a class, and this is {_kind(found)}")
    home = str(getattr(found, "__module__", None) or "")
    if not _is_defined_well(name, found, home, parts[0], trusted):
        raise Elsewhere(f"{key}={name}: is defined in {home or 'builtins'}; allowed are {ALLOWED}")
    return found


def _is_defined_well(name: str, found: Any, home: str, top: str, trusted: Collection[str]) -> bool:
    if top == "grpo_lightning":
        # By its own place too: parts import one another, and what they use is not meant for settings.
        own = f"{home}.{getattr(found, '__qualname__', '')}".removeprefix("grpo_lightning.")
        return home.startswith("grpo_lightning.") and _below(DEFINED.get(own, own), OWN)
    for prefix, homes in LIBRARIES.items():
        if _below(name, (prefix,)):
            return inspect.isclass(found) and _below(home, homes)
    return _is_made_by_the_user(found, home, trusted)


def _is_made_by_the_user(found: Any, home: str, trusted: Collection[str]) -> bool:
    """Whether an object that a file of the user has may be named by its own place, or was made in the file itself.

    A file may import anything: ``my_rewards.sympify`` after ``from sympy import sympify`` is sympy's.
    """
    top, own = home.partition(".")[0], f"{home}.{getattr(found, '__qualname__', '')}"
    if inspect.isroutine(found) or inspect.isclass(found) or hasattr(found, "__wrapped__"):
        if is_of_user(top, trusted):
            return True
        if is_of_library(own):
            # Rules of where a class or a function may stand, and of what it may be given, look for it by its own name.
            has_rules = top in ("grpo_lightning", "lightning") and (inspect.isclass(found) or not _below(own, PLAIN))
            return not has_rules and may_name(own, trusted) and _is_defined_well(own, found, home, top, trusted)
        # What a decorator of a package makes of a function says that it is of that package, but is not to be had there.
        if "<locals>" not in own or hasattr(found, "__self__") or top in {*sys.stdlib_module_names, "builtins"}:
            return False
    holders = _holders(found)
    return bool(holders) and all(is_of_user(holder, trusted) for holder in holders)


def _holders(found: Any) -> set[str]:
    """The packages of which a module has an object, but for the program itself."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)]
    having = {name for name, module in modules if any(value is found for value in list(vars(module).values()))}
    return {name.partition(".")[0] for name in having} - {"__main__", "__mp_main__"}


def _is_method(parent: Any, name: str) -> bool:
    """Whether a member of a class needs an object of it; what makes such objects does not."""
    return inspect.isclass(parent) and inspect.isfunction(inspect.getattr_static(parent, name, None))


def _member(parent: Any, part: str, path: str) -> Any:
    """An attribute or, where a package has none of that name, its module: as Hydra finds it."""
    try:
        return getattr(parent, part)
    except AttributeError:
        if not isinstance(parent, ModuleType):
            raise
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise AttributeError(f"{parent.__name__} has no member {part!r}") from None


def _below(path: str, prefixes: Collection[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def _kind(value: Any) -> str:
    return (
        f"the module {value.__name__}" if isinstance(value, ModuleType) else f"a value of type {type(value).__name__}"
    )


def _lies_below(top: str, here: Path) -> bool:
    spec = start.spec_of(top)
    if spec is None:
        return False
    # Built-in and frozen modules have no location: "frozen" is no path.
    places = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
    return bool(places) and all(start.is_own(Path(place).resolve(), here) for place in places)


def _is_of_project(top: str) -> bool:
    """Whether a module is one of this project's own helpers, in a checkout."""
    if top not in _PROJECT:
        return False
    spec = start.spec_of(top)
    places = [spec.origin or ""] if spec and spec.origin else list((spec and spec.submodule_search_locations) or ())
    checkout = Path(__file__).resolve().parents[2]
    return any(checkout in Path(place).resolve().parents for place in places)
