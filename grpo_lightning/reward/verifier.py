"""reasoning_gym's verifiers, and what may be given to them.

Some evaluate the model's text as Python or let sympy do so, and some do work that grows with the numbers in it. These
run in worker processes that are ended after a time, and text that could run code does not reach them: it is a wrong
answer.
"""

import ast
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from grpo_lightning.config.redaction import single_line
from grpo_lightning.reward import workers

Scorer = Callable[..., float]

_MOST_SECONDS = 5.0  # a right answer takes less than half a second
_LONGEST = 10_000  # characters of an answer; right ones of the default configurations have up to about 5,000
_FORMULA = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop, ast.Name, ast.Load)
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
    if task in GATES:
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
            f"task {task!r}, {name}={single_line(repr(text)[:80])}: the task's verifier would evaluate it; allowed are "
            "numbers, names, lists and elementary functions"
        )


def is_harmless(text: str) -> bool:
    """Whether `eval` of ``text``, or sympy's parser, calls nothing but elementary functions."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(
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


def _anything(_: str) -> bool:
    return True


GATES: Mapping[str, Callable[[str], bool]] = {
    "binary_matrix": is_literal,
    "n_queens": is_literal,
    "spiral_matrix": is_literal,
    "string_insertion": is_literal,
    "countdown": is_harmless,
    "puzzle24": is_harmless,
    "intermediate_integration": is_harmless,
    "polynomial_multiplication": is_harmless,
    "simple_integration": is_harmless,
    "propositional_logic": _anything,
    "coin_flip": _anything,
    "rubiks_cube": _anything,
    "rush_hour": _anything,
}
"""Tasks whose verifiers run in a worker: they evaluate text, simplify formulas, try all truth values or carry out moves
one by one. To each, the texts that it can be trusted with; names are no literals: where a verifier evaluates its text,
`oracle_answer` is the right answer."""

_EVALUATED: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    "bitwise_arithmetic": ("problem", is_harmless),
    "intermediate_integration": ("integrand", is_harmless),
    "number_sorting": ("answer", is_literal),
    "polynomial_multiplication": ("answer", is_harmless),
    "simple_integration": ("integrand", is_harmless),
}
"""Task -> what its verifier evaluates of a row (the answer, or a key of the metadata), and the texts that it may be."""


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
        return partial(_finished, workers.submit(self._verifier, [arguments], seconds=_MOST_SECONDS))


def _finished(pending: workers.Pending) -> float:
    (outcome,) = pending.result()
    if isinstance(outcome, workers.Failure):
        raise (TimeoutError if outcome.kind == "timeout" else RuntimeError)(outcome.message)
    return float(outcome)


def _own_scorer(task: str, config: Mapping[str, Any]) -> Scorer:
    from reasoning_gym.factory import create_dataset, get_score_answer_fn  # takes two seconds; not every run needs it

    scorer: Scorer = create_dataset(task, **config).score_answer if config else get_score_answer_fn(task)
    return scorer
