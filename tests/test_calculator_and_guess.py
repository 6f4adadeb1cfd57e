"""The calculator and the guessing game by hand, and their problems: demonstrations are replied to as they say."""

import random

import pytest

from grpo_lightning.data.demonstrations import Numbers
from grpo_lightning.environment import BadCall
from grpo_lightning.environment.builtin import calculator, guess
from tests.support.composed import ROOT
from tests.test_readme import FENCE


@pytest.mark.parametrize(
    "expression, expected",
    [
        ("47*86+359", "4401"),  # 4042 + 359
        ("359+47*86", "4401"),  # products first
        ("2-3-4", "-5"),  # from left to right
        ("2*(3+4)", "14"),
        ("7/2", "3.5"),
        ("1/3", "0.333333"),
        ("0.1+0.2", "0.3"),  # exact, not in binary
        (" 1.5 +.5 ", "2"),
    ],
)
def test_results_by_hand(expression, expected):
    reply = calculator([f"calc({expression})="])
    if expression.endswith("/7"):
        assert float(reply) == pytest.approx(float(expected))
    else:
        assert reply == expected


@pytest.mark.parametrize(
    "expression, problem",
    [
        ("9**9**9", "not an expression"),
        ("12*", "not an expression"),
        ("1,2", "',' is not allowed"),
        ("1e9", "'e' is not allowed"),
        ("__import__('os')", '"\'" is not allowed'),
        ("1/0", "division by zero"),
        ("1+" * 100 + "1", "more than 200 characters"),
        ("(" * 100 + ")" * 100, "not an expression"),
    ],
)
def test_what_cannot_be_calculated_is_an_error_that_the_model_reads(expression, problem):
    reply = calculator([f"calc({expression})="])
    if problem is None:  # deep, and at the parser's limit or below it
        assert reply in ("-1", "1") or "not an expression" in reply
    else:
        assert reply.startswith("error: ")
        assert problem in reply
    assert len(reply) < 120


def test_calls_and_answers():
    assert calculator(["calc(2*3)=", "<answer>7</answer>"]) is None
    assert calculator(["calc(2*3)=", "calc(6*7)="]) == "42"  # the last turn counts
    assert calculator(["first calc(1+1)= and then calc(2+2)="]) == "4"  # its last call does
    assert calculator(["calc(2*3)=7, so it is 7"]) == "6"  # what the model says itself changes nothing
    assert calculator(["calc(2*3)=6 <answer>6</answer>"]) is None
    assert calculator(["calc(2*3)= <answer>6"]) == "6"  # no complete answer
    assert calculator(["it is 6"]) is None
    assert calculator(["calc(2*3"]) == "error: a call looks like calc(12*34)="
    assert [type(calculator([text])) for text in ("calc(2*3", "calc(2**3)=", "calc(2*3)=")] == [BadCall, BadCall, str]
    assert calculator([""]) is None


def play(turns, number, *, seed=0, **settings):
    return guess(turns, number, random.Random(seed), **{"guesses": 5, "highest": 31, **settings})


def test_a_game_by_hand():
    assert play(["16"], 21) == "higher"
    assert play(["16", "24"], 21) == "lower"
    assert play(["16", "24", " 21\n"], 21) == 1.0
    assert play(["21"], 21, guesses=1) == 1.0  # the last guess may be right
    assert play(["1", "2", "3", "4"], 21) == "higher"
    assert play(["1", "2", "3", "4", "5"], 21) == 0.0
    assert play(["1", "2", "3", "4", "21"], 21) == 1.0
    for odd in ("", "twenty", "-3", "2.5", "٣", "9" * 5000, "021"):
        assert play([odd], 21) == "a whole number from 1 to 31"
    assert play(["99"], 21) == "lower"
    for number in (0, 32):
        with pytest.raises(ValueError, match=f"column 'number': {number}; allowed: 1 to 31"):
            play(["16"], number)


def test_the_games_of_the_page_are_this_one():
    page = (ROOT / "docs" / "episodes.md").read_text(encoding="utf-8")
    code = [block for language, block in FENCE.findall(page) if block.startswith("# my_game.py")]
    assert [len(block.splitlines()) for block in code] == [8, 8]  # with the line that names the file
    names: dict = {}
    exec("\n".join(code), names)
    rng = random.Random(0)
    for _ in range(300):
        number, turns = rng.randint(1, 31), [str(rng.randint(1, 31)) for _ in range(5)]
        expected = [play(turns[:n], number) for n in range(1, 6)]
        expected = expected[: expected.index(next(one for one in expected if isinstance(one, float))) + 1]
        game = names["guess_played"](number)
        replies = [next(game)]
        for n, reply in enumerate(expected, 1):
            assert names["guess"](turns[:n], number) == reply
            try:
                replies.append(game.send(turns[n - 1]))
            except StopIteration as end:
                replies.append(end.value)
        assert replies == [None, *expected]


def test_random_replies_say_nothing_of_the_number_and_are_those_of_the_generator():
    turns = ["16", "16", "16", "16"]
    replies = [
        tuple(play(turns[:n], number, seed=seed, random_replies=1.0) for n in range(1, 5))
        for seed in range(400)
        for number in (1, 31)
    ]
    assert replies[::2] == replies[1::2]  # whatever the number
    assert len(set(replies)) == 16  # each turn has a draw of its own
    assert {play(turns, 1, seed=seed, random_replies=0.0) for seed in range(50)} == {"lower"}
    share = sum(play(turns, 1, seed=seed, random_replies=0.5) == "higher" for seed in range(2000)) / 2000
    assert share == pytest.approx(0.25, abs=0.04)  # half are drawn, half of those are wrong; 4 deviations
    assert play(["21"], 21, random_replies=1.0) == 1.0
    assert play([*turns, "1"], 21, random_replies=1.0) == 0.0


def talk(columns):
    """The turns and replies of a row's demonstration."""
    messages = columns["completion"]
    assert [message["role"] for message in messages[:2]] == ["assistant", "user"][: len(messages)]
    texts = [message["content"] for message in messages]
    return texts[::2], texts[1::2]


@pytest.mark.parametrize(
    "careful_rate, won",
    [
        (0.0, 0.151),  # 1 - (30/31)^5
        (1.0, 0.856),  # measured with 12,400 games
        (0.3, 0.363),  # 0.3 * 0.856 + 0.7 * 0.151
    ],
)
def test_demonstrated_games_are_replied_to_as_demonstrated(careful_rate, won):
    right = 0
    for prompt, columns in Numbers(4030, seed=5, highest=31, guesses=5, careful_rate=careful_rate):
        assert prompt == "Guess my number from 1 to 31. You have 5 guesses."
        assert columns["answer"] == str(columns["number"])
        turns, replies = talk(columns)
        assert len(turns) == len(replies) + 1 <= 5
        for number, reply in enumerate(replies):
            assert play(turns[: number + 1], columns["number"]) == reply
        score = play(turns, columns["number"])
        assert score == 1.0 or (score, len(turns)) == (0.0, 5)
        right += score
        if careful_rate == 1.0:
            check_thirds(turns, replies)
    assert abs(right / 4030 - won) < 4 * (won * (1 - won) / 4030) ** 0.5


def check_thirds(turns, replies):
    """Every guess leaves at least a third, rounded down, of the numbers that are left on either side of it."""
    least, most = 1, 31
    for turn, reply in zip(turns, [*replies, None], strict=True):
        third = (most - least + 1) // 3
        assert least + third <= int(turn) <= most - third
        least, most = (int(turn) + 1, most) if reply == "higher" else (least, int(turn) - 1)
