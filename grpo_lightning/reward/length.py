"""Rewards for a completion's length and the variety of its words: [B] scores for [B] texts or token ids."""

import math
from collections.abc import Sequence
from typing import Any

from grpo_lightning.reward.spec import Reward, arguments, scalar


def length(completions: Sequence[str], *, target: int, **_: Any) -> list[float | None]:
    """A reward for being short: 1 up to ``target`` characters, falling to 0 at twice that.

    With n characters:  min(1, max(0, 2 − n / target)).
    """
    _check(target > 0, f"target={target}: expected a number > 0")
    return [min(1.0, max(0.0, 2 - len(completion) / target)) for completion in completions]


def word_variety(completions: Sequence[str], **_: Any) -> list[float | None]:
    """The fraction of the words that are distinct, which are separated by whitespace and whose case is ignored.

    It is 0 without words. A deterministic reward for open prompts, which have no right answer.
    """
    words = [completion.lower().split() for completion in completions]
    return [len(set(row)) / len(row) if row else 0.0 for row in words]


def soft_overlong(
    completion_ids: Sequence[Sequence[int]],
    episode_tokens: Sequence[int] | None = None,
    *,
    max_length: int,
    buffer: float,
    **_: Any,
) -> list[float | None]:
    """A penalty that falls linearly from 0 to -1 over the last ``buffer`` of ``max_length`` tokens.

    With n tokens and a buffer of b tokens:  min(0, max(-1, (max_length - b - n) / b)).
    DAPO, arXiv:2503.14476, Eq. 13, where b is 4,096 of 20,480.

    Args:
        completion_ids: [B] tokens of each completion.
        max_length: The tokens from which on the reward is -1.
        buffer: The fraction of ``max_length`` over which the reward falls, in (0, 1].
        episode_tokens: [B] tokens of all turns and replies of each episode, which count in place of the completion's.
    """
    _check(0 < buffer <= 1 and max_length > 0, f"buffer={buffer}, max_length={max_length}: expected (0, 1] and >= 1")
    tokens = buffer * max_length
    lengths = [len(ids) for ids in completion_ids] if episode_tokens is None else episode_tokens
    return [min(0.0, max(-1.0, (max_length - tokens - length) / tokens)) for length in lengths]


def repetition(completions: Sequence[str], *, n: int, max_penalty: float, **_: Any) -> list[float | None]:
    """A penalty for n-grams of words that stood in the completion before; 0 with fewer than n words.

    (1 − distinct n-grams / n-grams) · max_penalty, of words as in `word_variety`.

    Open R1's repetition penalty, github.com/huggingface/open-r1, src/open_r1/rewards.py; arXiv:2502.03373, appendix.
    """
    _check(n >= 1 and max_penalty <= 0, f"n={n}, max_penalty={max_penalty}: expected n >= 1 and a penalty <= 0")

    def repeated(words: Sequence[str]) -> float:
        total = len(words) - n + 1
        if total < 1:
            return 0.0
        return 1 - len(set(zip(*(words[start:] for start in range(n)), strict=False))) / total

    return [repeated(completion.lower().split()) * max_penalty + 0.0 for completion in completions]


def cosine_length(
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    episode_tokens: Sequence[int] | None = None,
    *,
    outcome: Reward,
    max_length: int,
    right: Sequence[float],
    wrong: Sequence[float],
    **columns: Sequence[Any],
) -> list[float | None]:
    """A value that follows a cosine from length 0 to ``max_length``, one for right and one for wrong completions.

    end + (start − end) · (1 + cos(π · min(n, L) / L)) / 2 for n tokens and L = ``max_length``. Yeo et al.,
    arXiv:2502.03373, Eq. 1, as in Open R1: without the paper's r_e, which completions that reach L get instead, and
    for which `soft_overlong` can stand beside it.

    Args:
        completions: [B] texts, of ``completion_ids``.
        completion_ids: [B] the tokens of each completion.
        outcome: The reward that says what is right: a score of at least 1.
        max_length: The tokens from which on the value stays at its end; at least 1.
        right: [start, end] for right completions.
        wrong: [start, end] for wrong ones.
        episode_tokens: [B] as in `soft_overlong`.
        columns: Name -> [B] prompts and what else the data know.

    Returns:
        [B] between start and end; None where ``outcome`` is None.
    """
    _check(max_length > 0, f"max_length={max_length}: expected an integer >= 1")
    passed = arguments(outcome, {"completions": completions, "completion_ids": completion_ids, **columns})[1]
    scores = [scalar(score) for score in outcome(**passed)]
    lengths = [len(ids) for ids in completion_ids] if episode_tokens is None else episode_tokens

    def on_cosine(length: int, start: float, end: float) -> float:
        return end + (start - end) * (1 + math.cos(math.pi * min(length / max_length, 1.0))) / 2

    return [
        None if score is None else on_cosine(length, *(right if score >= 1 else wrong))
        for score, length in zip(scores, lengths, strict=True)
    ]


def _check(is_valid: bool, problem: str) -> None:
    if not is_valid:
        raise ValueError(problem)
