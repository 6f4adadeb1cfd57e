r"""A reward for answers that are equal as mathematics. Odd text of the model scores 0; a broken right answer raises.

The package math-verify reads LaTeX without `eval`, but to learn the value of a sum sympy writes Python with the names
that stand in it, and runs that: formulas with a sum, or with a name that is a call, are never compared. What takes long
has to run in a worker process (``timeout`` of the reward): math-verify's alarms, which need the main thread, are off.
"""

import logging
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.math_normalization import normalize_latex
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Limit, MatrixBase, preorder_traversal
from sympy.concrete.expr_with_limits import ExprWithLimits

from grpo_lightning.reward.accuracy import answer_text, last_number, normalize, numbers_in, prepend_prefills, right_text
from grpo_lightning.reward.spec import score_rows

log = logging.getLogger(__name__)
for _name in ("math_verify", "latex2sympy2_extended"):  # they warn that the alarms are off
    logging.getLogger(_name).setLevel(logging.ERROR)

_NORMALIZATION = LatexExtractionConfig().normalization_config  # of a formula, before math-verify reads it
_MAX_CHARACTERS = 300  # of a formula
_MAX_POWER = 1_000
_MAX_FACTORIAL = 200
_POWER = re.compile(r"(?:\^|\*\*)[\s{(+-]*([0-9]+)")
_REFUSED = re.compile(
    r"[0-9]{51}"
    r"|(?:\^|\*\*)[\s{(+-]*[0-9]+[\s)}]*(?:\^|\*\*|!)|[!)}\]]\s*!"  # powers of powers, factorials of factorials
    r"|\\(?:i*int|oint|sum|prod|lim)"  # sympy would carry them out; it reads them from \intx, too
)
_BOXED = "\\boxed{"
_BETWEEN = re.compile(r"\$|\\[()\[\]]")  # what begins and ends the formulas of a text
_PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_SYMBOLS = "\u00b0\u00b1\u00b2\u00b3\u00d7\u00f7\u03c0\u2212\u221a\u221e\u2264\u2265"
"""Degree, plus-minus, squared, cubed, times, divided by, pi, minus, root, infinity, at most, at least."""
_COMMANDS = re.split(",", r"^{\circ},\pm ,^{2},^{3},\times ,\div ,\pi ,-,\sqrt ,\infty ,\le ,\ge ")
_LATEX = str.maketrans(dict(zip(_SYMBOLS, _COMMANDS, strict=True)))
_OTHER = re.compile(rf"[^ -~\n\t{_SYMBOLS}]")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sqrt|sin|cos|tan|log|exp|inf)(?![A-Za-z]))[A-Za-z]{3,}")
_GROUPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|begin|end|operatorname|mathbb|mbox)\s?\{([^{}]*)\}")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\\])([0-9.]+)[eE]([-+]?[0-9]+)")
_ROUND_EXPONENT = re.compile(r"\^\s?(?:\(([^()]*)\)|(-?[0-9]+))")
_NAMES = re.compile(r"(?<![\\A-Za-z])(pi|sqrt|sin|cos|tan|log|ln|exp)(?![A-Za-z])")
_BOLD = re.compile(r"(?<![\w)\]}*])(\*\*|__)(?=[^\s*_])([^*\n]+?)(?<=\S)\1(?![\w*])")
_MONEY = re.compile(r"(?:US|CA|AU)?\$(?=\s?[0-9.])")
_ABOUT = re.compile(r"\u2248|\\approx(?![A-Za-z])|\A\s*~")
_JOINED = re.compile(r",?\s+(?:and|or)\s+")
_DATE = re.compile(r"\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2\d{4}", re.ASCII)

_is_warned = False


def math(
    completions: Sequence[str], answer: Sequence[Any], *, prefills: Sequence[str] = (), **_: Any
) -> list[float | None]:
    r"""1.0 if the answer text is the right answer as mathematics, by the package math-verify, else 0.0.

    What counts is the answer text's last \boxed{…}, else what follows the last ####, else its $…$ (several, joined by
    "and", are a set), else the whole, and of a sentence without a formula the last number. Of a right answer that is a
    sentence with several numbers, or a date, all counts: it is compared as text. Signs of currency, markdown's bold
    and a percent sign at the end are ignored, so 50% is 50, and of "x ≈ 3.1" the last part counts.
    What is too long or has too large powers, and sums, integrals and limits, are right only to the letter.

    Where a right answer cannot be parsed, the score is None: the first one is logged.
    """
    turns = prepend_prefills(completions, prefills)
    return score_rows(lambda text, right: _score(answer_text(text), _right_answer(right)), turns, answer)


