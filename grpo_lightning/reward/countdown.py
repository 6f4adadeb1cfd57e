"""A reward for the game of Countdown: reach the target with the numbers. Odd text of the model scores 0."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from grpo_lightning.reward.text import answer_text

_MAX_CHARACTERS = 500  # characters of an expression
_SIGNS = str.maketrans("\u00d7\u00b7\u00f7\u2212\u2013[]", "**/--()")  # times, dot, division, minus, dash
_LATEX = (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("\\left", ""), ("\\right", ""), ("$", ""))
_OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_KINDS = (ast.BinOp, ast.UnaryOp, ast.Constant, ast.UAdd, ast.USub, *_OPERATIONS)
_EXPRESSION = re.compile(r"[-+*/() \t\n0-9]+")


def countdown(
    completions: Sequence[str], numbers: Sequence[Any], target: Sequence[Any], *, use_all: bool, **_: Any
) -> list[float | None]:
    """1.0 if the answer text is an expression of the numbers, + - * / and brackets that equals the target, else 0.0.

    The arithmetic is exact. × ÷ − and their LaTeX commands are accepted, and so is "expression = target".
    The task of TinyZero: github.com/Jiayi-Pan/TinyZero, examples/data_preprocess/countdown.py

    Args:
        completions: [B]
        numbers: [B] the integers that may be used, each at most once.
        target: [B] the numbers to reach.
        use_all: Whether each number has to be used.
    """
    return [
        float(_reaches(answer_text(text), Counter(map(int, given)), Fraction(goal), use_all=use_all))
        for text, given, goal in zip(completions, numbers, target, strict=True)
    ]


def _reaches(text: str, allowed: "Counter[int]", target: Fraction, *, use_all: bool) -> bool:
    if len(text) > _MAX_CHARACTERS:
        return False
    text = text.translate(_SIGNS)
    for command, sign in _LATEX:
        text = text.replace(command, sign)
    text, equals, result = text.partition("=")
    tree, stated = _tree(text), _tree(result) if equals else None
    if tree is None or (equals and stated is None):
        return False
    used = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    if used != allowed if use_all else not used <= allowed:
        return False
    try:
        return _value(tree) == target and (stated is None or _value(stated) == target)
    except (ZeroDivisionError, RecursionError):
        return False


def _tree(text: str) -> ast.expr | None:
    """``text`` as integers joined by + - * / and brackets; None if it is something else."""
    if not _EXPRESSION.fullmatch(text):
        return None
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if all(isinstance(node, _KINDS) for node in ast.walk(tree)) else None


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        raise TypeError(f"expected arithmetic, got {type(node).__name__}")
    left, right = _value(node.left), _value(node.right)
    return _OPERATIONS[type(node.op)](left, right)
