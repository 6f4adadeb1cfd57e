"""Environment of tools: functions that the model calls by name, and whose results are the reply."""

import copy
import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, get_origin, get_type_hints

from grpo_lightning.config.rules import integer, problems
from grpo_lightning.environment.base import BadCall
from grpo_lightning.reward.accuracy import strip_thoughts
from grpo_lightning.reward.spec import describe_error

_RULES = {"max_calls": integer(1), "max_result": integer(100)}
_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_FORM = 'a call is {"name": NAME, "arguments": {...}}'
_MAX_CALL = 20_000  # characters
_WHOLE = re.compile(r'\{(?=.*"name")(?=.*"(?:parameters|arguments)").*\}', re.DOTALL)
"""A turn that is a call as a whole."""


@dataclass(frozen=True)
class Call:
    """What the model asks for: ``Call("add", {"a": 1, "b": 2})``."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class EndEpisode:
    """What a tool returns to end the episode: ``return EndEpisode(1.0)``."""

    score: float | None = None
    """The environment's score of the last turn; None: it has none, and the rewards judge that turn."""


class Tools:
    """Environment in which the model calls functions, and reads what they return.

    A turn with calls gets their results as a reply, one below the other; a turn without ends the episode, and the
    rewards judge it. A call that cannot be carried out gets a reply that says what is wrong, and is counted as a bad
    call. Only the calls of the last turn are carried out: a tool is a function of its arguments, and keeps nothing
    between two calls. What it needs of the row it names as a parameter that ``columns`` lists. It returns a text, or
    anything that JSON can hold; `grpo_lightning.environment.BadCall` for a request that it refuses; `EndEpisode` to end
    the episode.

    Args:
        tools: Functions with type hints and a docstring that describes their arguments, of different names.
        columns: Parameters of theirs that come from the row: its columns, ``prompt``, ``turns``, ``replies`` or
            ``rng``. The model does not see them.
        max_calls: The most calls of one turn that are carried out.
        max_result: The most characters of a result; longer ones are cut, and the model is told so.

    Raises:
        ValueError: On construction: a function cannot be a tool, or a setting is out of range.
    """

    role = "tool"
    """Role of the replies."""

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        *,
        columns: Sequence[str] = (),
        max_calls: int = 8,
        max_result: int = 2000,
    ) -> None:
        if errors := problems(_RULES, {"max_calls": max_calls, "max_result": max_result}):
            raise ValueError("; ".join(errors))
        if not isinstance(tools, list | tuple) or not tools:
            raise ValueError(f"tools: expected a list of functions, such as [my_tools.search], got {tools!r:.80}")
        all_tools = [_Tool.from_function(function, columns) for function in tools]
        self._by_name = {tool.name: tool for tool in all_tools}
        if len(self._by_name) < len(all_tools):
            raise ValueError(f"tools: expected different names, got {', '.join(tool.name for tool in all_tools)}")
        if unused := set(columns).difference(*(tool.hidden for tool in all_tools)):
            raise ValueError(f"columns: no tool has the parameter {', '.join(unused)}")
        self._max_calls, self._max_result = max_calls, max_result
        self.tools = [copy.deepcopy(tool.schema) for tool in all_tools]  # a chat template may change what it is given
        """The JSON schemas that the chat template shows."""
        names = dict.fromkeys(["turns", *columns])
        self.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])

    def __call__(self, *, turns: Sequence[str], **row: Any) -> str | float | None:
        """Carry out the calls in the last turn; ``row`` has what ``columns`` lists; None without calls."""
        replies: list[str] = []
        for call in calls(turns[-1], limit=self._max_calls):
            result = call if isinstance(call, BadCall) else self._result(call, {"turns": turns, **row})
            if isinstance(result, EndEpisode):
                return result.score
            replies.append(result)
        if not replies:
            return None
        kind = BadCall if any(isinstance(reply, BadCall) for reply in replies) else str
        return kind("\n".join(replies))

    def _result(self, call: Call, row: Mapping[str, Any]) -> str | EndEpisode:
        if (tool := self._by_name.get(call.name)) is None:
            return BadCall(f"error: there is no tool {call.name!r:.50}; there are {', '.join(self._by_name)}")
        if problem := tool.problem(call.arguments):
            return BadCall(f"error: {problem}")
        try:
            result = tool.function(**tool.coerce_arguments(call.arguments), **{name: row[name] for name in tool.hidden})
            if isinstance(result, EndEpisode):
                return result
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_to_json)
        except (Exception, SystemExit) as error:
            return BadCall(f"error: {call.name}: {describe_error(error)}")
        if len(text) > self._max_result:
            text = f"{text[: self._max_result]}… (cut: {self._max_result} of {len(text)} characters)"
        return BadCall(text) if isinstance(result, BadCall) else str(text)


