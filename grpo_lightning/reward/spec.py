"""A reward function with its settings: what it is called with, what it returns, and its part in the total."""

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

from grpo_lightning.config.rules import REWARD, problems
from grpo_lightning.console import redact, single_line
from grpo_lightning.schedule import Schedule

Score = float | tuple[tuple[int, float], ...] | None
"""What a completion gets: a number, (end, score) pairs of its steps, or None where the reward does not apply."""
Reward = Callable[..., Sequence[Score]]
"""``reward(prompts, completions, **columns)``, the signature of TRL, which returns a score per completion."""
ARGUMENTS = ("prompts", "completions", "completion_ids")
"""What every reward may name beside the columns of the data, and, with a default, ``prefills``."""

_LARGEST = 1e15  # of a weighted score: the float32 squares of larger ones overflow in an advantage's deviation
_MAX_NESTED = 3  # lists in one another: of completions, of steps, of (end, score)
_SHOWN_CHARACTERS = 300


class RewardError(ValueError):
    """A reward function cannot be called, raises, or returns something else than scores.

    Control characters in its message are escaped.
    """

    def __init__(self, message: str, *, row: int | None = None) -> None:
        super().__init__(single_line(message))
        self.row = row
        """Which of the completions it is about."""
        self.inputs: Mapping[str, Any] | None = None
        """The prompt and the columns of that row."""


class PermanentError(Exception):
    """A call of a coroutine has failed, and is not made again: every other try would fail, too."""


@dataclass(frozen=True)
class Failure:
    """Result of a failed call, in a worker process or of a coroutine."""

    kind: str
    """What happened: timeout, exception or crash; of environments also reply, which the policy cannot read."""
    message: str


@dataclass(frozen=True)
class RewardSpec:
    """A reward function, its weight in the total, and how it is called.

    Raises:
        ValueError: On construction, naming the field: ``function`` is not callable, or a number is out of range.
    """

    function: Reward
    weight: float | Schedule
    """Factor of the score in the total; negative for a penalty, 0 to log a reward without training on it."""
    clip: Sequence[float] | None = None
    """The [lowest, highest] score that enters the total; others are clipped to these."""
    timeout: float | None = None
    """Seconds for one completion, in a worker process (of a coroutine for one try, in this process); None: all are
    scored together, in this process."""
    max_failed: float = 0.5
    """The largest fraction of the completions that may time out, raise or break their worker."""
    failed_score: float | None = 0.0
    """The score of those completions; None: the reward does not apply to them."""
    retries: int = 0
    """How often a coroutine function that failed on a completion is called for it again."""
    concurrency: int = 16
    """The most calls of a coroutine function at a time, in each process."""
    messages: bool = False
    """Whether prompts and completions are passed as lists of chat messages, as TRL does for chat prompts."""

    @property
    def takes_messages(self) -> bool:
        """``messages``, or that the function's annotation of completions has dicts and no other texts, as TRL's do."""
        completions = inspect.signature(self.function).parameters.get("completions")
        other = re.subn(r"dict\[[^\]]*\]", "", str(getattr(completions, "annotation", "")).lower())
        return self.messages or (other[1] > 0 and "str" not in other[0])

    @property
    def factor(self) -> float:
        """The weight as a number; a TypeError if it is scheduled, see `grpo_lightning.schedule.resolve_schedules`."""
        if isinstance(self.weight, Schedule):
            raise TypeError(f"weight: {self.weight} varies; take its value of a step first")
        return float(self.weight)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"function: expected a callable (`_partial_: true` in YAML), got {self.function!r}")
        if isinstance(innermost(self.function), type):
            raise ValueError(f"function: {self.function!r} is a class; give an object of it (`_partial_: false`)")
        fixed = {name: value for name, value in vars(self).items() if not isinstance(value, Schedule)}
        if wrong := problems(REWARD, fixed):
            raise ValueError("; ".join(wrong))
        if self.retries and not is_coroutine_function(self.function):
            raise ValueError(f"retries={self.retries} needs a coroutine (async def), got {self.function!r:.80}")


