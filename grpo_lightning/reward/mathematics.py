r"""A reward for answers that are equal as mathematics. Odd text of the model scores 0; a broken right answer raises.

The package math-verify reads LaTeX without `eval`, but the work it and sympy do grows with the numbers in the text and
far faster than its length. What is too large to be looked at is not handed over; what still takes long has to run in a
worker process (``timeout`` of the reward), which is why math-verify's own alarms, which are the main thread's, are off.
"""

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from grpo_lightning.reward.accuracy import last_number
from grpo_lightning.reward.text import answer_text

_LOG = logging.getLogger(__name__)
for _name in ("math_verify", "latex2sympy2_extended"):  # they warn that the alarms are off
    logging.getLogger(_name).setLevel(logging.ERROR)

_LONGEST = 1_000  # characters of an answer
_MOST_DIGITS = 50  # of one number
_LARGEST_POWER = 1_000  # also of a product of nested powers, a factorial and a binomial
_DEEPEST = 8  # brackets within brackets; at 20 the parser takes seconds
_MOST_FORMULAS = 6  # $…$ in one answer, joined by "and"
_BOXED = "\\boxed{"
_PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_CHARACTERS = re.compile(r"[ -~\n\t\u00b0\u00b1\u00b2\u00b3\u00d7\u00f7\u03c0\u2212\u221e\u2264\u2265]*")
_LATEX = str.maketrans(
    {
        "\u00b0": "^{\\circ}",
        "\u00b1": "\\pm ",
        "\u00b2": "^{2}",
        "\u00b3": "^{3}",
        "\u00d7": "\\times ",
        "\u00f7": "\\div ",
        "\u03c0": "\\pi ",
        "\u2212": "-",
        "\u221e": "\\infty ",
        "\u2264": "\\le ",
        "\u2265": "\\ge ",
    }
)
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sqrt|sin|cos|tan|log|exp|inf)(?![A-Za-z]))[A-Za-z]{3,}")
_GROUPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|begin|end|operatorname|mathbb|mbox)\s?\{[^{}]*\}")
_WORK = re.compile(r"\\(?:i*int|oint|sum|prod|lim)(?![A-Za-z])")  # commands that sympy would carry out
_DIGITS = re.compile(r"[0-9]+")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\\])([0-9.]+)[eE]([-+]?[0-9]+)")
_POWER_SIGN = re.compile(r"\*\*|\^")
_POWER_OF_NUMBER = re.compile(r"[0-9)}\]]\s*(?:\^|\*\*)")
_ROUND_EXPONENT = re.compile(r"\^\s?(?:\(([^()]*)\)|(-?[0-9]+))")
_NAMES = re.compile(r"(?<![\\A-Za-z])(pi|sqrt|sin|cos|tan|log|ln|exp)(?![A-Za-z])")

_unreadable: set[str] = set()


