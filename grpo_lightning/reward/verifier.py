"""reasoning_gym's verifiers, and what may be given to them.

Some evaluate the model's text as Python or let sympy do so, and some do work that grows with the numbers in it. Text
that could run code, or run for long, does not reach them: it is a wrong answer. A row of downloaded data whose own
answer or formula could run code is an error. Verifiers whose work no look at the text can bound run in worker
processes that are ended after a time.
"""

import ast
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from grpo_lightning.output.terminal import one_line
from grpo_lightning.reward.engine import pool

Scorer = Callable[..., float]

_MOST_SECONDS = 5.0  # a right answer takes less than half a second
_LONGEST = 10_000  # characters of an answer; right ones of the default configurations have up to about 5,000
_LONGEST_FORMULA = 1_000  # characters of a formula
_LARGEST_CONSTANT = 10**12
_LARGEST_POWER = 64
_DEEPEST_CALL = 2  # log(cos(x)) is 2
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
_FORMULA = (*_ARITHMETIC, ast.Name, ast.Load)
_ALGEBRA = (*_FORMULA, ast.Call)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UAdd, ast.USub)
_FUNCTIONS = frozenset(("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "sqrt"))
_LITERAL = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Load, ast.UnaryOp, ast.unaryop)


def make_scorer(task: str, config: Mapping[str, Any]) -> Scorer:
    """The verifier of a task: ``scorer(answer=…, entry=…) -> float``.

    Args:
        task: A reasoning_gym dataset name.
        config: Arguments of the data set where they are not its defaults; some verifiers read them.

    Raises:
        ValueError: There is no such task.
    """
    if task in TIMED:
        return _Timed(_Verifier(task, dict(config)))
    return _own_scorer(task, config)


def may_be_verified(task: str, answer: str, expected: str) -> bool:
    """Whether the verifier of ``task`` can be trusted with ``answer``.

    Args:
        task: A reasoning_gym dataset name.
        answer: What the model answers.
        expected: The right answer, which is always allowed where the verifier does not evaluate it.
    """
    if answer == expected.strip() and task not in GATES:
        return True
    return len(answer) <= max(_LONGEST, 4 * len(expected)) and GATES.get(task, _anything)(answer)


def check_row(task: str, answer: Any, metadata: Mapping[str, Any]) -> None:
    """Check what the verifier of ``task`` evaluates of a row of data, which may have been downloaded.

    Args:
        task: A reasoning_gym dataset name.
        answer: The right answer.
        metadata: The entry's.

    Raises:
        ValueError: It could run code.
    """
    name, is_allowed = _EVALUATED.get(task, ("", _anything))
    text = answer if name == "answer" else metadata.get(name)
    if text is not None and not (isinstance(text, str) and is_allowed(text)):
        raise ValueError(
            f"task {task!r}, {name}={one_line(repr(text)[:80])}: the task's verifier would evaluate it; allowed are "
            "numbers, names, lists and elementary functions"
        )


def is_harmless(text: str) -> bool:
    """Whether `eval` of ``text``, or sympy's parser, calls nothing but elementary functions."""
    tree = _parsed(text)
    return tree is not None and all(
        node.func.id in _FUNCTIONS
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        else isinstance(node, _FORMULA) and not isinstance(getattr(node, "value", None), str | bytes)
        for node in ast.walk(tree)
    )


def is_literal(text: str) -> bool:
    """Whether `eval` of ``text`` builds nothing but lists, or fails at once because it is no expression."""
    return all(_is_literal(form) for form in {text.lstrip(" \t"), text.strip()})  # as `eval`, and as some verifiers do


def _is_literal(text: str) -> bool:
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):
        return False
    return all(isinstance(node, _LITERAL) for node in ast.walk(tree))


def is_arithmetic(text: str) -> bool:
    """Whether ``text`` is numbers of bounded size joined by + - * / and brackets."""
    tree = _formula(text)
    return tree is not None and all(_is_allowed(node, _ARITHMETIC, _OPERATORS) for node in ast.walk(tree))


def is_algebra(text: str) -> bool:
    """Whether ``text`` is arithmetic with names, elementary functions of one argument and powers of bounded size."""
    tree = _formula(text)
    if tree is None or not all(_is_allowed(node, _ALGEBRA, (*_OPERATORS, ast.Pow)) for node in ast.walk(tree)):
        return False
    try:
        return _power(tree) <= _LARGEST_POWER and _calls(tree) <= _DEEPEST_CALL
    except RecursionError:
        return False


def is_short(text: str) -> bool:
    """Whether ``text`` has the size of a formula."""
    return len(text) <= _LONGEST_FORMULA


def has_small_exponents(text: str) -> bool:
    """Whether a number in ``text`` has at most three digits of exponent: `Fraction` writes them out."""
    return re.search(r"[eE][-+]?[\d_]{4}", text.replace(",", "")) is None


