"""One number for a completion out of the scores of single rewards."""

import math
from collections.abc import Mapping, Sequence

from grpo_lightning.reward.engine.weighted import RewardError, Score, Weighted


def scalar(value: Score) -> float | None:
    """A score as one number: the mean over the steps where it has steps, None where it has none."""
    if isinstance(value, tuple):
        return sum(step for _, step in value) / len(value) if value else None
    return value


def shaped(rewards: Mapping[str, Weighted], values: Mapping[str, Sequence[Score]]) -> dict[str, list[Score]]:
    """The scores as they enter the total: cut to ``clip``.

    Args:
        rewards: Name -> function and weight.
        values: Name -> [B] what the functions returned.

    Returns:
        Name -> [B] scores.
    """
    return {name: [_cut(value, rewards[name].clip) for value in scores] for name, scores in values.items()}


def total(rewards: Mapping[str, Weighted], scores: Mapping[str, Sequence[Score]]) -> list[float | None]:
    """The total reward, Σ weight · score over the rewards that apply to a row; None where none does.

    Where a reward scores steps, their mean is its score.

    Args:
        rewards: Name -> function and weight.
        scores: Name -> [B] as returned by `score` or `shaped`.

    Returns:
        [B] finite numbers or None.

    Raises:
        RewardError: A sum is too large for a float.
    """
    totals: list[float | None] = []
    for row, values in enumerate(zip(*scores.values(), strict=True)):
        named = {name: scalar(value) for name, value in zip(scores, values, strict=True)}
        terms = [rewards[name].factor * value for name, value in named.items() if value is not None]
        totals.append(sum(terms) if terms else None)
        if not math.isfinite(sum(terms)):
            raise RewardError(f"row {row}: the weighted sum of {named} is not finite")
    return totals


def _cut(value: Score, clip: Sequence[float] | None) -> Score:
    """``value``, or each step's score, within ``clip``."""
    if clip is None or value is None:
        return value
    if isinstance(value, tuple):
        return tuple((end, min(max(step, clip[0]), clip[1])) for end, step in value)
    return min(max(value, clip[0]), clip[1])