@dataclass(frozen=True)
class _Tool:
    """A function that the model may call."""

    function: Callable[..., Any]
    name: str
    schema: Mapping[str, Any]
    """As chat templates show it: type, and function with name, description and parameters."""
    hidden: Collection[str]
    """Its parameters that come from the row, and not from the model."""
    shown: Mapping[str, Any]
    """Its other parameters -> type hint."""

    @classmethod
    def from_function(cls, function: Any, columns: Collection[str]) -> "_Tool":
        """A function, a method, or a `functools.partial` of one, whose bound arguments the model does not see."""
        inner, bound = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
        if not inspect.isroutine(inner) or inspect.iscoroutinefunction(inner) or inspect.isgeneratorfunction(inner):
            raise ValueError(f"tools: expected plain functions, such as my_tools.search, got {function!r:.80}")
        parameters = [p for p in inspect.signature(inner).parameters.values() if p.name not in bound]
        shown = [p for p in parameters if p.name not in columns]
        try:
            hints = get_type_hints(inner)
            schema = _schema(inner, shown, hints)
        except Exception as error:  # whatever evaluating an annotation raises
            raise ValueError(
                f"tools: {inner.__name__}: {error} (a tool needs type hints, and a docstring with a section `Args:`; "
                "what comes from the row stands in `columns`)"
            ) from error
        hidden = [p.name for p in parameters if p.name in columns]
        return cls(function, inner.__name__, schema, hidden, {p.name: hints.get(p.name, Any) for p in shown})

    def problem(self, values: Mapping[str, Any]) -> str | None:
        """What is wrong with the model's arguments, for the model to read; None: they fit the schema."""
        from jsonschema import Draft202012Validator

        schema = {**_to_json_schema(self.schema["function"]["parameters"]), "additionalProperties": False}
        errors = [
            f"{error.json_path.removeprefix('$.')}: {error.message:.200}".removeprefix("$: ")
            for error in Draft202012Validator(schema).iter_errors(dict(values))
        ]
        usage = ", ".join(f"{name}: {inspect.formatannotation(hint)}" for name, hint in self.shown.items())
        return f"{'; '.join(errors[:5])}; the tool is {self.name}({usage})"[:1000] if errors else None

    def coerce_arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments as JSON holds them, but for those whose type hint is an Enum or a tuple."""
        kinds = {name: get_origin(hint) or hint for name, hint in self.shown.items()}
        is_made = {name: isinstance(kind, type) and issubclass(kind, Enum | tuple) for name, kind in kinds.items()}
        return {name: kinds[name](value) if is_made[name] else value for name, value in values.items()}


def _schema(function: Any, shown: Sequence[inspect.Parameter], hints: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that transformers makes of a function, without the parameters that the model does not see."""
    # It needs torch, and workers do not: they are given what it returns.
    from transformers.utils.chat_template_utils import get_json_schema

    def visible() -> None: ...

    visible.__name__, visible.__doc__ = function.__name__, inspect.getdoc(function)
    visible.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    names = [*(parameter.name for parameter in shown), "return"]
    visible.__annotations__ = {name: hints[name] for name in names if name in hints}
    schema: dict[str, Any] = get_json_schema(visible)
    schema["function"]["parameters"].setdefault("properties", {})
    return schema


def _to_json_schema(schema: Any) -> Any:
    """A schema of transformers as JSON Schema has it, which knows no ``nullable``."""
    if isinstance(schema, list):
        return [_to_json_schema(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {key: _to_json_schema(part) for key, part in schema.items()}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


def _to_json(value: Any) -> Any:
    """What JSON has no type for: arrays and numbers of numpy and torch become lists and numbers, others texts."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _number(text: str) -> int | float:
    """A number of JSON: 2.0 is an integer there, and NaN is none."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.20} is no finite number")
    return int(value) if value.is_integer() else value


def calls(turn: str, *, limit: int) -> list[Call | BadCall]:
    """Read the tool calls in a turn, outside of its thoughts. The text is untrusted: none of it raises or takes long.

    A call stands between ``<tool_call>`` and ``</tool_call>``, as in the templates of Hermes and Qwen:
    ``<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>``. A turn that is such an object as a whole,
    with "parameters" or "arguments", is a call as well, as Llama 3 writes it.

    Args:
        turn: The model's text.
        limit: Calls that are read; further ones are one `BadCall`, as every call is that cannot be read.
    """
    text = strip_thoughts(turn)
    found: list[Call | BadCall] = []
    start = text.find(_OPENING)
    while start >= 0:
        end = text.find(_CLOSING, start)
        if len(found) == limit:
            found.append(BadCall(f"error: too many calls in one turn; only the first {limit} were carried out"))
            break
        if end < 0:
            found.append(BadCall(f"error: the call has no end; {_FORM} between {_OPENING} and {_CLOSING}"))
            break
        found.append(_call(text[start + len(_OPENING) : end]))
        start = text.find(_OPENING, end)
    if not found and _WHOLE.fullmatch(text):
        found.append(_call(text))
    return found


def _call(text: str) -> Call | BadCall:
    if len(text) > _MAX_CALL:
        return BadCall(f"error: the call has {len(text)} characters; the limit is {_MAX_CALL}")
    try:
        call = json.loads(text, parse_float=_number, parse_constant=_number)
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(name, str) else None
        if isinstance(arguments, str):  # some models write the arguments as a text in JSON
            arguments = json.loads(arguments, parse_float=_number, parse_constant=_number)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return BadCall(f"error: the call is not valid JSON: {reason}; {_FORM}")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return BadCall(f"error: the call has no {'arguments' if isinstance(name, str) else 'name'}; {_FORM}")
    return Call(name, arguments)
