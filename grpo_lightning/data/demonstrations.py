"""Demonstrations for the supervised stage: files, or synthetic ones that are mediocre on purpose.

Row i of a synthetic source is a function of its seed and of i. Most rows do not use what there is to learn, or slip now
and then, so that GRPO has something to repair in a policy that was taught by them.
"""

import itertools
import operator
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_lightning.config.rules import messages_problem
from grpo_lightning.data.datamodule import GeneratedRows, PromptData, Row, Source
from grpo_lightning.data.files import Inline, JsonLines, check_prompt, data_module
from grpo_lightning.types import Message


class FileDemonstrations(JsonLines):
    """Prompts with the completions to imitate, of JSON lines or parquet files.

    A row has a prompt and a completion, each as text or chat messages, and any further columns. Of several turns the
    completion is a list of messages: the assistant's, each but the last followed by one of the user or a tool. Or one
    column has a whole conversation, of which everything from the assistant's first message on is the completion.

    Raises:
        ValueError: A row is malformed; names its place and column.
    """

    def __init__(self, path: str | Sequence[str], prompt_column: str, completion_column: str) -> None:
        super().__init__(path, prompt_column=prompt_column)
        self._rows = [
            _demonstration(*row, completion_column, f"{self.origin(i)}, column {completion_column!r}")
            for i, row in enumerate(self._rows)
        ]


def _demonstration(prompt: Any, columns: dict[str, Any], column: str, place: str) -> Row:
    further = {name: value for name, value in columns.items() if name != column}
    completion = columns.get(column)
    if completion is None and isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[-1], dict):
        first = next((n for n, message in enumerate(prompt) if n and message["role"] == "assistant"), len(prompt) - 1)
        prompt, completion = prompt[:first], prompt[first:]
    if isinstance(completion, list) and completion and all(isinstance(message, dict) for message in completion):
        messages: Any = check_prompt(completion, place)
        if problem := messages_problem(messages):
            raise ValueError(f"{place}: {problem}")
        completion = messages if len(messages) > 1 else messages[0]["content"]
    elif not isinstance(completion, str) or not completion:
        raise ValueError(
            f"{place}: expected text, or messages of the assistant in turn with replies, got {completion!r:.80}"
        )
    return prompt, {**further, "completion": completion}


def prompts(
    *,
    path: str | Sequence[str] | None,
    validation_path: str | Sequence[str] | None,
    prompt_column: str,
    completion_column: str,
    train: Callable[[], Source],
    validation: Callable[[], Source],
    **settings: Any,
) -> PromptData:
    """Data module of `FileDemonstrations`, or without a ``path`` of the sources ``train`` and ``validation``."""
    if path is None:
        return PromptData(train=train, validation=validation, **settings)
    source = partial(FileDemonstrations, prompt_column=prompt_column, completion_column=completion_column)
    return data_module(source, path, validation_path, settings)


# Reasoning in tags, for the shipped policy. A slip is carried on to the answer. Slips are spread over many values, so a
# policy that imitates them is often wrong when it samples, while its likeliest answer stays right.

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_SHIFTS = (*range(-11, 0), *range(1, 12))  # a slip adds one of these: together they may be likely, each alone is rare


def _compute(first: int, operations: Sequence[tuple[str, int]], rng: random.Random, slips: float) -> tuple[str, str]:
    """Operations from left to right, one equation each, and the last result; later ones follow from a wrong one."""
    result, equations = first, []
    for symbol, number in operations:
        value = _OPERATORS[symbol](result, number) + (rng.choice(_SHIFTS) if rng.random() < slips else 0)
        equations.append(f"{result}{symbol}{number}={value}")
        result = value
    return " ".join(equations), str(result)


def _expression(metadata: Mapping[str, Any], rng: random.Random, slips: float) -> tuple[str, str]:
    """An arithmetic expression worked out step by step: "45 + 38 - 12" becomes "45+38=83 83-12=71"."""
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


_REASONING: Mapping[str, Callable[[Mapping[str, Any], random.Random, float], tuple[str, str]]] = {
    "basic_arithmetic": _expression,
    "chain_sum": _expression,
    "products": _expression,
    "simple_equations": _equation,
    "spell_backward": _backward,
}
"""Task -> (entry's metadata, random numbers, probability that a step slips) -> the reasoning and its answer."""


def demonstrate(task: str, entry: Mapping[str, Any], rng: random.Random, *, slip_rate: float) -> str:
    """A completion ``<think>reasoning</think><answer>answer</answer>`` for an entry of a reasoning_gym task."""
    reasoning, answer = _REASONING[task](entry["metadata"], rng, slip_rate)
    return f"<think>{reasoning}</think><answer>{answer}</answer>"


