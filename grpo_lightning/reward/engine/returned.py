"""What reward functions return, checked."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsFloat

from grpo_lightning.reward.engine.pool import Failure
from grpo_lightning.reward.engine.weighted import RewardError, Score

_SHOWN_CHARACTERS = 80


def single(name: str, outcomes: Sequence[Any]) -> list[Any]:
    """What a function returned that was called with one completion at a time; None for failures."""
    values = []
    for outcome in outcomes:
        listed = [None] if isinstance(outcome, Failure) else outcome
        if not isinstance(listed, list | tuple) or len(listed) != 1:
            raise RewardError(f"reward {name!r}: expected a list with one score for one completion, got {listed!r:.80}")
        values.append(listed[0])
    return values


def checked(name: str, result: Any, completions: Sequence[str]) -> list[Score]:
    """``result`` as plain floats, steps and Nones, one per completion."""
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
        raise RewardError(f"reward {name!r}: expected a list with a number or None per completion, got {result!r:.80}")
    values = list(result)
    if len(values) != len(completions):
        raise RewardError(f"reward {name!r}: expected {len(completions)} scores, got {len(values)}")
    scores: list[Score] = []
    for row, (value, text) in enumerate(zip(values, completions, strict=True)):
        score = (
            _steps(value, len(text)) if isinstance(value, list | tuple) else None if value is None else _number(value)
        )
        if isinstance(score, float) and not math.isfinite(score):
            raise RewardError(
                f"reward {name!r}: expected a finite number, (end, score) pairs with ends from 1 to {len(text)}, or "
                f"None, got {value!r:.80} for row {row}, completion {beginning(text)}"
            )
        scores.append(score)
    return scores


def _steps(pairs: Sequence[Any], length: int) -> Score:
    """``pairs`` as (end, score) tuples in the order of their ends; NaN if they are no such pairs."""
    steps: list[tuple[int, float]] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return math.nan
        end, value = _number(pair[0]), _number(pair[1])
        if not (end.is_integer() and 1 <= end <= length and math.isfinite(value)):
            return math.nan
        steps.append((int(end), value))
    return tuple(sorted(steps))


def _number(value: Any) -> float:
    """``value`` as a float; NaN if it is no number."""
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def beginning(text: str) -> str:
    """The beginning of a text, for messages."""
    return repr(text[:_SHOWN_CHARACTERS]) + ("…" if len(text) > _SHOWN_CHARACTERS else "")
