"""What a tool takes: told to the model as a JSON schema, and checked when the model calls it."""

import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from jsonschema import Draft202012Validator

from grpo_lightning.environment.tools.calls import Malformed

_SHOWN = 200  # characters of a value or a message that replies repeat


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    function: Callable[..., Any]
    name: str
    schema: Mapping[str, Any]
    """As chat templates show it: type, and function with name, description and parameters."""
    hidden: tuple[str, ...]
    """Its parameters that come from the row, and not from the model."""
    optional: tuple[str, ...]
    """Of these, the ones that have a default."""
    hints: Mapping[str, Any]
    """Parameter -> type, of those that the model gives."""

    @classmethod
    def of(cls, function: Any, columns: Collection[str]) -> "Tool":
        """A function with type hints and a docstring as a tool.

        Args:
            function: A function, a method of an object, or a `functools.partial` of one, whose bound arguments the
                model does not see.
            columns: Names of parameters that come from the row.

        Raises:
            ValueError: It is no function, or lacks a hint or a description; names it.
        """
        own, bound = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
        name = getattr(own, "__name__", "")
        if not inspect.isroutine(own) or (isinstance(function, partial) and function.args):
            raise ValueError(
                f"tools: expected functions, such as the dotted path my_tools.search, got {function!r:.80}"
            )
        if inspect.iscoroutinefunction(own) or inspect.isgeneratorfunction(own) or inspect.isasyncgenfunction(own):
            raise ValueError(f"tools: expected plain functions (def with return), got {name}, which is none")
        shown, hidden = _parameters(own, name, bound, columns)
        try:
            hints = get_type_hints(own)
            schema = _schema(own, name, shown, hints)
        except Exception as error:  # whatever evaluating a foreign annotation raises
            raise ValueError(
                f"tools: {name}: {type(error).__name__}: {error} (a tool has a docstring that describes each argument "
                "in a section `Args:`, and type hints such as int, str, list[float], Literal or Enum; what comes from "
                "the row stands in `columns`)"
            ) from error
        optional = tuple(one.name for one in hidden if one.default is not one.empty)
        return cls(
            function=function,
            name=name,
            schema=schema,
            hidden=tuple(one.name for one in hidden),
            optional=optional,
            hints={one.name: hints[one.name] for one in shown},
        )

    @property
    def usage(self) -> str:
        """How it is called, for a reply: ``add(a: integer, b: integer)``."""
        return f"{self.name}({', '.join(f'{name}: {_words(one)}' for name, one in self._properties.items())})"

    @property
    def _properties(self) -> Mapping[str, Any]:
        properties: Mapping[str, Any] = self.schema["function"]["parameters"]["properties"]
        return properties

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The model's arguments, as the function's hints have them.

        Raises:
            Malformed: Some are missing, unknown or of another type.
        """
        properties = self._properties
        required = self.schema["function"]["parameters"].get("required", ())
        wrong = [f"{name!r:.50} is no argument" for name in given if name not in properties]
        wrong += [f"{name!r} is missing" for name in required if name not in given]
        for name in properties:
            if name in given:
                wrong += _faults(name, given[name], properties[name])
        if wrong:
            raise Malformed(f"{'; '.join(wrong[:5])}; the tool is {self.usage}"[: 5 * _SHOWN])
        return {name: _fitted(value, self.hints[name]) for name, value in given.items()}


def _parameters(
    function: Any, name: str, bound: Mapping[str, Any], columns: Collection[str]
) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """The parameters that the model gives, and those of the row."""
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name not in bound]
    for one in parameters:
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise ValueError(f"tools: {name}: expected named parameters only, got {one}")
    shown = [one for one in parameters if one.name not in columns]
    return shown, [one for one in parameters if one.name in columns]


def _schema(function: Any, name: str, shown: list[inspect.Parameter], hints: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that transformers makes of a function, without the parameters that the model does not see."""
    # It needs torch, and workers do not: they are handed what it returns.
    from transformers.utils.chat_template_utils import get_json_schema

    def seen() -> None: ...

    seen.__name__, seen.__doc__ = name, inspect.getdoc(function)
    seen.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    names = [*(one.name for one in shown), "return"]
    seen.__annotations__ = {one: hints[one] for one in names if one in hints}
    schema: dict[str, Any] = get_json_schema(seen)
    schema["function"]["parameters"].setdefault("properties", {})
    return schema


def _faults(name: str, value: Any, schema: Mapping[str, Any]) -> list[str]:
    """What is wrong with one argument."""
    errors = list(_validator(json.dumps(schema)).iter_errors(value))
    return [
        _fault(f"{name}{''.join(f'[{part:.50}]' for part in map(str, error.absolute_path))}", error)
        for error in errors[:2]
    ]


def _fault(place: str, error: Any) -> str:
    if error.validator in ("type", "enum"):
        return f"'{place}' is {_shown(error.instance)}, and should be {_words(error.schema)}"
    return f"'{place}': {error.message[:_SHOWN]}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 50 else f"{text[:50]}…"


def _words(schema: Mapping[str, Any]) -> str:
    """What a schema allows, in few words."""
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(one) for one in schema["enum"])
    kinds = schema.get("type", "anything")
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    return " or ".join([*names, *(["null"] if schema.get("nullable") else [])])


@functools.lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    return Draft202012Validator(_strict(json.loads(schema)))


def _strict(schema: Any) -> Any:
    """The same schema with ``nullable``, which is OpenAPI's, said as JSON Schema says it."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items() if key not in ("nullable", "description", "enum")}
    if "enum" in schema:
        made["enum"] = schema["enum"]
    if not schema.get("nullable"):
        return made
    if "enum" in made or "type" not in made:
        return {"anyOf": [made, {"type": "null"}]} if made else {}
    kinds = made["type"]
    return {**made, "type": [*([kinds] if isinstance(kinds, str) else kinds), "null"]}


def _fitted(value: Any, hint: Any) -> Any:
    """A value of JSON that fits a hint, as the type that the hint says: 2.0 as an int, a list as a tuple, an Enum."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        others = [one for one in options if one is not NoneType]
        return _fitted(value, others[0]) if value is not None and len(others) == 1 else value
    if hint is int and isinstance(value, float):
        return int(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if origin is tuple and options and isinstance(value, list):
        return tuple(_fitted(one, kind) for one, kind in zip(value, options, strict=False))
    if origin is list and options and isinstance(value, list):
        return [_fitted(one, options[0]) for one in value]
    if origin is dict and len(options) == 2 and isinstance(value, dict):
        return {key: _fitted(one, options[1]) for key, one in value.items()}
    return value