def read_formula(text: str, *, is_right: bool = False) -> str | None:
    """The formula in ``text``, see `math`, as LaTeX in dollars: "" for none, None if it is compared as text only."""
    inner = _without_marks(text)
    if len(inner) > _MAX_CHARACTERS or (is_right and _DATE.fullmatch(inner)):
        return None
    other = _OTHER.findall(inner)
    if any(character.isalpha() for character in other):
        inner = _OTHER.sub(" word ", inner)
    elif other:
        if not _WORD.search(inner) or any(unicodedata.category(character)[0] == "N" for character in other):
            return ""
        inner = _OTHER.sub(" ", inner)  # arrows and the like between words
    inner = inner.rstrip(" .").removesuffix("%").removesuffix("\\").rstrip()
    if any(mark in inner for mark in ("$", "\\(", "\\[", _BOXED)):  # several formulas, or one in a sentence
        formula = "" if _BOXED in inner else inner
    else:
        inner = _JOINED.sub(", ", inner)
        if _WORD.search(_GROUPED.sub("", inner)):
            if is_right and len(numbers_in(inner)) > 1:
                return None
            number = last_number(inner)
            formula = "" if number is None else f"${number}$"
        else:
            formula = f"${inner if chr(92) in inner else _latex(inner)}$" if inner else ""
    formula = formula.translate(_LATEX)
    # As math-verify reads each of them: without quotes and the like, which could part a command.
    as_read = [normalize_latex(part, _NORMALIZATION) for part in _BETWEEN.split(formula)]
    return formula if all(map(_is_bounded, (formula, *as_read))) else None


def _right_answer(answer: Any) -> str:
    text = right_text(answer)
    if not text.rpartition("####")[2].strip():
        raise ValueError(f"answer: expected text or a number, got {answer!r:.80}")
    return text


def _score(given: str, right: str) -> float | None:
    global _is_warned
    given, right = _without_layout(given), _without_layout(right)
    expected = read_formula(right, is_right=True)
    if expected and not given:  # as right answers are tried before a run: nothing is parsed
        return 0.0
    if expected is not None and not _parse_latex(expected):
        if not _is_warned:
            _is_warned = True
            log.warning("math: the right answer %.80r cannot be parsed and gets no score (logged once)", right)
        return None
    if _strip_marks(given) == _strip_marks(right):
        return 1.0
    formula = read_formula(given)
    if formula is None or expected is None or not _is_worked_out(expected):  # compared as text only
        return 0.0
    return float(formula == expected or _are_equal(expected, formula))


def _without_layout(text: str) -> str:
    """``text`` without markdown's bold, signs of currency and spaces of other kinds; what follows the last ####."""
    text = (text.rpartition("####")[2].strip() or text) if _BOXED not in text else text
    text = _BOLD.sub(r"\2", text).replace("\\$", "")
    parts = text.split("$")
    if len(parts) % 2 == 0 or any(_WORD.search(_GROUPED.sub("", part)) for part in parts[1::2]):  # of money
        text = _MONEY.sub("", text)
    text = _ABOUT.split(text)[-1]
    kinds = ("Sc", "So", "Zs", "Cf")  # currency, pictures, spaces, no width
    return "".join(
        c if c.isascii() or c in _SYMBOLS or unicodedata.category(c) not in kinds else " " for c in text
    ).strip()


@lru_cache(maxsize=10_000)
def _are_equal(right: str, given: str) -> bool:
    parsed = _parse_latex(given)
    return bool(parsed) and _is_worked_out(given) and bool(verify(_parse_latex(right), parsed, timeout_seconds=None))


@lru_cache(maxsize=1_000)
def _parse_latex(formula: str) -> list[Any]:
    """What math-verify makes of LaTeX in dollars; nothing if it can make nothing of it."""
    config = [LatexExtractionConfig()]  # not ExprExtractionConfig, which lets sympy `eval`
    return list(parse(formula, config, fallback_mode="no_fallback", parsing_timeout=None))


@lru_cache(maxsize=1_000)
def _is_worked_out(formula: str) -> bool:
    """Whether math-verify makes plain mathematics of a formula: no sum, integral or limit, no name that is a call."""
    return all(_is_value(part) for whole in _parse_latex(formula) for part in _parts(whole))


def _parts(whole: Any) -> Iterator[Any]:
    """All that was parsed; beside a set or a chain of relations that is as it was written, which is compared, too."""
    for part in preorder_traversal(whole) if isinstance(whole, Basic | MatrixBase) else (whole,):
        yield part
        for written in getattr(part, "_unsorted_args", ()):
            yield from _parts(written)


def _is_value(part: Any) -> bool:
    is_call = "(" in str(getattr(part, "name", ""))  # of a symbol; sympy writes it into Python code as it is
    return isinstance(part, str | Basic | MatrixBase) and not (is_call or isinstance(part, ExprWithLimits | Limit))


def _strip_marks(text: str) -> str:
    r"""``text`` without its box, its dollars and a \text{…} around all of it."""
    inner = _without_marks(text)
    grouped = _GROUPED.fullmatch(inner)
    return normalize(grouped[1] if grouped else inner)


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
    if _REFUSED.search(formula) or any(int(power) > _MAX_POWER for power in _POWER.findall(formula)):
        return False
    return all(int(number) <= _MAX_FACTORIAL for number in re.findall(r"([0-9]+)\s*!", formula))
