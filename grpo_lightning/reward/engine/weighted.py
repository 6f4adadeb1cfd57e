"""A reward function with its settings."""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_lightning.allowed import Rule, flag, integer, is_pair, number, problems
from grpo_lightning.output.terminal import one_line
from grpo_lightning.schedule import Schedule

Score = float | tuple[tuple[int, float], ...] | None
"""What a completion gets: a number, (end, score) pairs of its steps, or None where the reward does not apply."""
Reward = Callable[..., Sequence[Score]]
"""``reward(prompts, completions, **columns)``, the signature of TRL, which returns a score per completion."""


RULES = {
    "weight": number(math.isfinite, "a finite number"),
    "timeout": number(lambda v: v > 0, "seconds > 0", null=True),
    "max_failed": number(lambda v: 0 <= v <= 1, "a fraction from 0 to 1"),
    "failed_score": number(math.isfinite, "a finite number", null=True),
    "retries": integer(0),
    "concurrency": integer(1),
    "clip": Rule(lambda v: is_pair(v) and v[0] <= v[1], "[lowest, highest]", null=True),
    "messages": flag(),
}
"""What each setting of a reward may be."""

ARGUMENTS = ("prompts", "completions", "completion_ids")


class RewardError(ValueError):
    """A reward function that cannot be called, raises, or returns something else than scores.

    Args:
        message: What happened; control characters, which a function's own texts may hold, become escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True)
class Weighted:
    """A reward function, its weight in the total, and how it is called.

    Raises:
        ValueError: On construction, naming the field: ``function`` is not callable, or a number is out of range.
    """

    function: Reward
    weight: float | Schedule
    """Factor of the score in the total; negative for a penalty, 0 to watch a reward without training on it."""
    clip: Sequence[float] | None = None
    """The [lowest, highest] score that enters the total; others are cut to these."""
    timeout: float | None = None
    """Seconds that a worker process has for one completion; None: all are scored together, in this process. A coroutine
    function has them for one try, and runs in this process in any case."""
    max_failed: float = 0.5
    """The largest fraction of the completions that may time out, raise or break their worker."""
    failed_score: float | None = 0.0
    """The score of those completions; None: the reward does not apply to them."""
    retries: int = 0
    """How often a coroutine function that failed on a completion is called for it again."""
    concurrency: int = 16
    """The most calls of a coroutine function at a time, in each process."""
    messages: bool = False
    """Whether prompts and completions are handed over as lists of chat messages, as TRL does for chat prompts."""

    @property
    def factor(self) -> float:
        """The weight as a number.

        Raises:
            TypeError: The weight varies; `grpo_lightning.schedule.resolve_schedules` gives its value in a step.
        """
        if isinstance(self.weight, Schedule):
            raise TypeError(f"weight: {self.weight} varies; take its value of a step first")
        return float(self.weight)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"function: expected a callable (`_partial_: true` in YAML), got {self.function!r}")
        fixed = {name: value for name, value in vars(self).items() if not isinstance(value, Schedule)}
        if wrong := problems(RULES, fixed):
            raise ValueError("; ".join(wrong))
        if self.retries and not is_coroutine(self.function):
            raise ValueError(
                f"retries={self.retries}: allowed is 0 for {self.function!r:.80}, which is no coroutine function "
                "(async def)"
            )


class PerCompletion:
    """A reward made of a function that scores one completion at a time.

    ``function(completion, **columns) -> float | None`` takes the text as its first argument, whatever its name, and by
    name the row's ``prompt`` and columns: those it names, or all of them if it has ``**kwargs``. Where the reward has
    ``messages``, the completion and the ``prompt`` are lists of chat messages. A coroutine function (``async def``) is
    called likewise, and awaited by who scores.

    Raises:
        ValueError: On construction, if ``function`` does not take the completion as its first argument.
    """

    def __init__(self, function: Callable[..., float | None]) -> None:
        self.function = function
        first, *others = inspect.signature(function).parameters.values()
        self._first = first.name  # a column of this name would be the completion a second time
        if first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
            raise ValueError(f"function: expected the completion as its first argument, got {function!r}")
        batch = [inspect.Parameter("completions", first.KEYWORD_ONLY)]
        for parameter in others:
            kind = parameter.kind if parameter.kind is parameter.VAR_KEYWORD else parameter.KEYWORD_ONLY
            name = "prompts" if parameter.name == "prompt" else parameter.name
            batch.append(parameter.replace(name=name, kind=kind))
        self.__signature__ = inspect.Signature(batch)

    def __call__(self, *, completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
        _, passed = arguments(self, columns)
        named = {"prompt" if name == "prompts" else name: values for name, values in passed.items()}
        named.pop(self._first, None)
        return [
            self.function(completion, **{name: values[row] for name, values in named.items()})
            for row, completion in enumerate(completions)
        ]


def arguments(function: Callable[..., Any], known: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """What a call of ``function`` lacks and what it takes, by its signature.

    Args:
        function: A reward function.
        known: The arguments that there are, by name.

    Returns:
        The required parameters that are not known, and the known arguments that it takes.
    """
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {parameter.name: parameter for parameter in parameters if parameter.kind not in variable}
    bound = bound_arguments(function)
    known = {name: value for name, value in known.items() if name not in bound}
    missing = [name for name, parameter in named.items() if parameter.default is parameter.empty and name not in known]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return missing, {name: value for name, value in known.items() if takes_all or name in named}


def bound_arguments(function: Any) -> Collection[str]:
    """The names of the arguments that a partial has bound, which no column of the data replaces."""
    if isinstance(function, PerCompletion):
        function = function.function
    return function.keywords if isinstance(function, partial) else ()


def is_coroutine(function: Callable[..., Any]) -> bool:
    """Whether ``function``, or what a partial or a `PerCompletion` calls, is an ``async def``."""
    called = innermost(function)
    return inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__)


def innermost(function: Any) -> Any:
    """What a partial or a `PerCompletion` calls in the end."""
    while isinstance(function, partial | PerCompletion):
        function = function.func if isinstance(function, partial) else function.function
    return function
