"""Rewards: functions of prompts, completions and data columns that give each completion a finite number or None."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsFloat

if TYPE_CHECKING:  # batch imports torch, which rewards, and the process some verifiers run in, can do without
    from grpo_lightning.batch import Prompt

Reward = Callable[..., Sequence[float | None]]
"""``reward(prompts, completions, **columns)``, TRL's signature: one number, or None where it does not apply, each."""

_ARGUMENTS = ("prompts", "completions")
_SHOWN_CHARACTERS = 80


class RewardError(ValueError):
    """A reward function that cannot be called, raises, or returns something else than scores."""


@dataclass(frozen=True)
class Weighted:
    """A reward and its share of the total.

    Raises:
        ValueError: On construction, if ``function`` is not callable or ``weight`` is not a finite number.
    """

    function: Reward
    weight: float
    """Factor of the score in the total; negative for a penalty, 0 to watch a reward without training on it."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"function: expected a callable (`_partial_: true` in YAML), got {self.function!r}")
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not math.isfinite(self.weight):
            raise ValueError(f"weight: expected a finite number, got {self.weight!r}")


class PerCompletion:
    """A reward made of a function that scores one completion at a time.

    ``function(completion, **columns) -> float | None`` takes the text as its first argument, whatever its name, and by
    name the row's ``prompt`` and columns: those it names, or all of them if it has ``**kwargs``.

    Raises:
        ValueError: On construction, if ``function`` does not take the completion as its first argument.
    """

    def __init__(self, function: Callable[..., float | None]) -> None:
        self.function = function
        first, *others = inspect.signature(function).parameters.values()
        if first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
            raise ValueError(f"function: expected the completion as its first argument, got {function!r}")
        batch = [inspect.Parameter("completions", first.KEYWORD_ONLY)]
        for parameter in others:
            kind = parameter.kind if parameter.kind is parameter.VAR_KEYWORD else parameter.KEYWORD_ONLY
            name = "prompts" if parameter.name == "prompt" else parameter.name
            batch.append(parameter.replace(name=name, kind=kind))
        self.__signature__ = inspect.Signature(batch)

    def __call__(self, *, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        _, passed = _arguments(self, columns)
        named = {"prompt" if name == "prompts" else name: values for name, values in passed.items()}
        return [
            self.function(text, **{name: values[row] for name, values in named.items()})
            for row, text in enumerate(completions)
        ]


def check_columns(rewards: Mapping[str, Weighted], column_names: Collection[str]) -> None:
    """Nothing, if every reward can be called with these columns; needs no data, so a run can check it first.

    Raises:
        RewardError: No rewards, a column named like an argument, a function whose signature cannot be read, or required
            parameters that are no column: all of the problems, with the rewards and the columns there are.
    """
    problems = [] if rewards else ["reward: expected at least one, got none"]
    problems += [f"column {name!r} has the name of a reward's argument" for name in _ARGUMENTS if name in column_names]
    known = dict.fromkeys((*_ARGUMENTS, *column_names), ())
    for name, weighted in rewards.items():
        try:
            missing = _arguments(weighted.function, known)[0]
        except (TypeError, ValueError) as error:
            problems.append(f"reward {name!r}: its signature cannot be read: {error}")
            continue
        problems += [
            f"reward {name!r}: parameter {parameter!r} is no column of the data; there are {sorted(column_names)}"
            for parameter in missing
        ]
    if problems:
        raise RewardError("; ".join(problems))


def score(
    rewards: Mapping[str, Weighted],
    prompts: "Sequence[Prompt]",
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> dict[str, list[float | None]]:
    """What each reward gives each completion.

    A function is called once, with all rows, and receives by name what its signature names of ``prompts``,
    ``completions`` and the columns; all of it if it has ``**kwargs``. What `functools.partial` bound is never replaced
    by a column.

    Args:
        rewards: Name -> function and weight.
        prompts: [B] the prompt of each completion.
        completions: [B]
        columns: Name -> [B] what else the data set knows of the row.

    Returns:
        Name -> [B] finite numbers, or None where the reward does not apply.

    Raises:
        RewardError: What `check_columns` finds, arguments of unequal length, or a function that raises or does not
            return one finite number or None per completion. It names the reward, the row and the text's beginning.
    """
    check_columns(rewards, columns)
    inputs: dict[str, Sequence[Any]] = {"prompts": prompts, "completions": completions, **columns}
    for name, values in inputs.items():
        if len(values) != len(completions):
            raise RewardError(f"{name!r}: expected {len(completions)} values, got {len(values)}")
    return {name: _checked(name, _call(name, rewards[name].function, inputs), completions) for name in rewards}


def total(rewards: Mapping[str, Weighted], scores: Mapping[str, Sequence[float | None]]) -> list[float | None]:
    """Σ weight · score over the rewards that apply to a row; None where none does.

    Args:
        rewards: Name -> function and weight.
        scores: Name -> [B] as returned by `score`.

    Returns:
        [B] finite numbers or None.

    Raises:
        RewardError: A sum is too large for a float.
    """
    totals: list[float | None] = []
    for row, values in enumerate(zip(*scores.values(), strict=True)):
        terms = [rewards[name].weight * value for name, value in zip(scores, values, strict=True) if value is not None]
        totals.append(sum(terms) if terms else None)
        if not math.isfinite(sum(terms)):
            raise RewardError(f"row {row}: the weighted sum of {dict(zip(scores, values, strict=True))} is not finite")
    return totals


def _arguments(function: Callable[..., Any], known: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Required parameters that are not known, and the known ones that ``function`` takes by its signature."""
    parameters = inspect.signature(function).parameters.values()
    wrapped = function.function if isinstance(function, PerCompletion) else function
    bound = wrapped.keywords if isinstance(wrapped, partial) else {}
    known = {name: value for name, value in known.items() if name not in bound}
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {parameter.name: parameter for parameter in parameters if parameter.kind not in variable}
    missing = [name for name, parameter in named.items() if parameter.default is parameter.empty and name not in known]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return missing, {name: value for name, value in known.items() if takes_all or name in named}


