"""Built-in environments by hand: calculator, guessing game, second chances, and gymnasium in words."""

import pickle
import random
from functools import partial

import pytest

from grpo_lightning.environment import BadCall, Environment, Episodes
from grpo_lightning.environment.builtin import Retry, calculator, guess
from grpo_lightning.environment.gymnasium import Gymnasium, strip_ansi
from grpo_lightning.reward import PerCompletion
from grpo_lightning.reward.accuracy import exact, numeric, reasoning_gym
from tests.support.composed import ROOT
from tests.test_readme import FENCE


def test_the_calculator_by_hand():
    for expression, expected in [
        ("47*86+359", "4401"),  # 4042 + 359
        ("7/2", "3.5"),
        ("0.1+0.2", "0.3"),  # exact, not in binary
        (" 1.5 +.5 ", "2"),
    ]:
        assert calculator([f"calc({expression})="]) == expected
    for expression, problem in [
        ("9**9**9", "not an expression"),
        ("__import__('os')", '"\'" is not allowed'),
        ("1/0", "division by zero"),
        ("1+" * 100 + "1", "more than 200 characters"),
    ]:
        reply = calculator([f"calc({expression})="])
        assert isinstance(reply, BadCall)
        assert reply.startswith("error: ")
        assert problem in reply
        assert len(reply) < 120
    assert calculator(["calc(2*3)=", "<answer>7</answer>"]) is None
    assert calculator(["calc(2*3)=", "calc(6*7)="]) == "42"  # the last turn counts
    assert calculator(["first calc(1+1)= and then calc(2+2)="]) == "4"  # its last call does
    assert calculator(["calc(2*3)=6 <answer>6</answer>"]) is None
    assert calculator(["calc(2*3)= <answer>6"]) == "6"  # no complete answer
    assert calculator(["it is 6"]) is None
    assert calculator(["calc(2*3"]) == "error: a call looks like calc(12*34)="


# The game


def play(turns, number, *, seed=0, **settings):
    return guess(turns, number, random.Random(seed), **{"guesses": 5, "highest": 31, **settings})


def test_a_game_by_hand():
    assert play(["16"], 21) == "higher"
    assert play(["16", "24"], 21) == "lower"
    assert play(["16", "24", " 21\n"], 21) == 1.0
    assert play(["21"], 21, guesses=1) == 1.0  # the last guess may be right
    assert play(["1", "2", "3", "4"], 21) == "higher"
    assert play(["1", "2", "3", "4", "5"], 21) == 0.0
    for odd in ("", "twenty", "-3", "2.5", "٣", "9" * 5000, "021"):
        assert play([odd], 21) == "a whole number from 1 to 31"
    assert play(["99"], 21) == "lower"
    for number in (0, 32):
        with pytest.raises(ValueError, match=f"column 'number': expected 1 to 31, the highest, got {number}"):
            play(["16"], number)


def test_the_games_of_the_page_are_this_one():
    page = (ROOT / "docs" / "episodes.md").read_text(encoding="utf-8")
    code = [block for language, block in FENCE.findall(page) if block.startswith("# my_game.py")]
    assert len(code) == 2
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


# Second chances

REPLY = "That is wrong. Try again."


def retried(verifier, *turns, **row):
    environment = Retry(verifier, max_turns=3, discount=0.5, reply=REPLY)
    row.setdefault("prompt", "?")
    return [environment(turns=list(turns[: number + 1]), **row) for number in range(len(turns))]


def prompted(prompts, completions):
    return [float(prompt == completion) for prompt, completion in zip(prompts, completions)]


def longest(text, prompt, limit=3):
    return float(len(text) <= limit and text in prompt)


