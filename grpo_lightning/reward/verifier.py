"""reasoning_gym's verifiers, and what may be given to them.

Those that evaluate the model's text as Python, or do work that grows with the numbers in it, run in worker processes
that are ended after a time. Text that could run code does not reach them: it is wrong.
"""

import ast
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from reasoning_gym.factory import create_dataset, get_score_answer_fn

from grpo_lightning.console import single_line
from grpo_lightning.reward import workers
from grpo_lightning.reward.spec import describe_error

log = logging.getLogger(__name__)

MAX_SECONDS = 5.0  # a right answer takes less than half a second
_MAX_CHARACTERS = 10_000  # of an answer; right ones of the default configurations have up to about 5,000
_FORMULA = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop, ast.Name, ast.Load)
_FUNCTIONS = frozenset(("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "sqrt"))
_LITERAL = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Load, ast.UnaryOp, ast.unaryop)

_verifiers: dict[str, "Verifier"] = {}
_warned: set[str] = set()


def begin(
    text: str, answer: str | None, task: str, metadata: Mapping[str, Any], config: Mapping[str, Any]
) -> Callable[[], float]:
    """Start to score an answer, see `accuracy.reasoning_gym`: a function that returns the score, in [0, 1].

    What takes long has begun in a worker process when this returns. Text that a verifier cannot be given, or raises on,
    scores 0; the first of a task that it raises on is logged.
    """
    source = str(metadata.get("source_dataset", task))  # of a composite, the data set the entry comes from
    own_config = config if source == task else {}
    key = f"{source} {dict(own_config)!r}"
    verifier = _verifiers[key] = _verifiers.get(key) or Verifier(source, own_config)
    _check_row(source, answer, metadata)
    right = answer.strip() if isinstance(answer, str) else ""
    if not may_be_verified(source, text, right):
        is_right = source in GATES and text == right != ""
        return lambda: float(is_right)  # of what must not be evaluated, only the data's own text is right
    entry = {"question": "", "answer": answer, "metadata": metadata}
    result = _start(verifier, source, text, entry)

    def score() -> float:
        value = result()
        if not isinstance(value, workers.Failure):
            return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0
        if right and value.kind != "timeout" and may_be_verified(source, right, right):
            broken = _start(verifier, source, answer or "", entry)()
            if isinstance(broken, workers.Failure):
                raise ValueError(
                    f"task {source!r}: its verifier raised {broken.message} on the data set's own answer "
                    f"{answer!r:.80}; expected its unchanged `answer` and `metadata`"
                )
        if source not in _warned:
            _warned.add(source)
            message = "task %r: its verifier failed on a completion, which scores 0 (logged once): %.200s"
            log.warning(message, source, value.message)
        return 0.0

    return score


def may_be_verified(task: str, text: str, answer: str) -> bool:
    """Whether the verifier of a task can be given what the model answers; ``answer`` is the right one."""
    if task not in GATES and text == answer:
        return True
    return len(text) <= max(_MAX_CHARACTERS, 4 * len(answer)) and (task not in GATES or GATES[task](text))


def is_harmless(text: str) -> bool:
    """Whether `eval` of a text, or sympy's parser, calls nothing but elementary functions."""
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
    """Whether `eval` of a text builds nothing but lists, or fails at once because it is no expression."""
    for form in (text.lstrip(" \t"), text.strip()):  # as `eval` reads it, and as some verifiers do
        try:
            tree = ast.parse(form, mode="eval")
        except (SyntaxError, ValueError):
            continue
        except (RecursionError, MemoryError):
            return False
        if not all(isinstance(node, _LITERAL) for node in ast.walk(tree)):
            return False
    return True


GATES: Mapping[str, Callable[[str], bool]] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), is_literal),
    **dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), is_harmless),
    **dict.fromkeys(("intermediate_integration", "simple_integration"), is_harmless),
    **dict.fromkeys(("propositional_logic", "coin_flip", "rubiks_cube", "rush_hour"), lambda _: True),
}
"""Task whose verifier runs in a worker -> the texts that it can be given. Such verifiers evaluate text, simplify
formulas, try all truth values or carry out moves one by one."""

_EVALUATED: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    "bitwise_arithmetic": ("problem", is_harmless),
    "intermediate_integration": ("integrand", is_harmless),
    "number_sorting": ("answer", is_literal),
    "polynomial_multiplication": ("answer", is_harmless),
    "simple_integration": ("integrand", is_harmless),
}
"""Task -> what its verifier evaluates of a row, the answer or a key of the metadata, and the texts that it may be."""


class Verifier:
    """A task's verifier; a worker makes its own when it unpickles it, before the time is counted."""

    def __init__(self, task: str, config: Mapping[str, Any]) -> None:
        self._arguments = (task, dict(config))
        self._score = create_dataset(task, **config).score_answer if config else get_score_answer_fn(task)

    def __reduce__(self) -> tuple[Any, ...]:
        return Verifier, self._arguments

    def __call__(self, answer: str, entry: Mapping[str, Any]) -> float:
        return float(self._score(answer=answer, entry=entry))


def _start(verifier: Verifier, task: str, text: str, entry: Mapping[str, Any]) -> Callable[[], Any]:
    """A function that returns the score or a `workers.Failure`."""
    if task in GATES:
        return workers.submit(verifier, {"answer": text, "entry": entry}, seconds=MAX_SECONDS).result

    def call() -> float | workers.Failure:
        try:
            return verifier(text, entry)
        except Exception as error:
            return workers.Failure("exception", describe_error(error))

    return call


def _check_row(task: str, answer: Any, metadata: Mapping[str, Any]) -> None:
    """Check what a verifier evaluates of a row of data, which may have been downloaded."""
    if task not in _EVALUATED:
        return
    name, is_allowed = _EVALUATED[task]
    text = answer if name == "answer" else metadata.get(name)
    if text is not None and not (isinstance(text, str) and is_allowed(text)):
        raise ValueError(
            f"task {task!r}, {name}={single_line(repr(text)[:80])}: the task's verifier would evaluate it; expected "
            "numbers, names, lists and elementary functions"
        )
