"""An environment of second chances: a verifier's word, until the answer is right."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from grpo_lightning.config.rules import integer, number, problems
from grpo_lightning.reward.spec import bound_arguments, is_coroutine_function

RULES = {"max_turns": integer(1), "discount": number(lambda v: 0 <= v <= 1, "a number from 0 to 1")}
"""What each setting may be."""
_OF_REWARDS = ("prompts", "completions", "completion_ids")
_RIGHT = 1.0  # the score from which on an answer is right, as for reward=cosine_length


class Retry:
    """An environment that says whether the answer is right, and lets the model try again.

    A right answer in turn k, counted from 0, ends the episode with the score discount**k; a wrong one is replied to
    with ``reply``, and in the last turn ends it with 0. Where the verifier does not apply (it returns None), the
    episode ends without a score.

    Args:
        verifier: A reward function for the right answer, such as `grpo_lightning.reward.accuracy.numeric`; a score of
            at least 1 is right. It is called with one completion, the last turn, and the columns that it names.
        max_turns: The most tries.
        discount: The share of the score that is left after each wrong answer.
        reply: What the model is told of a wrong answer.

    Raises:
        ValueError: On construction: a setting is out of range, or ``verifier`` is no plain function.
    """

    def __init__(
        self, verifier: Callable[..., Sequence[float | None]], *, max_turns: int, discount: float, reply: str
    ) -> None:
        if wrong := problems(RULES, {"max_turns": max_turns, "discount": discount}):
            raise ValueError("; ".join(wrong))
        if not callable(verifier) or is_coroutine_function(verifier):
            raise ValueError(
                f"verifier: expected a function (`_partial_: true` in YAML, and no async def), got {verifier!r:.80}"
            )
        if not isinstance(reply, str) or not reply.strip():
            raise ValueError(f"reply: expected a text that is not empty, got {reply!r:.80}")
        self._verifier, self._max_turns, self._discount, self._reply = verifier, max_turns, discount, reply
        self._columns, self._has_prompts = _columns(verifier)
        kind = inspect.Parameter.KEYWORD_ONLY
        named = [inspect.Parameter("turns", kind), *self._columns]
        self.__signature__ = inspect.Signature(
            [*named, *([inspect.Parameter("prompt", kind)] if self._has_prompts else [])]
        )

    def __call__(self, *, turns: Sequence[str], **row: Any) -> str | float | None:
        """The verifier's word on the last turn.

        Args:
            turns: What the model has said so far; the last is new.
            **row: The columns that the verifier names, and ``prompt`` if it names ``prompts``.

        Raises:
            ValueError: The verifier returns something else than a number or None.
        """
        given = {one.name: [row[one.name]] for one in self._columns if one.name in row}
        prompts = {"prompts": [row["prompt"]]} if self._has_prompts else {}
        returned = self._verifier(completions=[turns[-1]], **given, **prompts)
        score = returned[0] if isinstance(returned, Sequence) and len(returned) == 1 else math.nan
        if score is None:
            return None
        if isinstance(score, tuple) or not math.isfinite(score):
            raise ValueError(f"verifier: expected a list with one number or None, got {returned!r:.80}")
        if score >= _RIGHT:
            return float(self._discount ** (len(turns) - 1))
        return self._reply if len(turns) < self._max_turns else 0.0


def _columns(verifier: Callable[..., Any]) -> tuple[list[inspect.Parameter], bool]:
    """The columns that a verifier names, as parameters by name, and whether it names ``prompts``."""
    bound = bound_arguments(verifier)
    parameters = inspect.signature(verifier).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    columns = [one for one in named if one.name not in (*bound, *_OF_REWARDS)]
    return (
        [one.replace(kind=one.KEYWORD_ONLY, annotation=one.empty) for one in columns],
        any(one.name == "prompts" for one in named),
    )
