r"""A reward for answers that are equal as mathematics. Odd text of the model scores 0; a broken right answer raises.

The package math-verify reads LaTeX without `eval`, but to learn the value of a sum sympy writes Python with the names
that stand in it, and runs that: so formulas with a sum, or with a name that is a call, are never compared. What could
take long is not handed over; what still does has to run in a worker process (``timeout`` of the reward), which is why
math-verify's own alarms, which are the main thread's, are off.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Limit, MatrixBase, preorder_traversal
from sympy.concrete.expr_with_limits import ExprWithLimits

from grpo_lightning.reward.formula import plain, read_formula
from grpo_lightning.reward.text import answer_text

_LOG = logging.getLogger(__name__)
for _name in ("math_verify", "latex2sympy2_extended"):  # they warn that the alarms are off
    logging.getLogger(_name).setLevel(logging.ERROR)

unreadable: Counter[str] = Counter()
"""How many completions each right answer that cannot be parsed has left without a score in this process."""


def math(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
    r"""1.0 if the answer text is the right answer as mathematics, by the package math-verify, else 0.0.

    What counts is the answer text's last \boxed{…}, else its $…$ (several, joined by "and", are a set), else the
    whole, and of a sentence without a formula the last number. A percent sign at the end is ignored, so 50% is 50.
    Wrong unless it is the right answer to the letter, which needs no parsing: formulas of more than 300 characters,
    numbers of more than 50 digits, powers beyond 1,000, factorials and binomials beyond 200, towers of numbers,
    brackets deeper than 8, functions deeper than 4, chains of divisions, and sums, integrals and limits that were
    left to be worked out.

    Args:
        completions: [B]
        answer: [B] the right answers; of "… #### 72" what follows the last ####.

    Returns:
        [B] 0.0 or 1.0; None, for every completion, where the right answer cannot be parsed: the first is logged, all
        are counted.

    Raises:
        ValueError: A right answer is empty or neither text nor a number.
    """
    return [_scored(answer_text(text), _right_answer(right)) for text, right in zip(completions, answer, strict=True)]


def _right_answer(answer: Any) -> str:
    text = str(answer).rpartition("####")[2].strip() if isinstance(answer, str | int | float) else ""
    if not text or isinstance(answer, bool):
        raise ValueError(f"answer: expected text or a number, got {answer!r:.80}")
    return text


def _scored(given: str, right: str) -> float | None:
    expected = read_formula(right)
    if expected is not None and not _parsed(expected):
        if not unreadable:
            _LOG.warning(
                "math: the right answer %.80r cannot be parsed, so the reward does not apply to it; further ones are "
                "only counted",
                right,
            )
        unreadable[right] += 1
        return None
    if plain(given) == plain(right):
        return 1.0
    formula = read_formula(given)
    if formula is None or expected is None or not _is_worked_out(expected):  # compared as text only
        return 0.0
    return float(formula == expected or _are_equal(expected, formula))


@lru_cache(maxsize=10_000)
def _are_equal(right: str, given: str) -> bool:
    parsed = _parsed(given)
    return bool(parsed) and _is_worked_out(given) and bool(verify(_parsed(right), parsed, timeout_seconds=None))


@lru_cache(maxsize=1_000)
def _parsed(formula: str) -> list[Any]:
    """What math-verify makes of LaTeX in dollars; nothing if it can make nothing of it."""
    config = [LatexExtractionConfig()]  # not ExprExtractionConfig, which lets sympy `eval`
    return list(parse(formula, config, fallback_mode="no_fallback", parsing_timeout=None))


@lru_cache(maxsize=1_000)
def _is_worked_out(formula: str) -> bool:
    """Whether math-verify makes plain mathematics of a formula: no sum, integral or limit, no name that is a call."""
    return all(_is_value(part) for whole in _parsed(formula) for part in _parts(whole))


def _parts(whole: Any) -> Iterator[Any]:
    """All that was parsed; beside a set or a chain of relations that is as it was written, which is compared, too."""
    for part in preorder_traversal(whole) if isinstance(whole, Basic | MatrixBase) else (whole,):
        yield part
        for written in getattr(part, "_unsorted_args", ()):
            yield from _parts(written)


def _is_value(part: Any) -> bool:
    is_call = "(" in str(getattr(part, "name", ""))  # of a symbol; sympy writes it into Python code as it is
    return isinstance(part, str | Basic | MatrixBase) and not (is_call or isinstance(part, ExprWithLimits | Limit))
