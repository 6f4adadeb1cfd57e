"""A calculator that the model may ask, by a call in its text: ``calc(12*34)=``."""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from grpo_lightning.environment.answer import BadCall
from grpo_lightning.reward.text import tag

OPENING, CLOSING = "calc(", ")="
_ALLOWED = frozenset("0123456789.+-*/() ")
_LONGEST = 200
"""Characters of an expression: numbers stay below 10^200."""
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS: Mapping[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_EXAMPLE = f"a call looks like {OPENING}12*34{CLOSING}"


def calculator(turns: Sequence[str]) -> str | None:
    """The result of the call with which the model has ended its turn; without a call the episode is over.

    A turn with a complete ``<answer>…</answer>`` is the last one, whatever else it says. Of several calls in a turn the
    last one counts. A call that cannot be calculated is no end: the reply says what is wrong with it.

    Args:
        turns: What the model has said so far; the last one is new.

    Returns:
        The result, such as ``408``, or ``error: …``; None where nothing was asked, so that the rewards judge the turn.

    Example:
        ``calculator(["calc(12*34)="])`` is ``"408"``, ``calculator([…, "<answer>408</answer>"])`` is None.
    """
    text = turns[-1]
    start = text.rfind(OPENING)
    if start < 0 or tag(text, "answer") is not None:
        return None
    expression, closing, _ = text[start + len(OPENING) :].partition(CLOSING)
    if not closing:
        return BadCall(f"error: {_EXAMPLE}")
    try:
        return written(value(expression))
    except ValueError as error:
        return BadCall(f"error: {error}")


def value(expression: str) -> Fraction:
    """The exact value of an expression of decimal numbers, ``+``, ``-``, ``*``, ``/`` and brackets.

    Args:
        expression: At most 200 characters. It is untrusted: only the operators named above are carried out.

    Raises:
        ValueError: It is longer, has other characters, is no such expression, or divides by zero.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"more than {_LONGEST} characters")
    if strange := sorted(set(expression) - _ALLOWED):
        raise ValueError(f"{strange[0]!r} is not allowed, only numbers, + - * / and brackets")
    try:
        text = expression.strip()
        return _value(ast.parse(text, mode="eval").body, text)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError):  # the parser's, of many brackets
        raise ValueError(f"not an expression; {_EXAMPLE}") from None


def _value(node: ast.expr, text: str) -> Fraction:
    """The value of a part of ``text``, which is ASCII."""
    match node:
        case ast.Constant(value=int() | float()):
            return Fraction(text[node.col_offset : node.end_col_offset])  # 0.1 is a tenth, as no float is
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, text), _value(right, text))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _SIGNS:
            return _SIGNS[type(op)](_value(operand, text))
    raise ValueError(f"not an expression; {_EXAMPLE}")


def written(number: Fraction) -> str:
    """A whole number in all its digits, any other one as a decimal number with six significant digits."""
    if number.denominator == 1:
        return str(number.numerator)
    return f"{float(number):.6g}"
