"""Rewards that need no right answer: of a completion's length and of its words."""

from collections.abc import Sequence
from typing import Any


def length(completions: Sequence[str], *, target: int, **_: Any) -> list[float | None]:
    """min(1, max(0, 2 − n / target)) for n characters: 1 up to ``target``, falling to 0 at twice that.

    Args:
        completions: [B]
        target: Characters that are free; at least 1.

    Returns:
        [B] in [0, 1]

    Raises:
        ValueError: ``target`` is less than 1.
    """
    if target < 1:
        raise ValueError(f"target: expected at least 1 character, got {target}")
    return [min(1.0, max(0.0, 2 - len(completion) / target)) for completion in completions]


def word_variety(completions: Sequence[str], **_: Any) -> list[float | None]:
    """Distinct words / words, where words are separated by whitespace and case does not matter; 0 without words.

    A deterministic reward for open prompts, which have no right answer.

    Args:
        completions: [B]

    Returns:
        [B] in [0, 1]
    """
    words = [completion.lower().split() for completion in completions]
    return [len(set(of_one)) / len(of_one) if of_one else 0.0 for of_one in words]


def soft_overlong(
    completion_ids: Sequence[Sequence[int]], *, max_length: int, buffer: float, **_: Any
) -> list[float | None]:
    """0 for short completions, falling linearly to -1 over the last ``buffer`` of ``max_length`` tokens.

    With n tokens and a buffer of b tokens:  min(0, max(-1, (max_length - b - n) / b)).
    DAPO, arXiv:2503.14476, Eq. 13, where b is 4,096 of 20,480.

    Args:
        completion_ids: [B] tokens of each completion.
        max_length: Tokens from which on it is -1.
        buffer: Share of ``max_length``, in (0, 1].

    Returns:
        [B] in [-1, 0]

    Raises:
        ValueError: ``buffer`` is out of range or ``max_length`` less than 1.
    """
    if not 0 < buffer <= 1 or max_length < 1:
        raise ValueError(f"max_length={max_length}, buffer={buffer}: allowed are max_length >= 1 and 0 < buffer <= 1")
    tokens = buffer * max_length
    return [min(0.0, max(-1.0, (max_length - tokens - len(ids)) / tokens)) for ids in completion_ids]
