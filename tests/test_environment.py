"""Environments: how they are called, what they may return, and what becomes of those that fail."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
from grpo_lightning.reward.engine import pool

from grpo_lightning.distributed import signals
from grpo_lightning.distributed.signals import Preempted
from grpo_lightning.environment import Environment, EpisodeError, Episodes
from tests.support import environments
from tests.support.environments import begun, told
from tests.support.workers import limited

WHERE = pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in_workers"])


@pytest.fixture(autouse=True, scope="module")
def one_worker():
    with limited(1):
        yield


@WHERE
def test_an_episode_is_played_turn_by_turn(timeout):
    episodes = begun(environments.guess, {"number": [5, 20, 7, 3]}, timeout=timeout)
    assert episodes.is_slow is (timeout is not None)
    assert told(episodes, 0, "3", " 9 ", "5") == ["higher", "lower", None]
    assert told(episodes, 1, "21", "blue") == ["lower", None]
    assert told(episodes, 2, "1", "2", "3", "9") == ["higher", "higher", "higher", None]  # the fourth would go on: cut
    assert episodes.scores == [((1, 0.25), (2, 1.0)), ((0, 0.25),), ((3, 0.25),), ()]
    assert episodes.over == [True, True, False, False]
    assert episodes.failed == [None] * 4
    assert episodes.turns[0] == ["3", " 9 ", "5"]
    assert episodes.replies[0] == ["higher", "lower"]
    assert episodes.metrics == {"episode/failed": 0.0, "episode/bad_calls": 0.0, "episode/cut_replies": 0.0}
    assert episodes.seconds > 0


def test_a_call_gets_what_it_names_as_copies():
    environments.seen.clear()
    parts = ["a"]
    episodes = begun(partial(environments.noting, mood="bound"), {"number": [5], "parts": [parts], "mood": ["column"]})
    assert told(episodes, 0, "one", "two") == ["go on", "go on"]
    assert parts == ["a"]
    assert environments.seen == [
        (["one"], 5, "bound", {"parts": "['a']", "replies": "[]", "prompt": "'p'"}),
        (["one", "two"], 5, "bound", {"parts": "['a']", "replies": "['go on']", "prompt": "'p'"}),
    ]
    assert episodes.turns == [["one", "two"]]
    assert episodes.replies == [["go on", "go on"]]


@WHERE
def test_rng_is_the_same_in_every_process_and_every_call(timeout):
    episodes = begun(environments.drawn, size=2, timeout=timeout)
    first, again = told(episodes, 0, "a", "b")
    assert first == again == "165858125"  # random.Random(int of SHA-256 of "0,0,0").randrange(10**9)
    assert told(episodes, 1, "a") == ["8546908"]  # of (0, 0, 1)


@WHERE
@pytest.mark.parametrize(
    "what", ["true", "nan", "infinite", "huge", "list", "long", "turned", "unscored", "scored_true", "bytes", "mapping"]
)
def test_what_is_no_answer_is_a_failure(what, timeout):
    episodes = begun(environments.odd, {"what": [what]}, timeout=timeout, max_failed=0.0)
    assert told(episodes, 0, "x") == [None]
    assert episodes.failed[0].startswith("answer: returned ")
    assert episodes.failed[0].endswith(
        "allowed is text (a reply), a finite number (over, with this score), None (over) or (text, finite number)"
    )
    assert (episodes.scores, episodes.over) == ([()], [False])
    with pytest.raises(EpisodeError, match=r"environment tests\.support\.environments\.odd failed in 1 of 1 episodes"):
        episodes.check()


@WHERE
@pytest.mark.parametrize(
    ("what", "reply", "score"),
    [
        ("int", None, 2.0),
        ("numpy", None, 0.5),
        ("numpy_text", "text", None),
        ("text", "text", None),
        ("bad_scored", "no such tool", -0.5),
        ("empty", "", None),
        ("surrogate", "a? b ?", None),
        ("control", "\x00\x1b[2J\u202e\r\n", None),
        ("giant", "x" * 71 + "… (3000000 characters in all)", None),
    ],
)
def test_what_an_answer_may_be(what, reply, score, timeout):
    episodes = begun(environments.fine, {"what": [what]}, timeout=timeout, max_reply=100)
    assert told(episodes, 0, "x") == [reply]
    assert type(episodes.replies[0][0]) is str if reply else True
    assert episodes.scores == [() if score is None else ((0, score),)]
    assert episodes.failed == [None]


@WHERE
@pytest.mark.parametrize(
    ("how", "failure"),
    [
        ("raise", r"exception: KeyError: '\x1b[31mred'"),
        ("exit", "exception: SystemExit: leaving"),
        ("lie", "answer: returned a value of type Lying"),
        ("deep", "exception: RecursionError"),
    ],
)
def test_an_exception_is_a_failure_of_its_row(how, failure, timeout):
    episodes = begun(environments.ends_itself, {"how": ["well", how, "well"]}, timeout=timeout, max_failed=0.3)
    for row in range(3):
        episodes.step(row, "the last words")
    assert [episodes.reply(row) for row in range(3)] == [None] * 3
    assert episodes.scores == [((0, 1.0),), (), ((0, 1.0),)]
    assert episodes.over == [True, False, True]
    assert episodes.failed[1].startswith(failure)
    assert episodes.failed[::2] == [None, None]
    assert episodes.metrics["episode/failed"] == pytest.approx(1 / 3)
    with pytest.raises(EpisodeError) as error:
        episodes.check()
    message = str(error.value)
    assert "in 1 of 3 episodes (allowed fraction: environment.max_failed=0.3); first on row 1" in message
    assert failure in message
    assert message.endswith("turn 1: 'the last words'")


@pytest.mark.slow
def test_workers_that_hang_or_die_are_failures():
    kinds = {
        "hang": "timeout: took longer than 2 s",
        "hang_in_c": "timeout: took longer than 2 s",
        "_exit": "crash: its worker died with exit code 3",
        "kill": "crash: its worker died with exit code -9",
        "segfault": "crash: its worker died with exit code -11",
        "memory": "exception: MemoryError",
    }
    hows = [how for kind in kinds for how in (kind, "well")]
    episodes = begun(environments.ends_itself, {"how": hows}, timeout=2.0, max_failed=0.49)
    began = time.monotonic()
    for row in range(len(hows)):
        episodes.step(row, "x")
    assert [episodes.reply(row) for row in range(len(hows))] == [None] * len(hows)
    assert time.monotonic() - began < 30
    assert episodes.scores == [(), ((0, 1.0),)] * 6
    for row, expected in enumerate(kinds.values()):
        assert episodes.failed[2 * row].startswith(expected)
    with pytest.raises(EpisodeError, match="in 6 of 12 episodes .* first on row 0, timeout: took longer than 2 s"):
        episodes.check()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, r"parameter 'number' is no column of the data; there are \[\]"),
        ({"number": [1], "turns": ["x"]}, "column 'turns' has the name of an argument of environment"),
        ({"number": [1, 2]}, "'number': expected 1 values, got 2"),
    ],
)
def test_columns_are_checked_first(columns, message):
    with pytest.raises(EpisodeError, match=message):
        Episodes(Environment(environments.guess, 4), ["p"], columns, [(0, 0, 0)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "guess"}, "function: expected a callable"),
        ({"function": environments.countdown}, "countdown is a generator function"),
        ({"function": environments.later}, "later is a coroutine function"),
        ({"max_turns": 0}, "max_turns=0: allowed is an integer >= 1"),
        ({"max_reply": 99}, "max_reply=99: allowed is an integer >= 100"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        Environment(**{"function": environments.guess, "max_turns": 4, **settings})


def test_what_an_object_says_of_itself_is_read():
    environment = Environment(environments.Tool(2), 4)
    assert environment.tools == environments.Tool.tools
    assert environment.reply_role == Episodes(environment, [], {}, []).role == "tool"
    assert Environment(environments.Tool(2), 4, role="user").reply_role == "user"
    assert Environment(environments.guess, 4).tools is None
    assert environment.name == "tests.support.environments.Tool"
    episodes = Episodes(environment, ["p"], {}, [(0, 0, 0)])
    assert told(episodes, 0, "a", "b") == ["more", None]


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_an_environment_that_hangs(monkeypatch):
    def asked_to_end():
        raise Preempted(15)

    monkeypatch.setattr(signals, "current", lambda: SimpleNamespace(check=asked_to_end))
    environment = Environment(environments.ends_itself, 4, timeout=60.0)
    start = time.monotonic()
    episodes = Episodes(environment, ["p"], {"how": ["hang"]}, [(0, 0, 0)], asked_to_end)
    episodes.step(0, "x")
    with pytest.raises(Preempted):
        episodes.reply(0)
    assert time.monotonic() - start < 30
    pool.close()
