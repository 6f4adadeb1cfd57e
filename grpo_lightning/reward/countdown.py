"""A reward for the game of Countdown: reach the target with the numbers. Odd text of the model scores 0."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from grpo_lightning.reward.accuracy import answer_text, prepend_prefills
from grpo_lightning.reward.spec import score_rows

_MAX_CHARACTERS = 500  # characters of an expression
_SIGNS = str.maketrans("\u00d7\u00b7\u00f7\u2212\u2013[]", "**/--()")  # times, dot, division, minus, dash
_LATEX = (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("\\left", ""), ("\\right", ""), ("$", ""))
_OPERATIONS: dict[type, Callable[..., Fraction]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.UAdd: operator.pos, ast.USub: operator.neg},
}
_EXPRESSION = re.compile(r"[-+*/() \t\n0-9]+")


def countdown(
    completions: Sequence[str],
    numbers: Sequence[Any],
    target: Sequence[Any],
    *,
    use_all: bool,
    prefills: Sequence[str] = (),
    **_: Any,
) -> list[float | None]:
    """1.0 if the answer text is an expression of the numbers, + - * / and brackets that equals the target, else 0.0.

    The arithmetic is exact. × ÷ − and their LaTeX commands are accepted, and so is "expression = target".
    The task of TinyZero: github.com/Jiayi-Pan/TinyZero, examples/data_preprocess/countdown.py

    Args:
        completions: [B]
        numbers: [B] the integers that may be used, each at most once.
        target: [B] the numbers to reach.
        use_all: Whether each number has to be used.
        prefills: [B] see `prepend_prefills`.
    """

    def score(completion: str, given: Any, goal: Any) -> float:
        text = answer_text(completion).translate(_SIGNS)
        if len(text) > _MAX_CHARACTERS:
            return 0.0
        for command, sign in _LATEX:
            text = text.replace(command, sign)
        expression, equals, result = text.partition("=")
        used: Counter[int] = Counter()
        allowed, goal = Counter(map(int, given)), Fraction(goal)
        try:
            is_reached = _value(expression, used) == goal and (not equals or _value(result, Counter()) == goal)
        except (ArithmeticError, SyntaxError, ValueError, RecursionError, MemoryError):
            return 0.0
        return float(is_reached and (used == allowed if use_all else used <= allowed))

    return score_rows(score, prepend_prefills(completions, prefills), numbers, target)


def _value(text: str, used: "Counter[int]") -> Fraction:
    """The value of integers joined by + - * / and brackets, which are counted in ``used``; a ValueError for others."""

    def count(digits: str) -> Fraction:
        used[int(digits)] += 1
        return Fraction(digits)

    if not _EXPRESSION.fullmatch(text):
        raise ValueError("expected integers and + - * / ( )")
    return evaluate(text, count)


def evaluate(text: str, number: Callable[[str], Fraction]) -> Fraction:
    """The exact value of an untrusted expression of numbers, + - * / and brackets; ``number`` reads a number's text.

    Raises:
        ValueError: It is something else, as are the parser's SyntaxError, RecursionError and MemoryError.
        ZeroDivisionError: It divides by zero.
    """
    text = " ".join(text.split())

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return number(text[node.col_offset : node.end_col_offset])  # 0.1 is a tenth, as no float is
        if not isinstance(node, ast.UnaryOp | ast.BinOp) or type(node.op) not in _OPERATIONS:
            raise ValueError(f"expected arithmetic, got {type(node).__name__}")
        values = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        return _OPERATIONS[type(node.op)](*map(value, values))

    return value(ast.parse(text, mode="eval").body)
