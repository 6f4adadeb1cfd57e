"""An environment of tools: functions that the model calls by name, whose results it is told."""

import copy
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lightning.config.rules import integer, problems
from grpo_lightning.environment.answer import BadCall
from grpo_lightning.environment.tools.calls import Call, Malformed, calls
from grpo_lightning.environment.tools.schema import Tool

__all__ = ["Over", "Tools"]

RULES = {"max_calls": integer(1), "max_result": integer(100)}
"""What each setting may be."""
_SHOWN = 300  # characters of an exception's message
_PATH = re.compile(r"(?<![\w/:.])~?(?:/[^\s/'\":,;()]+){2,}/?")
"""Absolute paths with at least two parts, which say more of the machine than of the call."""


@dataclass(frozen=True)
class Over:
    """What a tool returns to end the episode: ``return Over(1.0)``."""

    score: float | None = None
    """The environment's score of the last turn; None: it has none, and the rewards judge that turn."""


class Tools:
    """An environment in which the model calls functions, and is told what they return.

    A turn with calls is replied to with their results, one below the other; a turn without ends the episode, and the
    rewards judge it. What cannot be carried out (JSON that cannot be read, a tool that is not there, arguments that are
    missing, unknown or of another type, a tool that raises an exception) is replied to with what is wrong and what is
    allowed, and counted as a bad call. No text of a model makes this raise.

    Only the calls of the last turn are carried out: a tool is a function of its arguments, and keeps nothing between
    two calls. What it needs of the row it names as a parameter that ``columns`` lists. It returns a text, or anything
    that JSON can hold; `grpo_lightning.environment.BadCall` for a request that it refuses; `Over` to end the episode.

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
    """Who replies."""

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        *,
        columns: Sequence[str] = (),
        max_calls: int = 8,
        max_result: int = 2000,
    ) -> None:
        if wrong := problems(RULES, {"max_calls": max_calls, "max_result": max_result}):
            raise ValueError("; ".join(wrong))
        if not isinstance(tools, list | tuple) or not tools:
            raise ValueError(f"tools: expected a list of functions, such as [my_tools.search], got {tools!r:.80}")
        if not isinstance(columns, list | tuple) or not all(isinstance(name, str) for name in columns):
            raise ValueError(f"columns: expected a list of names, got {columns!r:.80}")
        made = [Tool.of(one, columns) for one in tools]
        names = [one.name for one in made]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tools: expected functions of different names, got {', '.join(twice)} more than once")
        if unused := [name for name in columns if not any(name in one.hidden for one in made)]:
            raise ValueError(f"columns: expected names of parameters of {', '.join(names)}, got {', '.join(unused)}")
        self._by_name = {one.name: one for one in made}
        self._max_calls, self._max_result = max_calls, max_result
        self.tools = [copy.deepcopy(one.schema) for one in made]  # templates are given these, which may change them
        """The JSON schemas that the chat template shows."""
        self.__signature__ = _signature(made)

    def __call__(self, *, turns: Sequence[str], **row: Any) -> str | float | None:
        """What the calls in the last turn come to.

        Args:
            turns: What the model has said so far; the last is new.
            **row: What ``columns`` lists.

        Returns:
            The results, None if the turn has no calls, or what `Over` says.
        """
        replies: list[str] = []
        for call in calls(turns[-1], most=self._max_calls):
            told = self._told(call, {"turns": turns, **row})
            if isinstance(told, Over):
                return told.score
            replies.append(told)
        if not replies:
            return None
        kind = BadCall if any(isinstance(one, BadCall) for one in replies) else str
        return kind("\n".join(replies))

    def _told(self, call: Call | Malformed, row: Mapping[str, Any]) -> str | Over:
        """What the model is told of a call."""
        try:
            if isinstance(call, Malformed):
                raise call
            tool = self._by_name.get(call.name)
            if tool is None:
                raise Malformed(f"there is no tool {call.name!r:.50}; allowed: {', '.join(self._by_name)}")
            given = tool.arguments(call.arguments)
            result = tool.function(**given, **{name: row[name] for name in tool.hidden if name in row})
            return result if isinstance(result, Over) else self._reply(result)
        except Malformed as error:
            return BadCall(f"error: {error}")
        except (Exception, SystemExit) as error:
            return BadCall(f"error: {call.name}: {_message(error)}")  # type: ignore[union-attr]

    def _reply(self, result: Any) -> str:
        """A result as text, and as a bad call where the tool says so."""
        text = _cut(_as_text(result), self._max_result)
        return BadCall(text) if isinstance(result, BadCall) else text


def _signature(tools: Sequence[Tool]) -> inspect.Signature:
    """Of the turns, and of what the tools need of the row."""
    kind = inspect.Parameter.KEYWORD_ONLY
    needed = {name: inspect.Parameter.empty for one in tools for name in one.hidden if name not in one.optional}
    known = {"turns": inspect.Parameter.empty} | {name: None for one in tools for name in one.optional} | needed
    return inspect.Signature([inspect.Parameter(name, kind, default=default) for name, default in known.items()])


def _as_text(result: Any) -> str:
    """A text as it is, anything else in JSON.

    Raises:
        TypeError: JSON cannot hold it.
        ValueError: It holds itself, or a number with too many digits.
    """
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_plain)
    return text.encode(errors="replace").decode()


def _plain(value: Any) -> Any:
    """What JSON has no word for: arrays and numbers of numpy and torch, and sets."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"it returned a value of type {type(value).__name__}, which JSON cannot hold")


def _cut(text: str, most: int) -> str:
    """The beginning of a text that is too long, and a word that it was cut."""
    return text if len(text) <= most else f"{text[:most]}… (cut: {most} of {len(text)} characters)"


def _message(error: BaseException) -> str:
    """An exception in one line, without paths of this machine."""
    try:
        said = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
    except Exception:  # an exception that cannot even be written
        said = ""
    line = " ".join(_PATH.sub("(path)", said.encode(errors="replace").decode()[: 4 * _SHOWN]).split())
    return f"{type(error).__name__}: {line[:_SHOWN]}" if line else type(error).__name__
