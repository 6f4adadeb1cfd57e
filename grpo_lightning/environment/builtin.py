"""Built-in environments: a calculator, a guessing game, and a verifier that lets the model try again."""

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from grpo_lightning.environment.base import BadCall
from grpo_lightning.reward.accuracy import tag
from grpo_lightning.reward.countdown import evaluate
from grpo_lightning.reward.spec import arguments

_OPENING, _CLOSING = "calc(", ")="
_CHARACTERS = frozenset("0123456789.+-*/() ")
_MAX_EXPRESSION = 200  # characters: numbers stay below 10^200
_EXAMPLE = f"a call looks like {_OPENING}12*34{_CLOSING}"


def calculator(turns: Sequence[str]) -> str | None:
    """The result of the call with which the model has ended its turn; without a call the episode is over.

    A turn with a complete ``<answer>…</answer>`` is the last one, whatever else it says. Of several calls in a turn the
    last one counts. A call that cannot be computed gets a reply that says why.

    Example:
        ``calculator(["calc(12*34)="])`` is ``"408"``, ``calculator([…, "<answer>408</answer>"])`` is None.
    """
    text = turns[-1]
    start = text.rfind(_OPENING)
    if start < 0 or tag(text, "answer") is not None:
        return None
    expression, closing, _ = text[start + len(_OPENING) :].partition(_CLOSING)
    if not closing:
        return BadCall(f"error: {_EXAMPLE}")
    try:
        value = _evaluate(expression)
    except ValueError as error:
        return BadCall(f"error: {error}")
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _evaluate(expression: str) -> Fraction:
    """The exact value of an untrusted expression of decimal numbers, ``+``, ``-``, ``*``, ``/`` and brackets."""
    if len(expression) > _MAX_EXPRESSION:
        raise ValueError(f"more than {_MAX_EXPRESSION} characters")
    if strange := sorted(set(expression) - _CHARACTERS):
        raise ValueError(f"{strange[0]!r} is not allowed, only numbers, + - * / and brackets")
    try:
        return evaluate(expression, Fraction)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the parser's, of many brackets
        raise ValueError(f"not an expression; {_EXAMPLE}") from None


def guess(
    turns: Sequence[str], number: int, rng: random.Random, *, guesses: int, highest: int, random_replies: float = 0.0
) -> str | float:
    """Game in which the model guesses a number, and is told whether it is higher or lower.

    Args:
        turns: The model's turns so far; the last one is new. Surrounding whitespace is ignored.
        number: What is to be guessed, a column of the data.
        rng: Of this episode; decides which replies are random.
        guesses: How many turns the model has.
        highest: The greatest number it may be; the least one is 1.
        random_replies: Probability that a reply is drawn, and says higher or lower whatever the guess was. 1 is a
            control: what is learned then is not learned from replies.

    Returns:
        1.0 for the number, 0.0 for another guess in the last turn, else ``higher``, ``lower``, or what a guess is.
    """
    if not 1 <= number <= highest:
        raise ValueError(f"column 'number': expected 1 to {highest}, the highest, got {number}")
    text = turns[-1].strip()
    if text == str(number):
        return 1.0
    if len(turns) >= guesses:
        return 0.0
    # Every turn has numbers of its own: the same generator comes with all turns of an episode.
    draws = [(rng.random(), rng.choice(("higher", "lower"))) for _ in turns]
    if draws[-1][0] < random_replies:
        return draws[-1][1]
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(highest))):
        return f"a whole number from 1 to {highest}"
    return "higher" if int(text) < number else "lower"


class Retry:
    """Environment that says whether the answer is right, and lets the model try again.

    A right answer in turn k, counted from 0, ends the episode with the score discount**k; a wrong one gets the reply
    ``reply``, and in the last turn ends it with 0. Where the verifier does not apply (it returns None), the episode
    ends without a score.

    Args:
        verifier: A reward function for the right answer, such as `grpo_lightning.reward.accuracy.numeric`; a score of
            at least 1 is right. It is called with one completion, the last turn, and the columns that it names.
        max_turns: The most tries.
        discount: Factor of the score after each wrong answer.
        reply: The reply to a wrong answer.

    Raises:
        ValueError: On construction, if ``discount`` is not in [0, 1].
    """

    def __init__(
        self, verifier: Callable[..., Sequence[float | None]], *, max_turns: int, discount: float, reply: str
    ) -> None:
        if not 0 <= discount <= 1:
            raise ValueError(f"discount={discount}: must be a number from 0 to 1")
        self._verifier, self._max_turns, self._discount, self._reply = verifier, max_turns, discount, reply

    def __call__(self, *, turns: Sequence[str], prompt: Any, **columns: Any) -> str | float | None:
        """Score or reply to the last turn; the verifier gets what it names of ``prompt`` and ``columns``."""
        row = {"prompts": prompt, "completions": turns[-1], **columns}
        missing, named = arguments(self._verifier, {name: [value] for name, value in row.items()})
        if missing:
            raise ValueError(f"verifier: parameter {missing[0]!r} is no column of the data")
        score = self._verifier(**named)[0]
        if score is None:
            return None
        if score >= 1:
            return float(self._discount ** (len(turns) - 1))
        return self._reply if len(turns) < self._max_turns else 0.0
