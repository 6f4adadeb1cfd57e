"""Environments that are generators: replayed for every turn, and caught where they are not the same again."""

import pickle
from functools import partial

import pytest

from grpo_lightning.environment import Environment, GeneratorEnvironment, check_columns
from tests.support import environments
from tests.support.environments import begun, told
from tests.support.workers import limited

WHERE = pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in_workers"])


@pytest.fixture(autouse=True, scope="module")
def one_worker():
    with limited(1):
        yield


@WHERE
def test_a_generator_is_played_again_for_every_turn(timeout):
    episodes = begun(GeneratorEnvironment(environments.countdown), {"start": [10, 10, 10, 99]}, timeout=timeout)
    assert told(episodes, 0, "3", "2", "5") == ["7 left", "5 left", None]
    assert told(episodes, 1, "2", "9") == ["8 left", None]
    assert told(episodes, 2, "1", "stop") == ["9 left", None]
    assert told(episodes, 3, "1", "1", "1", "1") == ["98 left", "97 left", "96 left", None]
    assert episodes.scores == [
        ((0, 0.125), (1, 0.125), (2, 1.0)),
        ((1, -1.0),),
        ((0, 0.125),),
        ((1, 0.125), (3, 0.125)),
    ]
    assert episodes.over == [True, True, True, False]
    assert episodes.failed == [None] * 4


@WHERE
def test_its_random_numbers_are_the_same_again(timeout):
    episodes = begun(GeneratorEnvironment(environments.shop), {"goal": ["tea"] * 6}, timeout=timeout)
    stocks = [told(episodes, row, "look", "look again") for row in range(6)]
    assert all(first == again for first, again in stocks)
    assert len({first for first, _ in stocks}) > 1
    for row, (stock, _) in enumerate(stocks):
        assert told(episodes, row, "done") == [None]
        assert episodes.scores[row] == ((2, float("tea" in stock)),)


@pytest.mark.parametrize(
    ("function", "turns", "failure"),
    [
        (environments.moody, 2, "is not a function of its turns: replied '0."),
        (environments.forgetful, 2, "is not a function of its turns: ended at turn 1, where it had replied 'go on'"),
        (environments.hasty, 1, "yielded 'hello' before it was told a turn"),
        (environments.absent, 1, "ended before its first `yield`"),
        (environments.pausing, 1, "yielded None: allowed is text or (text, finite number)"),
        (environments.returning, 1, "returned 'reply': allowed is a finite number or None"),
    ],
)
def test_what_is_no_play_is_a_failure(function, turns, failure):
    episodes = begun(GeneratorEnvironment(function), {"start": [1]})
    assert told(episodes, 0, *["x"] * turns)[-1] is None
    assert episodes.failed[0].startswith(f"answer: {failure}")


def long(start):
    """Reply with more than is allowed, and count."""
    said = yield
    while said:
        said = yield f"{start}{'x' * 1000}"


def test_a_reply_that_was_cut_is_recognized():
    episodes = begun(GeneratorEnvironment(long), {"start": [1]}, max_reply=100)
    first, second = told(episodes, 0, "a", "b")
    assert first == second == "1" + "x" * 73 + "… (1001 characters in all)"
    assert len(first) == 100
    assert episodes.failed == [None]


def test_what_is_bound_is_kept_and_what_is_named_is_found():
    played = GeneratorEnvironment(partial(environments.countdown, start=3))
    check_columns(Environment(played, 4), ["start"])
    episodes = begun(played, {"start": [10]})
    assert told(episodes, 0, "3") == [None]
    assert episodes.scores == [((0, 1.0),)]  # 3 - 3 = 0
    with pytest.raises(ValueError, match="parameter 'start' is no column"):
        check_columns(Environment(GeneratorEnvironment(environments.countdown), 4), [])
    assert told(begun(pickle.loads(pickle.dumps(played)), size=1), 0, "2") == ["1 left"]


def test_only_generators_are_played():
    with pytest.raises(ValueError, match="expected a generator function"):
        GeneratorEnvironment(environments.guess)

    def knowing(turns):
        yield

    with pytest.raises(ValueError, match="without the parameter 'turns'"):
        GeneratorEnvironment(knowing)
