r"""The formula in a text, as LaTeX, and a bound on the work that it gives to a parser and to sympy.

That work grows with the numbers in a formula and with how it is nested, far faster than with its length. The bounds are
above what answers of mathematical data sets need; what they leave rarely takes more than a second.
"""

import re

from latex2sympy2_extended.math_normalization import normalize_latex
from math_verify import LatexExtractionConfig

from grpo_lightning.reward.accuracy import last_number

_CHANGES = LatexExtractionConfig().normalization_config
"""What math-verify changes in a formula before it reads it."""
_LONGEST = 300  # characters of a formula
_MOST_DIGITS = 50  # of one number
_LARGEST_POWER = 1_000  # also of a product of nested powers
_LARGEST_FACTORIAL = 200  # and number of a binomial
_DEEPEST = 8  # brackets within brackets; at 20 the parser takes seconds
_DEEPEST_FUNCTION = 4  # sin sin sin sin x, exp counting twice; at 5 sympy takes seconds, at 8 hours
_MOST_FORMULAS = 6  # $…$ in one answer, joined by "and"
_MOST = (  # of what sympy needs exponentially long for
    (re.compile(r"[(\[]"), 30),
    (re.compile(r"\||\\[lr]?[vV]ert|\\mid"), 8),
    (re.compile(r"/|:|\\div"), 10),
    (re.compile(r"_"), 8),
    (re.compile(r"!"), 20),
    (re.compile(r"\\[A-Za-z]{20}"), 0),  # no command, so a product of letters
)
_BOXED = "\\boxed{"
_BETWEEN = re.compile(r"\$|\\[()\[\]]")
"""What begins and ends the formulas of a text."""
_PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_LATEX: dict[str, str | int | None] = {
    "\u00b0": "^{\\circ}",
    "\u00b1": "\\pm ",
    "\u00b2": "^{2}",
    "\u00b3": "^{3}",
    "\u00d7": "\\times ",
    "\u00f7": "\\div ",
    "\u03c0": "\\pi ",
    "\u2212": "-",
    "\u221a": "\\sqrt ",
    "\u221e": "\\infty ",
    "\u2264": "\\le ",
    "\u2265": "\\ge ",
}
_OTHER = re.compile(rf"[^ -~\n\t{''.join(_LATEX)}]")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sqrt|sin|cos|tan|log|exp|inf)(?![A-Za-z]))[A-Za-z]{3,}")
_GROUPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|begin|end|operatorname|mathbb|mbox)\s?\{([^{}]*)\}")
_DIGITS = re.compile(r"[0-9]+")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\\])([0-9.]+)[eE]([-+]?[0-9]+)")
_WORK = re.compile(r"\\(?:i*int|oint|sum|prod|lim)")  # commands that sympy would carry out, and reads from \intx, too
_NESTING = re.compile(
    r"(?P<function>\\(?:(?:ar|arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|lg|log|[lr]?(?:floor|ceil))"
    r"|(?P<exp>\\exp|e\s?\^))(?P<bracket>\s*(?=[(\[{]))?|[,=<>()\[\]{}]"
)
_POWER_SIGN = re.compile(r"\*\*|\^")
_POWER_OF_NUMBER = re.compile(r"[0-9)}\]]\s*(?:\^|\*\*)")
_ROUND_EXPONENT = re.compile(r"\^\s?(?:\(([^()]*)\)|(-?[0-9]+))")
_NAMES = re.compile(r"(?<![\\A-Za-z])(pi|sqrt|sin|cos|tan|log|ln|exp)(?![A-Za-z])")


def read_formula(text: str) -> str | None:
    r"""The formula in ``text`` as LaTeX in dollars, "" if there is none; None if it could take long to be parsed.

    It is what stands in the last \boxed{…}, else in $…$ (several of them as they are), else the whole; of a sentence
    without a formula the last number, in any language. A percent sign at the end is left out.
    """
    inner = _without_marks(text)
    if len(inner) > _LONGEST:
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
        is_simple = inner.count("$") + 2 * (inner.count("\\[") + inner.count("\\(")) <= 2 * _MOST_FORMULAS
        formula = inner if is_simple and _BOXED not in inner else ""
    elif _WORD.search(_GROUPED.sub("", inner)):
        number = last_number(inner)
        formula = "" if number is None else f"${number}$"
    else:
        formula = f"${inner if chr(92) in inner else _latex(inner)}$" if inner else ""
    formula = formula.translate(str.maketrans(_LATEX))
    # As math-verify reads each of them: without quotes and the like, which could part a command.
    as_read = [normalize_latex(part, _CHANGES) for part in _BETWEEN.split(formula)]
    return formula if all(map(_is_bounded, (formula, *as_read))) else None


def plain(text: str) -> str:
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
    if _WORK.search(formula) or any(len(digits) > _MOST_DIGITS for digits in _DIGITS.findall(formula)):
        return False
    if any(len(sign.findall(formula)) > most for sign, most in _MOST):
        return False
    brackets, functions = _depths(formula)
    if brackets > _DEEPEST or functions > _DEEPEST_FUNCTION:
        return False
    return _nested_power(formula) <= _LARGEST_POWER and _has_small_factorials(formula)


def _depths(formula: str) -> tuple[int, int]:
    """How deep brackets are nested, and how deep functions are at most: one without brackets may end at a comma."""
    depth = deepest = deepest_function = 0
    functions: list[tuple[int, int]] = []  # of each that has not ended, the depth of brackets that it needs, and weight
    for mark in _NESTING.finditer(formula):
        depth += (mark[0] in "([{") - (mark[0] in ")]}")
        if mark["function"]:
            begins = depth + (mark["bracket"] is not None)
            functions.append((begins, 2 if mark["exp"] else 1))
        elif mark[0] in ")]},=<>":
            ends_at = depth - (mark[0] in ",=<>")
            functions = [function for function in functions if function[0] <= ends_at]
        deepest = max(deepest, depth)
        deepest_function = max(deepest_function, sum(weight for _, weight in functions))
    return deepest, deepest_function


def _nested_power(formula: str) -> int:
    """A bound of the powers: the largest exponent times those of brackets; for towers more than what is allowed."""
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
    return not re.search(r"[!)}\]]\s*!", formula) and all(int(number) <= _LARGEST_FACTORIAL for number in numbers)


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
    exponent = re.compile(r"[0-9]+|[^0-9]?").match(formula, start)
    return (exponent[0], exponent.end()) if exponent else ("", start)
