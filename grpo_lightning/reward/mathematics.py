r"""A reward for answers that are equal as mathematics. Odd text of the model scores 0; a broken right answer raises.

The package math-verify reads LaTeX without `eval`, but to learn the value of a sum sympy writes Python with the names
that stand in it, and runs that: formulas with a sum, or with a name that is a call, are never compared. Work grows fast
with the numbers in a formula and its nesting: what exceeds the bounds below is not read. What still takes long has to
run in a worker process (``timeout`` of the reward): math-verify's alarms, which need the main thread, are off.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from latex2sympy2_extended.math_normalization import normalize_latex
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Limit, MatrixBase, preorder_traversal
from sympy.concrete.expr_with_limits import ExprWithLimits

from grpo_lightning.reward.accuracy import last_number
from grpo_lightning.reward.text import answer_text

log = logging.getLogger(__name__)
for _name in ("math_verify", "latex2sympy2_extended"):  # they warn that the alarms are off
    logging.getLogger(_name).setLevel(logging.ERROR)

_NORMALIZATION = LatexExtractionConfig().normalization_config
"""What math-verify changes in a formula before it reads it."""
_MAX_CHARACTERS = 300  # of a formula
_MAX_DIGITS = 50  # of one number
_MAX_POWER = 1_000  # also of a product of nested powers
_MAX_FACTORIAL = 200  # and number of a binomial
_MAX_DEPTH = 8  # brackets within brackets; at 20 the parser takes seconds
_MAX_FORMULAS = 6  # $…$ in one answer, joined by "and"
_MAX_COUNTS = (  # of what sympy needs exponentially long for
    (re.compile(r"[(\[]"), 30),
    (re.compile(r"\||\\[lr]?[vV]ert|\\mid"), 8),
    (re.compile(r"/|:|\\div"), 10),
    (re.compile(r"_"), 8),
    (re.compile(r"!"), 20),
    (re.compile(r"\\(?:(?:ar|arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|lg|log|[lr]?(?:floor|ceil))"), 6),
    (re.compile(r"\\[A-Za-z]{20}"), 0),  # no command, so a product of letters
    (re.compile(r"\\(?:i*int|oint|sum|prod|lim)"), 0),  # sympy would carry them out; it reads them from \intx, too
)
_BOXED = "\\boxed{"
_BETWEEN = re.compile(r"\$|\\[()\[\]]")
"""What begins and ends the formulas of a text."""
_PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_SYMBOLS = "\u00b0\u00b1\u00b2\u00b3\u00d7\u00f7\u03c0\u2212\u221a\u221e\u2264\u2265"
"""Degree, plus-minus, squared, cubed, times, divided by, pi, minus, root, infinity, at most, at least."""
_COMMANDS = re.split(",", r"^{\circ},\pm ,^{2},^{3},\times ,\div ,\pi ,-,\sqrt ,\infty ,\le ,\ge ")
_LATEX = str.maketrans(dict(zip(_SYMBOLS, _COMMANDS, strict=True)))
_OTHER = re.compile(rf"[^ -~\n\t{_SYMBOLS}]")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sqrt|sin|cos|tan|log|exp|inf)(?![A-Za-z]))[A-Za-z]{3,}")
_GROUPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|begin|end|operatorname|mathbb|mbox)\s?\{([^{}]*)\}")
_DIGITS = re.compile(r"[0-9]+")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\\])([0-9.]+)[eE]([-+]?[0-9]+)")
_GROUP = r"\{[^{}]*\}"
for _ in range(3):
    _GROUP = rf"\{{(?:[^{{}}]|{_GROUP})*\}}"
_POWER = re.compile(rf"(?:\*\*|\^)[ \n\t+-]*({_GROUP}|\((?:[^()]|\([^()]*\))*\)|[0-9]+|.?)", re.DOTALL)
"""A power with its exponent: a group, digits, or one character."""
_POWER_OF_NUMBER = re.compile(r"[0-9)}\]]\s*(?:\^|\*\*)")
_ROUND_EXPONENT = re.compile(r"\^\s?(?:\(([^()]*)\)|(-?[0-9]+))")
_NAMES = re.compile(r"(?<![\\A-Za-z])(pi|sqrt|sin|cos|tan|log|ln|exp)(?![A-Za-z])")

_is_warned = False


def math(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
    r"""1.0 if the answer text is the right answer as mathematics, by the package math-verify, else 0.0.

    What counts is the answer text's last \boxed{…}, else its $…$ (several, joined by "and", are a set), else the
    whole, and of a sentence without a formula the last number. A percent sign at the end is ignored, so 50% is 50.
    What exceeds the module's bounds, and sums, integrals and limits, are right only to the letter.

    Of the right answer "… #### 72" what follows the last #### counts. Where a right answer cannot be parsed, the score
    is None: the first one is logged.
    """
    return [_score(answer_text(text), _right_answer(right)) for text, right in zip(completions, answer, strict=True)]


def read_formula(text: str) -> str | None:
    """The formula in ``text``, see `math`, as LaTeX in dollars: "" for none, None if it could take long to parse."""
    inner = _without_marks(text)
    if len(inner) > _MAX_CHARACTERS:
        return None
    other = _OTHER.findall(inner)
    if any(character.isalpha() for character in other):
        inner = _OTHER.sub(" word ", inner)
    elif other:
        return ""
    if inner.count("$") == 1:  # of money
        inner = inner.replace("\\$", "").replace("$", "")
    inner = inner.rstrip(" .").removesuffix("%").removesuffix("\\").rstrip()
    if any(mark in inner for mark in ("$", "\\(", "\\[", _BOXED)):  # several formulas, or one in a sentence
        is_simple = inner.count("$") + 2 * (inner.count("\\[") + inner.count("\\(")) <= 2 * _MAX_FORMULAS
        formula = inner if is_simple and _BOXED not in inner else ""
    elif _WORD.search(_GROUPED.sub("", inner)):
        number = last_number(inner)
        formula = "" if number is None else f"${number}$"
    else:
        formula = f"${inner if chr(92) in inner else _latex(inner)}$" if inner else ""
    formula = formula.translate(_LATEX)
    # As math-verify reads each of them: without quotes and the like, which could part a command.
    as_read = [normalize_latex(part, _NORMALIZATION) for part in _BETWEEN.split(formula)]
    return formula if all(map(_is_bounded, (formula, *as_read))) else None


def _right_answer(answer: Any) -> str:
    text = str(answer).rpartition("####")[2].strip() if isinstance(answer, str | int | float) else ""
    if not text or isinstance(answer, bool):
        raise ValueError(f"answer: expected text or a number, got {answer!r:.80}")
    return text


def _score(given: str, right: str) -> float | None:
    global _is_warned
    expected = read_formula(right)
    if expected is not None and not _parsed(expected):
        if not _is_warned:
            _is_warned = True
            log.warning("math: the right answer %.80r cannot be parsed and gets no score (logged once)", right)
        return None
    if _plain(given) == _plain(right):
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


def _plain(text: str) -> str:
    r"""``text`` without its box, its dollars and a \text{…} around all of it."""
    inner = _without_marks(text)
    grouped = _GROUPED.fullmatch(inner)
    return grouped[1].strip() if grouped else inner


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
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text.replace("**", "^").replace("\u221a", "sqrt"))
    text = _ROUND_EXPONENT.sub(lambda exponent: f"^{{{exponent[1] or exponent[2]}}}", text)
    return _NAMES.sub(r"\\\1 ", text).replace("\\sqrt (", "sqrt(")


def _is_bounded(formula: str) -> bool:
    if any(len(digits) > _MAX_DIGITS for digits in _DIGITS.findall(formula)):
        return False
    if any(len(sign.findall(formula)) > most for sign, most in _MAX_COUNTS):
        return False
    depth = 0
    for character in formula:
        depth += (character in "([{") - (character in ")]}")
        if depth > _MAX_DEPTH:
            return False
    factorials = re.findall(r"([0-9]+)\s*!", formula)
    if "\\binom" in formula or "\\choose" in formula:
        factorials += _DIGITS.findall(formula)
    if re.search(r"[!)}\]]\s*!", formula) or any(int(number) > _MAX_FACTORIAL for number in factorials):
        return False
    return _nested_power(formula) <= _MAX_POWER


def _nested_power(formula: str) -> int:
    """A bound of the powers: the largest exponent times those of brackets; for towers more than what is allowed."""
    largest = nested = 1
    for power in _POWER.finditer(formula):
        exponent, rest = power[1], formula[power.end() :].lstrip()
        is_tower = rest.startswith(("^", "**")) or _POWER_OF_NUMBER.search(exponent)
        if is_tower or "!" in exponent or exponent in ("{", "("):
            return _MAX_POWER + 1
        size = prod(max(int(digits), 1) for digits in _DIGITS.findall(exponent))
        if formula[: power.start()].rstrip().endswith((")", "}", "]", "!")):
            nested *= size
        else:
            largest = max(largest, size)
    return largest * nested
