"""Reading the tool calls in what a model has said. Its text is untrusted: none of it raises or takes long."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from grpo_lightning.reward.text import without_thoughts

FORM = '{"name": NAME, "arguments": {...}}'
"""How a call is written."""
LONGEST = 20_000
"""Characters of one call, at most."""
_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_DEEPEST = 32  # mappings and lists in one another, of a call
_MOST_DIGITS = 40  # of a number


@dataclass(frozen=True)
class Call:
    """What the model asks for: ``Call("add", {"a": 1, "b": 2})``."""

    name: str
    arguments: Mapping[str, Any]
    """Name -> a value of JSON; all numbers are finite, and all texts can be written as UTF-8."""


class Malformed(ValueError):
    """A call that cannot be read; its message is meant for the model."""


def calls(turn: str, *, most: int) -> list[Call | Malformed]:
    """The calls of a turn in their order; none in its thoughts.

    A call stands between ``<tool_call>`` and ``</tool_call>``, as in the templates of Hermes and Qwen:
    ``<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>``. A turn that is such an object as a whole,
    with "parameters" or "arguments", is a call as well, as Llama 3 writes it.

    Args:
        turn: What the model has said.
        most: Calls that are read; of further ones there is one `Malformed` that says so.
    """
    text = without_thoughts(turn)
    found: list[Call | Malformed] = []
    start = text.find(_OPENING)
    while start >= 0:
        if len(found) == most:
            found.append(Malformed(f"too many calls in one turn; allowed are {most}, others were not carried out"))
            break
        end = text.find(_CLOSING, start)
        if end < 0:
            found.append(Malformed(f"the call has no end; a call is {FORM} between <tool_call> and </tool_call>"))
            break
        found.append(_call(text[start + len(_OPENING) : end]))
        start = text.find(_OPENING, end)
    if not found and (whole := _whole(text)):
        found.append(whole)
    return found


def _call(text: str) -> Call | Malformed:
    try:
        return _named(_value(text))
    except Malformed as error:
        return error


def _whole(text: str) -> Call | Malformed | None:
    """The call that a turn is as a whole; None where it is something else, such as an answer in JSON."""
    if not (text.startswith("{") and text.endswith("}")):
        return None
    try:
        value = _value(text)
    except Malformed as error:
        return error if '"name"' in text and ('"parameters"' in text or '"arguments"' in text) else None
    is_call = isinstance(value.get("name"), str) and ("parameters" in value or "arguments" in value)
    return _call(text) if is_call else None


def _named(value: Any) -> Call:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise Malformed(f"the call has no name; a call is {FORM}")
    given = value.get("arguments", value.get("parameters", {}))
    if isinstance(given, str):  # some models write the arguments as a text in JSON
        given = _value(given)
    if not isinstance(given, dict):
        raise Malformed(f"the arguments of a call are a JSON object; a call is {FORM}")
    return Call(name, given)


def _value(text: str) -> Any:
    """A value of JSON.

    Raises:
        Malformed: It is none, or one that no tool should be given.
    """
    if len(text) > LONGEST:
        raise Malformed(f"the call has {len(text)} characters; allowed are {LONGEST}")
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_whole_number, parse_float=_number
        )
    except Malformed:
        raise
    except json.JSONDecodeError as error:
        raise Malformed(
            f"the call is not valid JSON: {error.msg} at character {error.pos + 1}; a call is {FORM}"
        ) from None
    except RecursionError:
        raise Malformed(f"the call is nested too deeply; allowed are {_DEEPEST} levels") from None
    _check_parts(value)
    return value


def _check_parts(value: Any) -> None:
    """Refuse what is nested too deeply, and halves of surrogate pairs, which JSON can escape and nobody can write."""
    left = [(value, 1)]
    while left:
        one, depth = left.pop()
        if depth > _DEEPEST:
            raise Malformed(f"the call is nested too deeply; allowed are {_DEEPEST} levels")
        if isinstance(one, dict):
            left += [(part, depth + 1) for pair in one.items() for part in pair]
        elif isinstance(one, list):
            left += [(part, depth + 1) for part in one]
        elif isinstance(one, str) and not _is_text(one):
            raise Malformed("the call holds half of a surrogate pair, which is no character")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise Malformed("the call names a key twice in one object; allowed is once")
    return made


def _constant(name: str) -> NoReturn:
    raise Malformed(f"the call holds {name}; allowed are finite numbers")


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise Malformed(f"the call holds a number of {len(digits)} digits; allowed are {_MOST_DIGITS}")
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise Malformed("the call holds a number that is too large; allowed are those below 1e308")
    return number