def has_small_steps(text: str) -> bool:
    """Whether no number in ``text`` has more than two digits: moves are carried out one by one."""
    return re.search(r"\d{3}", text) is None


GATES: Mapping[str, Callable[[str], bool]] = {
    "binary_matrix": is_literal,
    "n_queens": is_literal,
    "spiral_matrix": is_literal,
    "string_insertion": is_literal,
    "countdown": is_arithmetic,
    "puzzle24": is_arithmetic,
    "intermediate_integration": is_algebra,
    "polynomial_multiplication": is_algebra,
    "simple_integration": is_algebra,
    "propositional_logic": is_short,
    "coin_flip": has_small_exponents,
    "rubiks_cube": has_small_steps,
    "rush_hour": has_small_steps,
}
"""The texts that the verifier of each task can be trusted with; any text for the others. Names are no literals: where a
verifier evaluates its text, `oracle_answer` is the right answer."""

_EVALUATED: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    "bitwise_arithmetic": ("problem", is_harmless),
    "intermediate_integration": ("integrand", is_harmless),
    "number_sorting": ("answer", is_literal),
    "polynomial_multiplication": ("answer", is_harmless),
    "simple_integration": ("integrand", is_harmless),
}
"""Task -> what its verifier evaluates of a row (the answer, or a key of the metadata), and the texts that it may be."""

TIMED = frozenset(("intermediate_integration", "propositional_logic", "rubiks_cube", "simple_integration"))
"""Tasks whose verifiers simplify formulas, try all truth values or turn a cube."""


def begin(scorer: Scorer, **arguments: Any) -> Callable[[], float]:
    """A function that returns ``scorer(**arguments)``, on which a worker process works until it is called."""
    return scorer.begin(**arguments) if isinstance(scorer, _Timed) else partial(scorer, **arguments)


class _Verifier:
    """A task's verifier that can be pickled: a worker makes its own when it receives it, before the time is counted."""

    preload = ("reasoning_gym.factory",)

    def __init__(self, task: str, config: Mapping[str, Any]) -> None:
        self._task, self._config = task, config

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._scorer = _own_scorer(self._task, self._config)

    def __call__(self, **arguments: Any) -> float:
        return float(self._scorer(**arguments))


class _Timed:
    """A verifier in a worker process.

    Raises:
        TimeoutError: A call took too long.
        RuntimeError: The verifier raised in a call, or its worker died.
    """

    def __init__(self, verifier: Callable[..., float]) -> None:
        self._verifier = verifier

    def __call__(self, **arguments: Any) -> float:
        return self.begin(**arguments)()

    def begin(self, **arguments: Any) -> Callable[[], float]:
        return partial(_finished, pool.submit(self._verifier, [arguments], seconds=_MOST_SECONDS))


def _finished(pending: pool.Pending) -> float:
    (outcome,) = pending.result()
    if isinstance(outcome, pool.Failure):
        raise (TimeoutError if outcome.kind == "timeout" else RuntimeError)(outcome.message)
    return float(outcome)


def _own_scorer(task: str, config: Mapping[str, Any]) -> Scorer:
    from reasoning_gym.factory import create_dataset, get_score_answer_fn  # takes two seconds; not every run needs it

    scorer: Scorer = create_dataset(task, **config).score_answer if config else get_score_answer_fn(task)
    return scorer


def _anything(_: str) -> bool:
    return True


def _formula(text: str) -> ast.Expression | None:
    return _parsed(text) if is_short(text) else None


def _parsed(text: str) -> ast.Expression | None:
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_allowed(node: ast.AST, kinds: tuple[type, ...], operators: tuple[type, ...]) -> bool:
    if isinstance(node, ast.operator | ast.unaryop):
        return isinstance(node, operators)
    if isinstance(node, ast.Constant):
        value = node.value
        return isinstance(value, int | float) and not isinstance(value, bool) and value <= _LARGEST_CONSTANT
    if isinstance(node, ast.Call):
        is_elementary = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        return is_elementary and len(node.args) == 1
    return isinstance(node, kinds)


def _power(node: ast.AST) -> float:
    """A bound of the factors that the powers in ``node`` have when they are multiplied out; infinite for towers."""
    powers = [_power(child) for child in ast.iter_child_nodes(node)]
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)):
        return max(powers, default=1.0)
    base, _, tower = powers
    if tower > 1:
        return math.inf
    exponent = 2.0  # a name's, so that a tower of names is one too
    for child in ast.walk(node.right):
        if isinstance(child, ast.Constant) and isinstance(child.value, int | float):
            size = max(child.value, 1 / child.value if child.value else 0)
            exponent *= 1 + size  # above both the sum and the product of the constants
    return base * exponent


def _calls(node: ast.AST) -> int:
    """How deep function calls are nested."""
    return isinstance(node, ast.Call) + max((_calls(child) for child in ast.iter_child_nodes(node)), default=0)
