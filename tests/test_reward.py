"""What reward functions are called with, what they may return, and the total."""

import functools
import math
from fractions import Fraction

import numpy as np
import pytest

from grpo_lightning.reward import PerCompletion, RewardError, RewardSpec, Scoring, check_columns
from grpo_lightning.reward.accuracy import exact
from grpo_lightning.reward.spec import clip_scores, total
from tests.support import rewards
from tests.support.composed import build
from tests.support.rewards import score
from tests.support.workers import limited

COLUMNS = {"answer": ["1", "2"], "level": [3, 4]}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]


@pytest.fixture(autouse=True, scope="module")
def one_worker():
    with limited(1):
        yield


def scored(function, completions=("a", "b"), columns=COLUMNS, **settings):
    spec = RewardSpec(function, 1.0, **{"max_failed": 0.0, **settings})
    return score({"mine": spec}, ["p", "q"][: len(completions)], completions, columns)["mine"]


# --- what a function is called with


def test_a_function_receives_the_columns_that_it_names():
    calls = []

    def by_name(completions, answer, other="default", *, output="none"):
        calls.append((completions, answer, other, output))
        return [0.5, None]

    assert scored(by_name, columns=COLUMNS | {"output": ["x", "y"]}) == [0.5, None]
    assert calls == [(["a", "b"], ["1", "2"], "default", ["x", "y"])]  # once, with all rows
    seen = {}
    scored(lambda prompts, completions, **kwargs: seen.update(kwargs, prompts=prompts) or [0, 0])
    assert seen == {"prompts": ["p", "q"], "answer": ["1", "2"], "level": [3, 4]}


def test_a_setting_is_not_replaced_by_a_column_of_its_name():
    def at_level(completions, level, **_):
        return [level] * len(completions)

    assert scored(functools.partial(at_level, level=7)) == [7.0, 7.0]
    assert scored(PerCompletion(functools.partial(lambda text, level: level, level=7))) == [7.0, 7.0]
    assert scored(PerCompletion(lambda text, level: level)) == [3.0, 4.0]
    assert scored(PerCompletion(lambda text, **row: row == {"prompt": "p", "answer": "1", "level": 3})) == [1.0, 0.0]


def test_a_reward_cannot_change_what_the_next_one_sees():
    def rude(completions, answer):
        completions.sort()
        answer.clear()
        return [0, 0]

    both = {"rude": RewardSpec(rude, 1.0), "exact": RewardSpec(exact, 1.0)}
    assert score(both, ["p", "q"], ["2", "1"], {"answer": ["2", "0"]})["exact"] == [1.0, 0.0]


def test_texts_become_chat_messages_and_messages_stay():
    seen = {}

    def looks(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.0] * len(completions)

    spec = {"mine": RewardSpec(looks, 1.0, messages=True)}
    score(spec, ["How many?", CHAT], ["two", ""], {"chat": [CHAT, "text"]}, [[1], [2]])
    assert seen == {
        "prompts": [[{"role": "user", "content": "How many?"}], CHAT],
        "completions": [[{"role": "assistant", "content": "two"}], [{"role": "assistant", "content": ""}]],
        "completion_ids": [[1], [2]],
        "chat": [CHAT, "text"],  # a column stays whatever it is
    }
    words = "reward.custom.function.function._target_=tests.support.rewards.of_one_answer"
    chosen = build("reward=custom_per_completion", words, "reward.custom.messages=true")("reward")
    assert score(chosen, [CHAT], ["2"], {"answer": ["2"]}) == {"custom": [21.0]}


def test_trls_own_functions_score():
    trl = pytest.importorskip("trl.rewards")
    accuracy, overlong = trl.accuracy_reward, trl.get_soft_overlong_punishment(100, 20)
    texts = [r"It is \boxed{\frac{1}{3}}", r"It is \boxed{\frac{1}{2}}", r"\boxed{1}"]
    columns = {"solution": [r"\frac{1}{3}", r"\frac{1}{3}", ""]}
    ids = [[1] * 80, [1] * 90, [1] * 101]
    specs = {
        "accuracy": RewardSpec(accuracy, 1.0, messages=True, timeout=60.0, max_failed=0.0),
        "overlong": RewardSpec(overlong, 1.0),
    }
    found = score(specs, [CHAT, "How many?", CHAT], texts, columns, ids)
    assert found == {"accuracy": [1.0, 0.0, None], "overlong": [0.0, -0.5, -1.0]}


