"""A verifier's word: right answers are worth less the later they come."""

import inspect
import pickle
from functools import partial

import pytest

from grpo_lightning.composition import resolve_config
from grpo_lightning.config import check_config, check_runtime
from grpo_lightning.environment import Environment, Episodes, check_columns
from grpo_lightning.environment.builtin import Retry
from grpo_lightning.reward import PerCompletion
from grpo_lightning.reward.accuracy import exact, numeric, reasoning_gym
from grpo_lightning.reward.mathematics import math
from tests.support.composed import build, composed, settings

REPLY = "That is wrong. Try again."


def retried(verifier, *turns, **row):
    environment = Retry(verifier, max_turns=3, discount=0.5, reply=REPLY)
    return [environment(turns=list(turns[: number + 1]), **row) for number in range(len(turns))]


def half(completions, **_):
    """Partly right."""
    return [0.5 for _ in completions]


def none(completions):
    return [None]


def prompted(prompts, completions):
    return [float(prompt == completion) for prompt, completion in zip(prompts, completions)]


def longest(text, prompt, limit=3):
    return float(len(text) <= limit and text in prompt)


@pytest.mark.parametrize(
    "turns, said",
    [
        (["7"], [1.0]),  # .5 ** 0
        (["6", "7"], [REPLY, 0.5]),
        (["6", "5", "<think>6</think> 7"], [REPLY, REPLY, 0.25]),
        (["6", "5", "4"], [REPLY, REPLY, 0.0]),
        (["", "\ud800", "7" * 10_000], [REPLY, REPLY, 0.0]),
    ],
)
def test_a_right_answer_ends_it_and_a_wrong_one_may_be_tried_again(turns, said):
    found = retried(exact, *turns, answer="7")
    assert found == said
    assert [type(one) for one in found] == [type(one) for one in said]


def test_the_verifiers():
    assert retried(numeric, "about 1,200", "1,200.5", answer="#### 1200.5") == [REPLY, 0.5]
    assert retried(partial(numeric, tolerance=1.0), "about 1,200", answer="#### 1200.5") == [1.0]
    assert retried(math, "1/3", "\\frac{1}{2}", answer="0.5") == [REPLY, 0.5]
    row = {"answer": "olleh", "task": "spell_backward", "metadata": {"word": "hello"}}
    assert retried(reasoning_gym, "hello", "olleh", **row) == [REPLY, 0.5]
    assert retried(reasoning_gym, "olleh", **row, task_config={}) == [1.0]
    assert retried(half, "a", "b", "c") == [REPLY, REPLY, 0.0]
    assert retried(none, "a") == [None]
    assert retried(prompted, "a", "b", prompt="b") == [REPLY, 0.5]
    assert retried(PerCompletion(longest), "abcd", "bc", prompt="abcd") == [REPLY, 0.5]


def test_what_it_needs_is_what_the_verifier_names():
    def named(verifier):
        return list(inspect.signature(Retry(verifier, max_turns=2, discount=1, reply="no")).parameters)

    assert named(exact) == ["turns", "answer"]
    assert named(numeric) == ["turns", "answer", "tolerance"]
    assert named(partial(numeric, tolerance=1.0)) == ["turns", "answer"]  # what is bound stays
    assert named(reasoning_gym) == ["turns", "answer", "task", "metadata", "task_config"]
    assert named(prompted) == ["turns", "prompt"]
    assert sorted(named(PerCompletion(longest))) == ["limit", "prompt", "turns"]
    environment = Environment(Retry(reasoning_gym, max_turns=2, discount=1, reply="no"), 2)
    check_columns(environment, ["answer", "task", "metadata"])
    with pytest.raises(ValueError, match="'metadata' is no column"):
        check_columns(environment, ["answer", "task"])


def test_an_episode_of_three_turns():
    retry = pickle.loads(pickle.dumps(Retry(exact, max_turns=3, discount=0.5, reply=REPLY)))
    episodes = Episodes(Environment(retry, 3), ["?"] * 2, {"answer": ["7", "8"]}, [(0, 0, 0), (0, 0, 1)])
    for turn in ("7", "6", "5"):
        for row in range(2):
            if turn == "7" or row == 1:
                episodes.step(row, turn)
                episodes.reply(row)
    assert episodes.scores == [((0, 1.0),), ((2, 0.0),)]
    assert episodes.over == [True, True]
    assert episodes.replies == [[], [REPLY, REPLY]]


def test_the_settings_are_those_of_the_data_and_of_the_environment():
    words = ["environment=retry", "environment.max_turns=5", "data=gsm8k"]
    config = resolve_config(settings(*words))
    function = config["environment"]["function"]
    assert function["max_turns"] == 5
    assert function["verifier"]["_target_"] == "grpo_lightning.reward.accuracy.numeric"
    check_config(composed("environment=retry"))
    check_runtime(composed("environment=retry"))
    environment = build("environment=retry", "environment.max_turns=2")("environment")
    row = {"answer": "olleh", "task": "spell_backward", "metadata": {"word": "hello"}}
    assert environment.function(turns=["olle"], **row) == REPLY
    assert environment.function(turns=["olle", "olleh"], **row) == 0.7
    assert environment.function(turns=["olle", "olle"], **row) == 0.0
