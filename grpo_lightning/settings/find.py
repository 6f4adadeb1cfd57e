"""What a dotted path names, read from the source of Python files; nothing is imported.

A name is looked up as Python would bind it: the module's file is found, and imports, re-exports and plain aliases are
followed to a ``def`` or ``class``. Names that only type checkers import count, since packages that load their members
late declare them so.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_lightning.settings.source import Absent, Module, NoCallable, Unreadable, bound, load, spec_of, statements

_MOST_STEPS = 40
"""Re-exports that are followed before a path counts as one that leads in a circle."""
_WITHOUT_METHODS = {"object", "ABC", "abc.ABC", "Generic", "typing.Generic"}


@dataclass(frozen=True)
class Definition:
    """A function or class where it is defined."""

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    owner: "Definition | None" = None
    """The class of a method."""

    @property
    def home(self) -> str:
        """The dotted path of the place of definition, whatever path led there."""
        return f"{self.owner.home if self.owner else self.module.name}.{self.node.name}"


Found = Definition | Module


def find(path: str) -> Found:
    """The definition that a dotted path leads to, or the module that it is.

    Raises:
        Absent: There is none.
        Unreadable: It cannot be said without importing it, such as what is written in C or made by a call.
    """
    first, *rest = path.split(".")
    found: Found = load(first)
    for number, part in enumerate(rest, 1):
        is_last = number == len(rest)
        if isinstance(found, Module):
            # A package need not be read for the way to its modules.
            is_module = not is_last and found.is_package and spec_of(f"{found.name}.{part}")
            found = load(f"{found.name}.{part}") if is_module else member(found, part)
        else:
            found = method(found, part)
    return found


def member(module: Module, name: str, steps: int = _MOST_STEPS) -> Found:
    """What a module binds to a name, or its submodule of that name.

    Raises:
        Absent: There is none.
        Unreadable: The source does not say.
    """
    if bindings := module.bindings.get(name):
        return _agreed(module, name, bindings, steps - 1)
    for statement in module.bindings.get("*", ()):
        try:
            return member(load(_origin(module, statement)), name, steps - 1)
        except Absent:
            continue
    if module.is_package and spec_of(f"{module.name}.{name}"):
        return load(f"{module.name}.{name}")
    if module.may_have(name):
        raise Unreadable(f"{module.name} may make {name} when it is loaded")
    raise Absent(f"module {module.name!r} has no attribute {name!r}")


def method(owner: Definition, name: str) -> Definition:
    """A method of a class, its own or inherited.

    Raises:
        Unreadable: There is none to be found in the source, or ``owner`` is no class.
    """
    for base in lineage(owner):
        if base is None:
            break
        for statement in reversed(list(statements(base.node.body))):
            if name in bound(statement):
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    return Definition(base.module, statement, base)
                break
        else:
            continue
        break
    raise Unreadable(f"no method {name} of {owner.home} was found in its source")


def lineage(definition: Definition) -> Iterator[Definition | None]:
    """A class and its bases in the order in which Python looks for methods; None for a base that cannot be read.

    Bases without any method that is looked for here, such as ``object`` and ``ABC``, are left out.
    """
    yield definition  # whose bases need not be read where it has all that is wanted
    found = list(_walked(definition, _MOST_STEPS))[1:]
    homes = [one.home if one else "" for one in found]
    yield from (one for number, one in enumerate(found) if one is None or homes[number] not in homes[number + 1 :])


def _walked(definition: Definition, steps: int) -> Iterator[Definition | None]:
    yield definition
    node = definition.node
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        named = base.value if isinstance(base, ast.Subscript) else base
        if ast.unparse(named) in _WITHOUT_METHODS:
            continue
        try:
            above: Found | None = expression(definition.module, named, steps - 1)
        except (Absent, Unreadable):
            above = None
        if isinstance(above, Definition) and isinstance(above.node, ast.ClassDef):
            yield from _walked(above, steps - 1)
        else:
            yield None


def expression(module: Module, node: ast.expr, steps: int = _MOST_STEPS) -> Found:
    """What a name, or names joined by dots, in the code of a module refers to.

    Raises:
        Absent: Nothing, as far as the source says.
        Unreadable: It is another kind of expression, or the source does not say.
    """
    if isinstance(node, ast.Name):
        return member(module, node.id, steps)
    if isinstance(node, ast.Attribute):
        value = expression(module, node.value, steps - 1)
        return member(value, node.attr, steps - 1) if isinstance(value, Module) else method(value, node.attr)
    raise Unreadable(f"{ast.unparse(node)[:80]} is made by code")


def _agreed(module: Module, name: str, bindings: list[ast.stmt], steps: int) -> Found:
    """The one object that the statements bind a name to; of several, those in an `if` or `try` after the last other."""
    if steps <= 0:
        raise Unreadable(f"{module.name}.{name} is defined in a circle")
    bindings = [one for one in bindings if not _is_overload(one)]
    certain = [number for number, one in enumerate(bindings) if one.col_offset == 0]
    found: list[Found] = []
    failed: list[Absent | NoCallable] = []
    for statement in bindings[certain[-1] :] if certain else bindings:
        try:
            found.append(_followed(module, statement, name, steps))
        except (Absent, NoCallable) as error:
            failed.append(error)  # one of two ways to have a name; the other one may be there
    if not found:
        raise failed[0] if failed else Unreadable(f"{module.name}.{name} is made by code")
    if any(one != found[0] for one in found):
        raise Unreadable(f"{module.name}.{name} is one of several")
    return found[0]


def _is_overload(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef) and any(
        "overload" in ast.unparse(d) for d in statement.decorator_list
    )


def _followed(module: Module, statement: ast.stmt, name: str, steps: int) -> Found:
    """What one statement binds a name to."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return Definition(module, statement)
    if isinstance(statement, ast.Import):
        return load(next((alias.name for alias in statement.names if alias.asname == name), name))
    if isinstance(statement, ast.ImportFrom):
        origin = _origin(module, statement)
        original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
        if origin == module.name and module.is_package:  # `from . import part`
            return load(f"{origin}.{original}")
        return member(load(origin), original, steps)
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        if isinstance(statement.value, ast.Constant | ast.List | ast.Dict | ast.Set | ast.Tuple | ast.JoinedStr):
            raise NoCallable(f"{module.name}.{name} is {ast.unparse(statement.value)[:60]}")
        return expression(module, statement.value, steps)
    raise Unreadable(f"{module.name}.{name} is made by code")


def _origin(module: Module, statement: ast.stmt) -> str:
    """The module that names are imported from; relative ones are made absolute."""
    if not isinstance(statement, ast.ImportFrom) or not statement.level:
        return str(getattr(statement, "module", ""))
    parts = module.name.split(".")
    kept = parts[: len(parts) - statement.level + module.is_package]
    return ".".join([*kept, *([statement.module] if statement.module else [])])