def _call(name: str, function: Reward, inputs: Mapping[str, Sequence[Any]]) -> Any:
    """What ``function`` returns; an exception becomes one that names the first row that raises by itself."""
    try:
        return _invoke(function, inputs)
    except Exception as error:
        raise RewardError(f"reward {name!r} raised {_described(error)}; {_culprit(function, inputs)}") from error


def _invoke(function: Reward, inputs: Mapping[str, Sequence[Any]]) -> Any:
    """``function`` of copies, so that one reward cannot reorder what the next one sees."""
    passed = {name: list(values) for name, values in _arguments(function, inputs)[1].items()}
    parameters = inspect.signature(function).parameters.values()
    first = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.name in passed]
    return function(*(passed.pop(name) for name in first), **passed)


def _culprit(function: Reward, inputs: Mapping[str, Sequence[Any]]) -> str:
    for row, text in enumerate(inputs["completions"]):
        try:
            _invoke(function, {name: values[row : row + 1] for name, values in inputs.items()})
        except Exception as error:
            return f"row {row} raises {_described(error)}, completion {_beginning(text)}"
    return "no row raises when it is scored alone"


def _checked(name: str, result: Any, completions: Sequence[str]) -> list[float | None]:
    """``result`` as plain floats and Nones, one per completion."""
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
        raise RewardError(f"reward {name!r}: expected a list with a number or None per completion, got {result!r:.80}")
    values = list(result)
    if len(values) != len(completions):
        raise RewardError(f"reward {name!r}: expected {len(completions)} scores, got {len(values)}")
    scores = [None if value is None else _number(value) for value in values]
    for row, (value, number) in enumerate(zip(values, scores, strict=True)):
        if number is not None and not math.isfinite(number):
            raise RewardError(
                f"reward {name!r}: expected a finite number or None, got {value!r:.80} for row {row}, "
                f"completion {_beginning(completions[row])}"
            )
    return scores


def _number(value: Any) -> float:
    """``value`` as a float; NaN if it is no number."""
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _beginning(text: str) -> str:
    return repr(text[:_SHOWN_CHARACTERS]) + ("…" if len(text) > _SHOWN_CHARACTERS else "")
