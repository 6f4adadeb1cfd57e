"""The source of modules, found and parsed without importing anything."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from grpo_lightning import start

_MAKES_NAMES = {"__getattr__", "globals", "setattr", "exec", "vars", "modules", "__dict__"}
"""A module that speaks of these may have names that no statement binds."""


class Unreadable(Exception):
    """The source does not say it: the object must be imported to know."""


class NoCallable(Unreadable):
    """The name stands for a plain value."""


class Absent(Exception):
    """There is no such module or member."""


@dataclass(frozen=True)
class Module:
    """A module by the file of its source."""

    name: str
    is_package: bool
    path: Path | None
    """None for a directory without ``__init__.py``."""

    @cached_property
    def text(self) -> str:
        """The source."""
        try:
            return self.path.read_text(encoding="utf-8") if self.path else ""
        except (OSError, ValueError) as error:
            raise Unreadable(f"{self.name} cannot be read: {error}") from error

    @cached_property
    def bindings(self) -> dict[str, list[ast.stmt]]:
        """Name -> the statements that bind it at the top level, also in an `if` or `try`; "*" -> imports of all."""
        try:
            tree = ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Unreadable(f"{self.name} cannot be read: {error}") from error
        found: dict[str, list[ast.stmt]] = {}
        for statement in statements(tree.body):
            for name in bound(statement):
                found.setdefault(name, []).append(statement)
        return found

    def may_have(self, name: str) -> bool:
        """Whether there may be a name that no statement of the module binds."""
        words = set(re.findall(r"\w+", self.text))
        return name in words or bool(words & _MAKES_NAMES)


@lru_cache(256)
def load(name: str) -> Module:
    """A module, whose source is read when it is needed.

    Raises:
        Absent: There is no such module.
        Unreadable: It has no source.
    """
    spec = spec_of(name)
    if spec is None:
        raise Absent(f"No module named {name!r}")
    is_package = spec.submodule_search_locations is not None
    if spec.origin is None and is_package:
        return Module(name, True, None)
    if not spec.has_location or spec.origin is None or not spec.origin.endswith(".py"):
        raise Unreadable(f"{name} has no source")
    return Module(name, is_package, Path(spec.origin))


def spec_of(name: str) -> ModuleSpec | None:
    """Where a module is; parents are found as directories, without running their ``__init__``."""
    top, *rest = name.split(".")
    spec = start.spec_of(top)
    known = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        known = f"{known}.{part}"
        places = [str(place) for place in spec.submodule_search_locations]  # transformers has paths there, not text
        try:
            spec = PathFinder.find_spec(known, places)
        except KeyError:  # a folder without __init__.py, for which Python looks at the upper one as imported
            spec = ModuleSpec(known, None, is_package=True)
            spec.submodule_search_locations = [f"{place}/{part}" for place in places]
    return spec


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class that run when it is loaded, in the order of the file."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for inner in ("body", "orelse", "finalbody"):
                yield from statements(getattr(statement, inner, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from statements(handler.body)


def bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import):
        yield from (alias.asname or alias.name.split(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            yield from (part.id for part in parts if isinstance(part, ast.Name))
