"""The signature of what a dotted path names, read from its source: nothing is imported."""

import ast
import inspect
from collections.abc import Iterator
from types import NoneType
from typing import Any, Union

from grpo_lightning.settings.find import Definition, expression, find, lineage
from grpo_lightning.settings.source import Absent, Module, NoCallable, Unreadable, statements

_PLAIN = {"int": int, "float": float, "bool": bool, "str": str, "None": NoneType}
_KEEPS_SIGNATURE = {
    "staticmethod",
    "classmethod",
    "abstractmethod",
    "abc.abstractmethod",
    "override",
    "typing.override",
    "cache",
    "functools.cache",
    "lru_cache",
    "functools.lru_cache",
    "contextmanager",
    "contextlib.contextmanager",
    "torch.no_grad",
    "torch.inference_mode",
}
"""Decorators that need not be read to know that the signature stays."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def signature(path: str) -> inspect.Signature:
    """The signature of a function or class, with plain types as annotations and ``Any`` for all others.

    Defaults are those of the source where they are literals; another default is ``...``.

    Args:
        path: Dotted, package.module.name.

    Raises:
        Absent: There is no such thing.
        NoCallable: It is a module or a plain value.
        Unreadable: It cannot be said without importing it.
    """
    found = find(path)
    if isinstance(found, Module):
        raise NoCallable("it is a module")
    if not isinstance(found.node, ast.ClassDef):
        return _of_function(found)
    for base in lineage(found):
        if base is None or _is_special(base):
            raise Unreadable(f"{found.home}: a base class cannot be read")
        own = {s.name: s for s in statements(base.node.body) if isinstance(s, _Function)}
        for name in ("__new__", "__init__"):
            if name in own:
                return _of_function(Definition(base.module, own[name], base))
        if (decorator := _dataclass(base)) and _flag(decorator, "init", True):
            return inspect.Signature(_ordered(_fields(base)))
    return inspect.Signature()


def _is_special(definition: Definition) -> bool:
    """Whether how a class is made is not to be seen in its ``__init__``."""
    node = definition.node
    if not isinstance(node, ast.ClassDef):
        return True
    metaclass = next((ast.unparse(k.value) for k in node.keywords if k.arg == "metaclass"), "ABCMeta")
    bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
    sets_it = any(
        isinstance(s, ast.Assign) and any(ast.unparse(t) in ("__signature__", "__init__", "__new__") for t in s.targets)
        for s in statements(node.body)
    )
    unknown = [d for d in node.decorator_list if "dataclass" not in ast.unparse(d) and not _keeps(definition.module, d)]
    special = bases & {"NamedTuple", "TypedDict", "Enum", "IntEnum", "StrEnum", "Protocol"}
    return metaclass.split(".")[-1] != "ABCMeta" or bool(special or unknown) or sets_it


def _of_function(definition: Definition) -> inspect.Signature:
    node = definition.node
    if isinstance(node, ast.ClassDef):
        raise Unreadable(f"{definition.home} is a class in a class")
    decorators = {ast.unparse(d).split("(")[0] for d in node.decorator_list}
    for decorator in node.decorator_list:
        if not _keeps(definition.module, decorator):
            raise Unreadable(f"{definition.home} is decorated by {ast.unparse(decorator)[:60]}")
    parameters = list(_parameters(node.args))
    is_bound = node.name in ("__init__", "__new__") or "classmethod" in decorators
    if definition.owner is not None and is_bound and parameters:
        first = parameters[0]
        parameters = parameters if first.kind is first.VAR_POSITIONAL else parameters[1:]
    return inspect.Signature(parameters)


def _keeps(module: Module, decorator: ast.expr) -> bool:
    """Whether a decorator hands on the signature of what it decorates."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    if ast.unparse(called) in _KEEPS_SIGNATURE:
        return True
    try:
        found = expression(module, called)
    except (Absent, Unreadable):
        return False
    if not isinstance(found, Definition) or isinstance(found.node, ast.ClassDef):
        return False
    returned = [s.value for s in statements(found.node.body) if isinstance(s, ast.Return)]
    first = found.node.args.args[0].arg if found.node.args.args else ""
    if returned and all(isinstance(value, ast.Name) and value.id == first for value in returned):
        return True  # it marks the function, and gives it back
    return any(
        ast.unparse(inner).split("(")[0] in ("wraps", "functools.wraps")
        for node in ast.walk(found.node)
        if isinstance(node, _Function)
        for inner in node.decorator_list
    )