def math(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
    r"""1.0 if the answer text is the right answer as mathematics, by the package math-verify, else 0.0.

    Of the answer text counts what is in its last \boxed{…}, else its $…$ (several, joined by "and", are a set), else
    the whole, and of a sentence without a formula the last number. A percent sign at the end is ignored, so 50% is 50.
    Wrong unless it is the right answer to the letter, which needs no parsing: text of more than 1,000 characters,
    numbers of more than 50 digits, powers, factorials and binomials beyond 1,000, towers of numbers, brackets deeper
    than 8, and sums, integrals and limits that were left to be worked out.

    Args:
        completions: [B]
        answer: [B] the right answers; of "… #### 72" what follows the last ####.

    Returns:
        [B] 0.0 or 1.0; None, for every completion, where the right answer cannot be parsed, which is logged once.

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
    expected = _formula(right)
    if expected is not None and not _parsed(expected):
        if right not in _unreadable:
            _unreadable.add(right)
            _LOG.warning("math: the right answer %.80r cannot be parsed; the reward does not apply to it", right)
        return None
    if given == right:
        return 1.0
    formula = _formula(given)
    if formula is None or expected is None:  # what is too large is compared as text only
        return 0.0
    return float(formula == expected or _are_equal(expected, formula))


@lru_cache(maxsize=10_000)
def _are_equal(right: str, given: str) -> bool:
    parsed = _parsed(given)
    return bool(parsed) and bool(verify(_parsed(right), parsed, timeout_seconds=None))


@lru_cache(maxsize=1_000)
def _parsed(formula: str) -> list[Any]:
    """What math-verify makes of LaTeX in dollars; nothing if it can make nothing of it."""
    config = [LatexExtractionConfig()]  # not ExprExtractionConfig, which lets sympy `eval`
    return list(parse(formula, config, fallback_mode="no_fallback", parsing_timeout=None))


def _formula(text: str) -> str | None:
    """The formula in ``text`` as LaTeX in dollars, "" if there is none; None if it is too large to be parsed."""
    inner = _without_marks(text)
    if len(inner) > _LONGEST:
        return None
    if not _CHARACTERS.fullmatch(inner):
        return ""
    if inner.count("$") == 1:  # of money
        inner = inner.replace("\\$", "").replace("$", "")
    inner = inner.rstrip(" .").removesuffix("%").removesuffix("\\").rstrip()
    if any(mark in inner for mark in ("$", "\\(", "\\[", _BOXED)):  # several formulas, or one in a sentence
        is_simple = inner.count("$") + 2 * (inner.count("\\[") + inner.count("\\(")) <= 2 * _MOST_FORMULAS
        found = inner if is_simple and _BOXED not in inner else ""
    elif _WORD.search(_GROUPED.sub("", inner)):
        number = last_number(inner)
        found = "" if number is None else f"${number}$"
    else:
        found = f"${inner if chr(92) in inner else _latex(inner)}$" if inner else ""
    return _bounded(found.translate(_LATEX))


def _without_marks(text: str) -> str:
    """What is in the last box if that is closed, else ``text`` without the dollars around all of it."""
    begin = text.rfind(_BOXED) + len(_BOXED)
    if begin >= len(_BOXED):
        depth = 0
        for position in range(begin - 1, len(text)):
            depth += (text[position] == "{") - (text[position] == "}")
            if not depth:
                return text[begin:position].strip()
    for opening, closing in _PAIRS:
        inner = text[len(opening) : -len(closing)]
        if text == f"{opening}{inner}{closing}" and not any(mark in inner for mark in (opening, closing)):
            return inner.strip()
    return text


def _latex(text: str) -> str:
    """Plain notation as LaTeX: 2**10, 2^(1/3), 1e5, 2pi, sqrt(2)."""
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text.replace("**", "^"))
    text = _ROUND_EXPONENT.sub(lambda found: f"^{{{found[1] or found[2]}}}", text)
    return _NAMES.sub(r"\\\1 ", text).replace("\\sqrt (", "sqrt(")


def _bounded(formula: str) -> str | None:
    """``formula``, or None if parsing or comparing it could take long."""
    if any(len(digits) > _MOST_DIGITS for digits in _DIGITS.findall(formula)) or _WORK.search(formula):
        return None
    depth = 0
    for character in formula:
        depth += (character in "([{") - (character in ")]}")
        if depth > _DEEPEST:
            return None
    return formula if _nested_power(formula) <= _LARGEST_POWER and _has_small_factorials(formula) else None


def _nested_power(formula: str) -> int:
    """At most how large the powers are, the largest exponent times those of brackets; too large for towers."""
    largest = nested = 1
    for sign in _POWER_SIGN.finditer(formula):
        exponent, after = _argument(formula, sign.end())
        size = 1
        for digits in _DIGITS.findall(exponent):
            size *= max(int(digits), 1)
        is_tower = _POWER_OF_NUMBER.search(exponent) or _POWER_SIGN.match(formula[after:].lstrip())
        if is_tower or "!" in exponent:
            return _LARGEST_POWER + 1
        if formula[: sign.start()].rstrip().endswith((")", "}", "]", "!")):
            nested *= size
        else:
            largest = max(largest, size)
    return largest * nested


def _has_small_factorials(formula: str) -> bool:
    numbers = re.findall(r"([0-9]+)\s*!", formula)
    if "\\binom" in formula or "\\choose" in formula:
        numbers += _DIGITS.findall(formula)
    return not re.search(r"[!)}\]]\s*!", formula) and all(int(number) <= _LARGEST_POWER for number in numbers)


def _argument(formula: str, start: int) -> tuple[str, int]:
    """The exponent that begins at ``start``, a group or digits or one character, and where it ends."""
    while start < len(formula) and formula[start] in " \n\t+-":
        start += 1
    if formula[start : start + 1] in ("{", "("):
        depth = 0
        for position in range(start, len(formula)):
            depth += (formula[position] in "{(") - (formula[position] in "})")
            if not depth:
                return formula[start + 1 : position], position + 1
    found = re.compile(r"[0-9]+|[^0-9]?").match(formula, start)
    return (found[0], found.end()) if found else ("", start)
