"""Games of gymnasium in words: actions are played again from the same seed for every turn."""

import inspect
import pickle
import random
import sys

import pytest
from grpo_lightning.settings import check_built

from grpo_lightning.environment import BadCall, Environment, Episodes
from grpo_lightning.environment.gymnasium import Gymnasium, plain
from tests.support import corridors
from tests.support.composed import build, composed

WAYS = {"left": 0, "down": 1, "right": 2, "up": 3}


def lake(**changes):
    return Gymnasium("FrozenLake-v1", **{"kwargs": {"is_slippery": False}, "actions": WAYS} | changes)


def played(environment, *turns, **row):
    return [environment(turns=list(turns[: number + 1]), **row) for number in range(len(turns))]


def test_a_walk_over_the_ice():
    assert lake().observed(0) == "[S]FFF\nFHFH\nFFFH\nHFFG"
    right = "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    further = "  (Right)\nSF[F]F\nFHFH\nFFFH\nHFFG"
    replies = played(lake(), "right", " RIGHT\n", "jump", "<answer>Down</answer>", "down", "down", "right", seed=0)
    assert replies[:2] == [(right, 0.0), (further, 0.0)]
    assert isinstance(replies[2], BadCall)
    assert replies[2] == "error: 'jump' is no action; allowed: left, down, right, up"
    assert [reply[0].splitlines()[0] for reply in replies[3:6]] == ["  (Down)"] * 3
    assert replies[6] == 1.0  # the present
    assert played(lake(), "down", "right", seed=0)[1] == 0.0  # into a hole


def test_the_seed_decides_what_chance_does():
    slippery = lake(kwargs={})
    first = [played(slippery, *["right"] * 3, seed=seed) for seed in range(8)]
    assert first == [played(slippery, *["right"] * 3, seed=seed) for seed in range(8)]
    assert len({str(one) for one in first}) > 2
    own = lake(kwargs={}, seed_column=None)
    assert list(inspect.signature(own).parameters) == ["turns", "rng"]
    assert list(inspect.signature(slippery).parameters) == ["turns", "seed"]
    assert list(inspect.signature(lake(seed_column="start")).parameters) == ["turns", "start"]

    def walked(seed):
        return [own(turns=["right"] * number, rng=random.Random(seed)) for number in (1, 2, 3)]

    assert walked(1) == walked(1)
    assert len({str(walked(seed)) for seed in range(8)}) > 2


def test_what_is_seen_and_what_is_meant_may_be_told_by_functions():
    environment = Gymnasium("Blackjack-v1", describe=corridors.lands, parse=corridors.hits)
    seen = environment.observed(3)
    assert seen.startswith("you have ")
    assert isinstance(environment(turns=["I stick"], seed=3), float)
    hit = environment(turns=["hit me"], seed=3)
    assert hit == -1.0 or hit[0].startswith("you have ")
    assert environment(turns=["what?"], seed=3) == "error: that is no action"
    assert environment(turns=["what?", "I stick"], seed=3) == environment(turns=["I stick"], seed=3)


def test_colors_become_brackets():
    taxi = Gymnasium("Taxi-v4").observed(3)
    assert taxi.splitlines()[1] == "|(R): |[ ]: :G|"
    assert "{Y}" in taxi
    assert "\x1b" not in taxi
    assert plain("\x1b[41mS\x1b[0mF\x1b[34;1mR\x1b[0m\x1b[2K\x1b[0mx\x1b[0m") == "[S]F(R)x"


def test_an_episode_in_this_process_and_in_a_worker():
    turns = ["down", "down", "fly", "right", "right", "down", "right"]
    told = []
    for timeout in (None, 30.0):
        made = pickle.loads(pickle.dumps(lake()))
        episodes = Episodes(Environment(made, 10, timeout), ["?"], {"seed": [4]}, [(0, 0, 0)])
        for turn in turns:
            episodes.step(0, turn)
            episodes.reply(0)
        assert episodes.over == [True]
        assert episodes.scores == [((0, 0.0), (1, 0.0), (3, 0.0), (4, 0.0), (5, 0.0), (6, 1.0))]
        assert episodes.metrics["episode/bad_calls"] == 1
        told.append(episodes.replies)
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "given, words",
    [
        ({}, "id: expected the name of an environment, or null where make is given, got None"),
        ({"id": "Nowhere-v0"}, "id: expected an environment that gymnasium can make, got 'Nowhere-v0'"),
        (
            {"id": "FrozenLake-v1", "kwargs": {"render_mode": "human"}},
            "kwargs: expected arguments other than ren",
        ),
        (
            {"id": "FrozenLake-v1", "kwargs": {"map_name": None}},
            "the seed decides, got 'FrozenLake-v1'",
        ),
        ({"id": "FrozenLake-v1", "actions": {"a": 4}}, r"actions: expected actions of Discrete\(4\), got a: 4"),
        ({"id": "FrozenLake-v1", "actions": []}, "actions: expected a mapping such as"),
        (
            {"id": "Pendulum-v1", "describe": corridors.lands},
            "actions: expected a mapping, or parse, .* Box",
        ),
    ],
)
def test_what_cannot_be_played_is_named(given, words):
    with pytest.raises(ValueError, match=words):
        Gymnasium(**given)


def test_without_the_package_it_says_what_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ValueError, match=r"needs the package gymnasium; pip install 'grpo-lightning\[gymnasium\]'"):
        lake()


WORDS = ["environment=gymnasium", "environment.function.id=FrozenLake-v1"]


def test_the_settings_make_it():
    words = [*WORDS, "environment.function.actions={left: 0, down: 1, right: 2, up: 3}"]
    words += ["environment.function.kwargs={is_slippery: false}"]
    environment = build(*words)("environment")
    assert environment.function(turns=["right"], seed=0)[0].startswith("  (Right)")
    own = [WORDS[0], "environment.function.id=null", "environment.function.describe=null"]
    own += ["environment.function.make={_target_: tests.support.corridors.corridor, _partial_: true}"]
    assert build(*own)("environment").function.observed(1).startswith("at ")
    check_built(composed(*own))