class PerCompletion:
    """A reward made of a function that scores one completion at a time.

    ``function(completion, **columns) -> float | None`` takes the text as its first argument, whatever its name, and by
    name the row's ``prompt`` and columns: those it names, or all of them if it has ``**kwargs``.
    """

    def __init__(self, function: Callable[..., float | None]) -> None:
        self.function = function
        first, *others = inspect.signature(function).parameters.values()
        self._first = first.name  # a column of this name would be the completion a second time
        batch = [inspect.Parameter("completions", first.KEYWORD_ONLY, annotation=first.annotation)]
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
    """Match known arguments with a function's signature.

    Returns:
        The required parameters that are not known, and the known arguments that it takes: all if it has ``**kwargs``,
        and never one that a partial has bound.
    """
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {parameter.name: parameter for parameter in parameters if parameter.kind not in variable}
    called = function.function if isinstance(function, PerCompletion) else function
    bound: Collection[str] = called.keywords if isinstance(called, partial) else ()
    known = {name: value for name, value in known.items() if name not in bound}
    missing = [name for name, parameter in named.items() if parameter.default is parameter.empty and name not in known]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return missing, {name: value for name, value in known.items() if takes_all or name in named}


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether ``function``, or what a partial or a `PerCompletion` calls, is an ``async def``."""
    called = innermost(function)
    return inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__)


def innermost(function: Any) -> Any:
    """What a partial or a `PerCompletion` calls in the end."""
    while isinstance(function, partial | PerCompletion):
        function = function.func if isinstance(function, partial) else function.function
    return function


def is_missing(value: Any) -> bool:
    """Whether a value of a column is None, or NaN, which pandas writes for it."""
    return value is None or (isinstance(value, Real) and value != value)


def applies(name: str, rewards: Sequence[str] | None) -> bool:
    """Whether a reward scores a row whose column ``data_rewards``, of a mixture of data, is ``rewards``."""
    return rewards is None or name in rewards


def score_rows(score: Callable[..., Any], completions: Sequence[Any], *columns: Sequence[Any]) -> list[Any]:
    """``score(completion, *values)`` of each row; None where a value is missing."""
    return [
        None if any(map(is_missing, values)) else score(completion, *values)
        for completion, *values in zip(completions, *columns, strict=True)
    ]


def scalar(value: Score) -> float | None:
    """A score as one number: the mean over the steps where it has steps, None where it has none."""
    if isinstance(value, tuple):
        return sum(step for _, step in value) / len(value) if value else None
    return value


def clip_scores(rewards: Mapping[str, RewardSpec], values: Mapping[str, Sequence[Score]]) -> dict[str, list[Score]]:
    """Clip each score, or that of each step, to its reward's ``clip``: [B] scores by name, as they enter the total."""

    def clip(value: Score, limits: Sequence[float] | None) -> Score:
        if limits is None or value is None:
            return value
        if isinstance(value, tuple):
            return tuple((end, min(max(step, limits[0]), limits[1])) for end, step in value)
        return min(max(value, limits[0]), limits[1])

    return {name: [clip(value, rewards[name].clip) for value in scores] for name, scores in values.items()}


def total(rewards: Mapping[str, RewardSpec], scores: Mapping[str, Sequence[Score]]) -> list[float | None]:
    """The total reward [B], Σ weight · score over the rewards that apply to a row; None where none does.

    Where a reward scores steps, their mean is its score. A RewardError names the rewards whose scores are too large.
    """
    totals: list[float | None] = []
    for row, values in enumerate(zip(*scores.values(), strict=True)):
        named = {name: scalar(value) for name, value in zip(scores, values, strict=True)}
        terms = {name: rewards[name].factor * value for name, value in named.items() if value is not None}
        totals.append(sum(terms.values()) if terms else None)
        for name, term in terms.items():
            if abs(term) > _LARGEST:
                problem = f"weight · score is {term:g} on row {row}, above {_LARGEST:g}: set reward.{name}.clip"
                raise RewardError(f"reward {name!r}: {problem}", row=row)
    return totals


def to_plain(value: Any, nested: int = _MAX_NESTED) -> Any:
    """What a reward function returned, as lists and numbers; inside, a tensor of one number becomes that number."""
    if hasattr(value, "tolist"):  # of torch, numpy and others, of which none is imported here
        listed = value.tolist()
        while nested < _MAX_NESTED and isinstance(listed, list) and len(listed) == 1:
            listed = listed[0]
        # Row by row, since a row of one number counts as that number.
        value = value if nested == _MAX_NESTED and isinstance(listed, list) else listed
    if nested == 0 or not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        return value
    return [to_plain(item, nested - 1) for item in value]


def describe_error(error: BaseException) -> str:
    """An exception's type and the beginning of its text, on one line and without secrets."""
    return single_line(redact(f"{type(error).__name__}: {error}")[:_SHOWN_CHARACTERS])