def test_all_problems_are_named_before_anything_runs():
    specs = {
        "one": RewardSpec(lambda completions, x: [], 1.0),
        "two": RewardSpec(PerCompletion(lambda text, y, z=1: 0), 1.0),
        "three": RewardSpec(lambda solution_str, trainer_state: 0, 1.0),
    }
    with pytest.raises(RewardError) as error:
        check_columns(specs, ["prompts"])
    expected = ["column 'prompts'", "'one': parameter 'x' is no column of the data; there are ['prompts']"]
    expected += [
        "'two': parameter 'y'",
        "a PerCompletion: reward=custom_per_completion",
        "reward.three.weight may change",
    ]
    assert [part for part in expected if part not in str(error.value)] == []
    check_columns({"mine": RewardSpec(lambda completions, x: [], 1.0)}, ["x"])
    with pytest.raises(ValueError, match="function: <class 'list'> is a class; give an object of it"):
        RewardSpec(list, 1.0)


# --- what a function returns


def test_whatever_is_a_finite_number_becomes_a_float():
    values = [True, np.float32(0.5), np.int64(3), np.bool_(False), Fraction(1, 4), 2, None]
    result = score({"m": RewardSpec(lambda completions: iter(values), 1.0)}, ["p"] * 7, ["t"] * 7, {})["m"]
    assert result == [1.0, 0.5, 3.0, 0.0, 0.25, 2.0, None]
    assert {type(value) for value in result} == {float, type(None)}


def test_anything_else_names_the_row_and_the_beginning_of_its_text():
    for bad in (math.nan, -math.inf, "1.0", [1.0], 10**400, [[501, 1.0]], [[1, math.nan]]):
        with pytest.raises(RewardError) as error:
            scored(lambda completions, bad=bad: [0.0, bad], ("fine", "\x1b[31m" + "x" * 495))
        assert "reward 'mine': expected a finite number, (end, score) pairs with ends from 1 to 500" in str(error.value)
        assert r"for row 1, completion '\x1b[31m" + "x" * 75 + "'…" in str(error.value)  # 80 characters
    with pytest.raises(RewardError, match="reward 'mine': expected 2 scores, got 1"):
        scored(lambda completions: [1.0])


def test_a_reward_that_raises_names_the_row():
    def picky(completions, answer):
        return [1 / (text != right) for text, right in zip(completions, answer, strict=True)]

    with pytest.raises(RewardError, match="reward 'mine' raised ZeroDivisionError: .* on row 1, completion '2'"):
        scored(picky, ("2", "2"))
    with pytest.raises(RewardError, match=r"reward 'mine' raised KeyError: 7\. "):  # of no row by itself
        scored(lambda completions: {}[7] if len(completions) == 2 else [1.0])


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in_workers"])
def test_numbers_and_steps_are_taken_however_they_are_packed(timeout):
    texts, settings = ("ab", "abcd"), {"timeout": timeout, "columns": {}}
    for kind in (rewards.as_tensor, rewards.as_array, rewards.as_generator):
        assert scored(kind, texts, **settings) == [0.5, 1.0]  # 2/4 and 4/4
    steps = Scoring({"mine": RewardSpec(rewards.as_steps, 1.0, timeout=timeout)}, ["p", "p"], {}).finish(texts, None)
    assert steps.values["mine"] == [((1, 0.25), (2, 0.5)), ((1, 0.25), (4, 0.5))]
    assert scored(rewards.as_steps, texts, **settings) == [0.375, 0.375]
    with pytest.raises(RewardError) as error:
        scored(rewards.exits, texts, **settings)  # ends no program
    assert r"SystemExit: \x1b[2Jno more rewards" in str(error.value)


# --- weights


def test_the_total_adds_what_applies():
    specs = {"a": RewardSpec(len, 2.0, clip=[0, 1]), "b": RewardSpec(len, -0.5), "c": RewardSpec(len, 0.0)}
    scores = {"a": [1.0, None, None, 0.25, 0.0], "b": [3.0, 4.0] + [None] * 3, "c": [7.0, None, None, 1.0, None]}
    assert total(specs, scores) == [2 * 1 - 0.5 * 3, -0.5 * 4, None, 2 * 0.25, 0.0]
    assert clip_scores(specs, {"a": [3.0, None, ((1, -1.0), (2, 0.5))], "b": [9.0]}) == {
        "a": [1.0, None, ((1, 0.0), (2, 0.5))],
        "b": [9.0],
    }
    for weight, large in ((1e308, 1e10), (1.0, 1e30), (-1.0, 1e30)):  # whose squares are no float32
        with pytest.raises(RewardError, match=r"reward 'a': .* on row 1, .*reward\.a\.clip"):
            total({"a": RewardSpec(len, weight)}, {"a": [0.0, large]})
    assert total({"a": RewardSpec(len, 0.0)}, {"a": [1e30]}) == [0.0]  # is only logged
