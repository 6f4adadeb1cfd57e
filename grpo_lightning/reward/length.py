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
