"""Flawed demonstrations for the supervised stage: short reasoning in tags, each step of it wrong now and then.

A slip is carried on to the answer. Slips are spread over many values, so a policy that imitates them is often wrong
when it samples, while its likeliest answer stays right.
"""

import operator
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import reasoning_gym

from grpo_lightning.data.source import Made, Row, rate

Reason: TypeAlias = Callable[[Mapping[str, Any], random.Random, float], tuple[str, str]]
"""(entry's metadata, random numbers, probability that a step slips) -> the reasoning, and the answer it comes to."""

_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
# A slip adds one of these: together they may be likely, each alone is rare.
_SHIFTS = (*range(-11, 0), *range(1, 12))


def _compute(first: int, operations: Sequence[tuple[str, int]], rng: random.Random, slips: float) -> tuple[str, str]:
    """Operations from left to right, one equation each, and the last result; later ones follow from a wrong one."""
    result, equations = first, []
    for symbol, number in operations:
        value = _OPERATORS[symbol](result, number) + (rng.choice(_SHIFTS) if rng.random() < slips else 0)
        equations.append(f"{result}{symbol}{number}={value}")
        result = value
    return " ".join(equations), str(result)


def _expression(metadata: Mapping[str, Any], rng: random.Random, slips: float) -> tuple[str, str]:
    """Sums and products: "45 + 38 - 12" becomes "45+38=83 83-12=71"."""
    expression = metadata["expression"]
    if not re.fullmatch(r"-?\d+( [-+*] -?\d+)+", expression):
        raise ValueError(f"expression: expected whole numbers joined by +, - or *, got {expression!r}")
    first, *rest = expression.split()
    return _compute(int(first), list(zip(rest[::2], map(int, rest[1::2]), strict=True)), rng, slips)


def _equation(metadata: Mapping[str, Any], rng: random.Random, slips: float) -> tuple[str, str]:
    """Linear equations: "57 - x = 12" becomes "57-12=45", "3*x + 4 = 10" becomes "10-4=6 6/3=2"."""
    variable, equation = metadata["variable"], metadata["equation"]
    left, _, right = equation.replace(" ", "").partition("=")
    term = re.search(rf"([+-]?)(?:(\d+)\*)?{variable}", left)
    constant = re.fullmatch(r"[+-]?\d*", left.replace(term[0], "", 1)) if term else None
    if term is None or constant is None:
        raise ValueError(f"equation: expected one variable {variable!r} and numbers, got {equation!r}")
    number, division = int(constant[0] or 0), [("/", int(term[2]))] if term[2] else []
    if term[1] == "-":
        return _compute(number, [("-", int(right)), *division], rng, slips)
    return _compute(int(right), [("+" if number < 0 else "-", abs(number)), *division], rng, slips)


def _backward(metadata: Mapping[str, Any], rng: random.Random, slips: float) -> tuple[str, str]:
    """Words: "sun" is spelled "s u n", then read backward; a slip takes any letter of the alphabet for one of them."""
    letters = [rng.choice(string.ascii_lowercase) if rng.random() < slips else letter for letter in metadata["word"]]
    return " ".join(letters), "".join(reversed(letters))


_REASONS: Mapping[str, Reason] = {
    "basic_arithmetic": _expression,
    "chain_sum": _expression,
    "products": _expression,
    "simple_equations": _equation,
    "spell_backward": _backward,
}


def demonstrate(task: str, entry: Mapping[str, Any], rng: random.Random, *, slip_rate: float) -> str:
    """A completion that reasons and answers, without an end of sequence.

    Args:
        task: Name of a reasoning_gym data set.
        entry: One of its entries.
        rng: Decides where the demonstration slips, and to what.
        slip_rate: Probability of each step of the reasoning to be wrong, 0 to 1.

    Returns:
        ``<think>reasoning</think><answer>answer</answer>``.

    Raises:
        ValueError: If there are no demonstrations of the task, or its configuration asks for more than they show.
    """
    if task not in _REASONS:
        raise ValueError(f"task: expected one of {sorted(_REASONS)}, got {task!r}")
    reasoning, answer = _REASONS[task](entry["metadata"], rng, slip_rate)
    return f"<think>{reasoning}</think><answer>{answer}</answer>"


class Demonstrations(Made):
    """Questions with demonstrated completions, cycling over the tasks; item i is a function of (seed, i).

    reasoning_gym makes its entry i from the number seed + i, so two ranges [seed, seed + size) that do not overlap have
    no entry's seed in common.

    Args:
        tasks: Name of a reasoning_gym data set -> its configuration without size and seed.
        size: Number of demonstrations.
        seed: First of the entries' seeds.
        slip_rate: Probability of each step of the reasoning to be wrong, 0 to 1.

    Raises:
        ValueError: If there is no task, or none of its demonstrations, or a size or a rate is not allowed.
    """

    def __init__(self, tasks: Mapping[str, Mapping[str, Any]], size: int, seed: int, slip_rate: float) -> None:
        if not tasks or not set(tasks) <= set(_REASONS):
            raise ValueError(f"tasks: expected one or more of {sorted(_REASONS)}, got {list(tasks)}")
        super().__init__(size, seed)
        self._sources = [
            (task, reasoning_gym.create_dataset(task, size=size, seed=seed, **config)) for task, config in tasks.items()
        ]
        self._slip_rate = rate("slip_rate", slip_rate)

    def _row(self, number: int) -> Row:
        """Question and columns of one demonstration: completion, answer, task and metadata."""
        index = number - self._seed
        task, source = self._sources[index % len(self._sources)]
        entry = source[index]
        rng = random.Random(f"demonstration {number}")
        completion = demonstrate(task, entry, rng, slip_rate=self._slip_rate)
        columns = {"answer": entry["answer"], "task": task, "metadata": entry["metadata"]}
        return entry["question"], {"completion": completion, **columns}
