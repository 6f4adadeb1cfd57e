"""Rewards for words and patterns that a completion contains."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import regex

_LOG = logging.getLogger(__name__)

timed_out: Counter[str] = Counter()
"""How many searches for each expression were given up in this process."""


def keyword(completions: Sequence[str], *, words: Sequence[str], **_: Any) -> list[float | None]:
    """The fraction of the words that the completion contains; case is ignored, and a part of a longer word counts.

    Args:
        completions: [B]
        words: The words to look for; at least one.

    Returns:
        [B] in [0, 1]

    Raises:
        ValueError: ``words`` is no list of text, or empty, or one of them is.
    """
    if isinstance(words, str) or not words or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"words: expected a list of at least one text, none of them empty, got {words!r:.80}")
    folded = [word.casefold() for word in words]
    texts = [completion.casefold() for completion in completions]
    return [sum(word in text for word in folded) / len(folded) for text in texts]


def pattern(completions: Sequence[str], *, expression: str, seconds: float, **_: Any) -> list[float | None]:
    """1.0 if the regular expression is found in the completion, else 0.0.

    Args:
        completions: [B]
        expression: The regular expression, in the syntax of the package regex; (?i) at its beginning ignores case.
        seconds: How long the search in one completion may take, more than 0. Then it scores 0.0, which is counted and,
            the first time, logged.

    Returns:
        [B] 0.0 or 1.0

    Raises:
        ValueError: ``expression`` is no regular expression, or ``seconds`` is not more than 0.
    """
    if not (isinstance(seconds, int | float) and seconds > 0):
        raise ValueError(f"seconds: expected a number > 0, got {seconds!r:.80}")
    try:
        compiled = regex.compile(expression)
    except (regex.error, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"expression: expected a regular expression, got {expression!r:.80}: {error}") from error
    return [float(_is_found(compiled, completion, seconds)) for completion in completions]


def _is_found(compiled: "regex.Pattern[str]", text: str, seconds: float) -> bool:
    try:
        return compiled.search(text, timeout=seconds) is not None
    except TimeoutError:
        if not timed_out[compiled.pattern]:
            _LOG.warning(
                "pattern %.80r: a search took more than %s s, which scores 0; further ones are only counted",
                compiled.pattern,
                seconds,
            )
        timed_out[compiled.pattern] += 1
        return False