class ReasoningDemonstrations(GeneratedRows):
    """Questions with demonstrated completions, cycling over the tasks.

    reasoning_gym makes its entry i from the number seed + i, so two ranges [seed, seed + size) that do not overlap have
    no entry's seed in common.

    Args:
        tasks: Name of a reasoning_gym data set -> its configuration without size and seed; None leaves it out.
        size: Number of demonstrations.
        seed: First of the entries' seeds.
        slip_rate: Probability of each step of the reasoning to be wrong, 0 to 1.
    """

    def __init__(self, tasks: Mapping[str, Mapping[str, Any] | None], size: int, seed: int, slip_rate: float) -> None:
        import reasoning_gym  # takes seconds, which the other sources can do without

        chosen = {task: config for task, config in tasks.items() if config is not None}
        if not chosen or not set(chosen) <= set(_REASONING):
            raise ValueError(f"tasks: expected one or more of {sorted(_REASONING)}, got {list(chosen)}")
        super().__init__(size, seed)
        self._sources = [
            (task, reasoning_gym.create_dataset(task, size=size, seed=seed, **config))
            for task, config in chosen.items()
        ]
        self._slip_rate = slip_rate

    def _row(self, number: int) -> Row:
        index = number - self._seed
        task, source = self._sources[index % len(self._sources)]
        entry = source[index]
        completion = demonstrate(task, entry, random.Random(f"demonstration {number}"), slip_rate=self._slip_rate)
        columns = {"answer": entry["answer"], "task": task, "metadata": entry["metadata"]}
        return entry["question"], {"completion": completion, **columns}


def arithmetic(smallest: int, largest: int, operators: Sequence[str], held_out: int, validation: bool) -> Inline:
    """Questions such as "What is 7 * 8? Answer with the number only." about all pairs of numbers of a range.

    Args:
        smallest: The least number of a pair.
        largest: The greatest.
        operators: Of ``+``, ``-`` and ``*``.
        held_out: How many pairs training does not have, in neither order and with no operator.
        validation: Whether to take those instead of the others.
    """
    pairs = list(itertools.combinations_with_replacement(range(smallest, largest + 1), 2))
    if not 0 < held_out < len(pairs):
        raise ValueError(f"held_out={held_out}: expected 1 to {len(pairs) - 1}, as {len(pairs)} pairs exist")
    random.Random("arithmetic").shuffle(pairs)
    chosen = pairs[:held_out] if validation else pairs[held_out:]
    problems = [(a, symbol, b) for pair in chosen for a, b in sorted({pair, pair[::-1]}) for symbol in operators]
    question = "What is {} {} {}? Answer with the number only."
    rows = [{"prompt": question.format(*one), "answer": str(_OPERATORS[one[1]](one[0], one[2]))} for one in problems]
    return Inline(rows, "data.arithmetic")


class ProductProblems(GeneratedRows):
    """Problems for environment=calculator such as ``Calculate 473*86.``, whose answers have five digits.

    The column ``completion`` demonstrates the calculator's use, ``calc(473*86)=``, in a share ``call_rate`` of the
    rows, and the mere right answer in the others.
    """

    def __init__(self, size: int, seed: int, call_rate: float) -> None:
        super().__init__(size, seed)
        self._call_rate = call_rate

    def _row(self, number: int) -> Row:
        rng = random.Random(f"Products {number}")
        first, second = rng.randint(334, 999), rng.randint(32, 99)
        result = str(first * second)
        turns = [f"<answer>{result}</answer>"]
        if rng.random() < self._call_rate:
            turns = [f"calc({first}*{second})=", result, *turns]
        return f"Calculate {first}*{second}.", {"answer": result, "completion": _messages(turns)}


class GuessingGames(GeneratedRows):
    """Games for environment=guess, in which a number from 1 to ``highest`` is guessed, which the prompt does not tell.

    It is the column ``number``, and as a text the column ``answer``; ``highest`` games in a row have each number once.
    The column ``completion`` demonstrates a game of at most ``guesses`` turns. In a share ``careful_rate`` of the games
    the player guesses a number in the middle third of those that the replies have left, in the others any number.
    """

    def __init__(self, size: int, seed: int, highest: int, guesses: int, careful_rate: float) -> None:
        super().__init__(size, seed)
        self._highest, self._guesses, self._careful_rate = highest, guesses, careful_rate

    def _row(self, number: int) -> Row:
        rng = random.Random(f"Numbers {number}")
        number = number % self._highest + 1
        prompt = f"Guess my number from 1 to {self._highest}. You have {self._guesses} guesses."
        return prompt, {"number": number, "answer": str(number), "completion": _messages(self._game(number, rng))}

    def _game(self, number: int, rng: random.Random) -> list[str]:
        """Guesses in turn with the replies to them."""
        turns, low, high = list[str](), 1, self._highest
        is_careful = rng.random() < self._careful_rate
        for _ in range(self._guesses):
            third = (high - low + 1) // 3
            guessed = rng.randint(low + third, high - third) if is_careful else rng.randint(1, self._highest)
            turns.append(str(guessed))
            if guessed == number:
                break
            low, high = (guessed + 1, high) if guessed < number else (low, guessed - 1)
            turns.append("higher" if guessed < number else "lower")
        return turns if len(turns) % 2 else turns[:-1]


def _messages(turns: Sequence[str]) -> list[Message]:
    """The assistant's turns and the user's replies to them, in turn."""
    return [{"role": "user" if number % 2 else "assistant", "content": text} for number, text in enumerate(turns)]
