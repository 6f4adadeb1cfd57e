"""Synthetic demonstrations reason correctly, slip as often as asked, and are a function of (seed, index)."""

import operator
import random
import re
from itertools import pairwise

import pytest
import reasoning_gym

from grpo_lightning.data.demonstrations import Numbers, ReasoningDemonstrations, demonstrate
from grpo_lightning.environment.builtin import guess

TASKS = {
    "basic_arithmetic": {"max_terms": 4, "max_digits": 1, "operators": ["+", "-"], "allow_parentheses": False},
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "simple_equations": {"max_terms": 3, "max_value": 30, "operators": ["+", "-"], "operators_weights": [0.5, 0.5]},
    "spell_backward": {"min_word_len": 3, "max_word_len": 6},
}
SHAPE = re.compile(r"<think>([^<>]+)</think><answer>([^<>\s]+)</answer>")


def read(completion):
    return SHAPE.fullmatch(completion).groups()


def calculate(text):
    first, symbol, second = re.fullmatch(r"(-?\d+)([-+*])(-?\d+)", text).groups()
    return {"+": operator.add, "-": operator.sub, "*": operator.mul}[symbol](int(first), int(second))


def test_right_demonstration_is_worked_by_hand():
    for task, metadata, answer, expected in [
        ("chain_sum", {"expression": "45 + 38 - 12"}, "71", "45+38=83 83-12=71"),
        ("products", {"expression": "4 * 7 * 6"}, "168", "4*7=28 28*6=168"),
        ("simple_equations", {"equation": "x + 57 = 12", "variable": "x"}, "-45", "12-57=-45"),
        ("simple_equations", {"equation": "e - 57 = 12", "variable": "e"}, "69", "12+57=69"),
        ("simple_equations", {"equation": "57 - x = 12", "variable": "x"}, "45", "57-12=45"),
        ("simple_equations", {"equation": "56 - 98*e = -1218", "variable": "e"}, "13", "56--1218=1274 1274/98=13"),
        ("spell_backward", {"word": "culla"}, "alluc", "c u l l a"),
    ]:
        text = demonstrate(task, {"metadata": metadata, "answer": answer}, random.Random(0), slip_rate=0.0)
        assert text == f"<think>{expected}</think><answer>{answer}</answer>"


@pytest.mark.parametrize("task", sorted(TASKS))
def test_without_errors_every_demonstration_is_right_and_follows(task):
    judge = reasoning_gym.create_dataset(task, size=200, seed=5, **TASKS[task])
    demonstrations = ReasoningDemonstrations({task: TASKS[task]}, size=200, seed=5, slip_rate=0.0)
    for index in range(200):
        question, columns = demonstrations[index]
        reasoning, answer = read(columns["completion"])
        assert question == judge[index]["question"]
        assert columns["task"] == task
        assert judge.score_answer(answer, {"answer": columns["answer"], "metadata": columns["metadata"]}) == 1.0
        if task == "spell_backward":
            assert reasoning.split(" ") == list(reversed(answer))
        else:
            results = [equation.split("=") for equation in reasoning.split(" ")]
            assert all(calculate(left) == int(right) for left, right in results)
            assert results[-1][1] == answer
            assert all(left.startswith(before) for (_, before), (left, _) in pairwise(results))


def test_the_same_item_whatever_was_read_before_and_another_with_another_seed():
    one, two = (ReasoningDemonstrations(TASKS, size=60, seed=3, slip_rate=0.5) for _ in range(2))
    forward = [one[index] for index in range(60)]
    assert forward == [two[index] for index in reversed(range(60))][::-1]
    assert [columns["task"] for _, columns in forward] == list(TASKS) * 12
    later = ReasoningDemonstrations(TASKS, size=60, seed=3 + 55, slip_rate=0.5)
    assert [later[0][0], later[0][1]["completion"]] == [forward[55][0], forward[55][1]["completion"]]  # from seed + i
    assert later[5][0] not in [question for question, _ in forward]
    for index in (60, -1):
        with pytest.raises(IndexError, match="expected 0 to 59"):
            one[index]


@pytest.mark.parametrize(
    "careful_rate, won",
    [
        (1.0, 0.856),  # measured with 12,400 games
        (0.3, 0.363),  # 0.3 * 0.856 + 0.7 * 0.151
    ],
)
def test_demonstrated_games_are_replied_to_as_demonstrated(careful_rate, won):
    right = 0
    for prompt, columns in Numbers(4030, seed=5, highest=31, guesses=5, careful_rate=careful_rate):
        assert prompt == "Guess my number from 1 to 31. You have 5 guesses."
        assert columns["answer"] == str(columns["number"])
        roles, texts = zip(*((message["role"], message["content"]) for message in columns["completion"]))
        assert roles == tuple(("assistant", "user")[i % 2] for i in range(len(roles)))
        turns, replies = texts[::2], texts[1::2]
        assert len(turns) == len(replies) + 1 <= 5
        played = [
            guess(turns[:n], columns["number"], random.Random(0), guesses=5, highest=31)
            for n in range(1, len(turns) + 1)
        ]
        assert played[:-1] == list(replies)
        assert played[-1] == 1.0 or (played[-1], len(turns)) == (0.0, 5)
        right += played[-1]
    assert abs(right / 4030 - won) < 4 * (won * (1 - won) / 4030) ** 0.5