def test_a_right_answer_ends_it_and_a_wrong_one_may_be_tried_again():
    assert retried(exact, "7", answer="7") == [1.0]  # .5 ** 0
    assert retried(exact, "6", "5", "<think>6</think> 7", answer="7") == [REPLY, REPLY, 0.25]
    assert retried(exact, "", "\ud800", "7" * 10_000, answer="7") == [REPLY, REPLY, 0.0]
    assert retried(lambda completions: [0.5], "a", "b", "c") == [REPLY, REPLY, 0.0]
    assert retried(lambda completions: [None], "a") == [None]
    assert retried(partial(numeric, tolerance=1.0), "about 1,200", answer="#### 1200.5", tolerance=0.1) == [1.0]
    row = {"answer": "olleh", "task": "spell_backward", "metadata": {"word": "hello"}}
    assert retried(reasoning_gym, "hello", "olleh", **row) == [REPLY, 0.5]
    assert retried(prompted, "a", "b", prompt="b") == [REPLY, 0.5]
    assert retried(PerCompletion(longest), "abcd", "bc", prompt="abcd") == [REPLY, 0.5]
    with pytest.raises(ValueError, match="'task' is no column"):
        retried(reasoning_gym, "hello", answer="olleh")
    with pytest.raises(ValueError, match="discount=2: must be a number from 0 to 1"):
        Retry(exact, max_turns=3, discount=2, reply=REPLY)


# Gymnasium


def lake(**changes):
    actions = {"left": 0, "down": 1, "right": 2, "up": 3}
    return Gymnasium("FrozenLake-v1", **{"kwargs": {"is_slippery": False}, "actions": actions} | changes)


def played(environment, *turns, timeout=None, member=0, **columns):
    """The replies and scores of an episode."""
    columns = {name: [value] for name, value in columns.items()}
    episodes = Episodes(Environment(environment, 10, timeout), ["?"], columns, [(0, 0, member)])
    replies = []
    for turn in turns:
        episodes.step(0, turn)
        replies.append(episodes.reply(0))
    assert episodes.failed == [None]
    return replies, dict(episodes.scores[0]), episodes.metrics["episode/bad_calls"]


def test_a_walk_over_the_ice():
    assert lake().observed(0) == "[S]FFF\nFHFH\nFFFH\nHFFG"
    right, further = (f"  (Right)\n{row}\nFHFH\nFFFH\nHFFG" for row in ("S[F]FF", "SF[F]F"))
    turns = ["right", " RIGHT\n", "jump", "<answer>Down</answer>", "down", "down", "right"]
    replies, scores, bad_calls = played(lake(), *turns, seed=0)
    jump = "error: 'jump' is no action; the actions are left, down, right, up"
    assert replies[:3] == [right, further, jump]
    assert [reply.splitlines()[0] for reply in replies[3:6]] == ["  (Down)"] * 3
    assert replies[6] is None
    assert scores == {0: 0.0, 1: 0.0, 3: 0.0, 4: 0.0, 5: 0.0, 6: 1.0}  # the present
    assert bad_calls == 1
    assert played(lake(), "down", "right", seed=0)[1] == {0: 0.0, 1: 0.0}  # into a hole
    assert played(pickle.loads(pickle.dumps(lake())), *turns, timeout=30.0, seed=0) == (replies, scores, bad_calls)


def test_the_seed_decides_what_chance_does():
    slippery = lake(kwargs={})
    first = [played(slippery, *["right"] * 3, seed=seed) for seed in range(8)]
    assert first == [played(slippery, *["right"] * 3, seed=seed, member=1) for seed in range(8)]
    assert len({str(one) for one in first}) > 2
    assert len({str(played(slippery, *["right"] * 3, member=member)) for member in range(8)}) > 2


def test_observations_without_a_rendering_are_shown_as_text():
    assert Gymnasium("Blackjack-v1").observed(3).startswith("(")
    assert strip_ansi("\x1b[41mS\x1b[0mF\x1b[34;1mR\x1b[0m\x1b[2K\x1b[0mx\x1b[0m") == "[S]F[R]x"
    for settings, problem in [
        ({"id": "FrozenLake-v2"}, "id: cannot make the environment FrozenLake-v2"),
        ({"id": "FrozenLake-v1", "actions": {"left": 7}}, r"actions={'left': 7}: expected .* of Discrete\(4\)"),
    ]:
        with pytest.raises(ValueError, match=problem):
            Gymnasium(**settings)