def _parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    kinds: list[Any] = [inspect.Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs)
    kinds += [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(arguments.args)
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    for one, kind, default in zip(positional, kinds, [*defaults, *arguments.defaults], strict=True):
        yield _parameter(one, kind, default)
    if arguments.vararg:
        yield _parameter(arguments.vararg, inspect.Parameter.VAR_POSITIONAL, None)
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(one, inspect.Parameter.KEYWORD_ONLY, default)
    if arguments.kwarg:
        yield _parameter(arguments.kwarg, inspect.Parameter.VAR_KEYWORD, None)


def _parameter(one: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    return inspect.Parameter(one.arg, kind, default=_default(default), annotation=_plain(one.annotation))


def _default(node: ast.expr | None) -> Any:
    if node is None:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ...


def _plain(node: ast.expr | None) -> Any:
    """An annotation as a plain type or a union of them, ``Any`` if it is anything else."""
    options = list(_options(node))
    if not options or Any in options:
        return Any
    return Union[tuple(options)]  # noqa: UP007  # of a number of types that is not known before


def _options(node: ast.expr | None) -> Iterator[Any]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _options(node.left)
        yield from _options(node.right)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] in ("Union", "Optional"):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            yield from _options(part)
        if ast.unparse(node.value).endswith("Optional"):
            yield NoneType
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            yield from _options(ast.parse(node.value, mode="eval").body)
        except SyntaxError:
            yield Any
    elif isinstance(node, ast.Constant) and node.value is None:
        yield NoneType
    else:
        yield _PLAIN.get(node.id, Any) if isinstance(node, ast.Name) else Any


def _dataclass(definition: Definition) -> ast.expr | None:
    """The decorator ``@dataclass`` of a class, if it has it."""
    for decorator in definition.node.decorator_list:
        if ast.unparse(decorator).split("(")[0] in ("dataclass", "dataclasses.dataclass"):
            return decorator
    return None


def _flag(call: ast.expr, name: str, otherwise: bool) -> bool:
    """A keyword of a call that is true or false."""
    for keyword in call.keywords if isinstance(call, ast.Call) else ():
        if keyword.arg == name and isinstance(keyword.value, ast.Constant):
            return bool(keyword.value.value)
    return otherwise


def _fields(definition: Definition) -> list[inspect.Parameter]:
    """The fields of a dataclass and of the dataclasses below it that ``__init__`` takes, as parameters in order."""
    fields: dict[str, inspect.Parameter | None] = {}
    for base in reversed(list(lineage(definition))):
        if base is None:
            raise Unreadable(f"{definition.home}: a base class cannot be read")
        if not (decorator := _dataclass(base)):
            continue
        named = _flag(decorator, "kw_only", False)
        for statement in base.node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            hint = ast.unparse(statement.annotation).strip("\"'").removeprefix("typing.").removeprefix("dataclasses.")
            if hint == "KW_ONLY":
                named = True
            elif not hint.startswith("ClassVar"):
                fields[statement.target.id] = _field(statement, named)
    return [parameter for parameter in fields.values() if parameter is not None]


def _field(statement: ast.AnnAssign, named: bool) -> inspect.Parameter | None:
    """A field as a parameter; None if ``__init__`` does not take it."""
    name, value = ast.unparse(statement.target), statement.value
    default = _default(value)
    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "field":
        if not _flag(value, "init", True):
            return None
        named = _flag(value, "kw_only", named)
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        default = _default(given["default"]) if "default" in given else inspect.Parameter.empty
        default = ... if "default_factory" in given else default
    kind = inspect.Parameter.KEYWORD_ONLY if named else inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=_plain(statement.annotation))


def _ordered(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return sorted(parameters, key=lambda one: one.kind)
