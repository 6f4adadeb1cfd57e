import functools
import math
from fractions import Fraction

import numpy as np
import pytest

from grpo_lightning.reward import PerCompletion, RewardError, RewardSpec, check_columns, score, total
from grpo_lightning.reward.accuracy import exact

COLUMNS = {"answer": ["1", "2"], "level": [3, 4]}


def scored(function, completions=("a", "b"), columns=COLUMNS, name="mine"):
    return score({name: RewardSpec(function, 1.0)}, ["p", "q"][: len(completions)], completions, columns)[name]


# --- what a function is called with


def test_a_function_receives_the_columns_that_it_names():
    calls = []

    def by_name(completions, answer, other="default"):
        calls.append((completions, answer, other))
        return [0.5, None]

    assert scored(by_name) == [0.5, None]
    assert calls == [(["a", "b"], ["1", "2"], "default")]  # once, with all rows


def test_a_function_with_kwargs_receives_everything():
    seen = {}
    scored(lambda prompts, completions, **kwargs: seen.update(kwargs, prompts=prompts) or [0, 0])
    assert seen == {"prompts": ["p", "q"], "answer": ["1", "2"], "level": [3, 4]}


def test_functions_written_for_trl_work_unchanged():
    def reward_len(prompts, completions):  # as in TRL's documentation
        return [-abs(2 - len(completion)) for completion in completions]

    def positional(prompts, completions, /, **kwargs):
        return [float(prompt == "q") + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]

    assert scored(reward_len, ("abcd", "b")) == [-2.0, -1.0]
    assert scored(positional, ("abcd", "b")) == [4.0, 2.0]


def test_a_setting_is_not_replaced_by_a_column_of_its_name():
    def at_level(completions, level, **_):
        return [level] * len(completions)

    assert scored(functools.partial(at_level, level=7)) == [7.0, 7.0]
    assert scored(PerCompletion(functools.partial(lambda text, level: level, level=7))) == [7.0, 7.0]
    assert scored(PerCompletion(lambda text, level: level)) == [3.0, 4.0]


def test_a_reward_cannot_reorder_what_the_next_one_sees():
    def rude(completions, answer):
        completions.sort()
        answer.clear()
        return [0, 0]

    rewards = {"rude": RewardSpec(rude, 1.0), "exact": RewardSpec(exact, 1.0)}
    assert score(rewards, ["p", "q"], ["2", "1"], {"answer": ["2", "0"]})["exact"] == [1.0, 0.0]


def test_a_column_fills_an_optional_argument_of_its_name():
    def function(completions, *, output="none", path=None):
        return [float(text == right) for text, right in zip(completions, output)]

    assert scored(function, columns={"output": ["a", "c"], "path": ["x", "y"]}) == [1.0, 0.0]


def test_per_completion_passes_one_row():
    def one(text, answer, prompt, missing=9):
        return None if text == "b" else len(text) + 10 * int(answer) + 100 * len(prompt) + missing

    assert scored(PerCompletion(one), ("abc", "b")) == [3 + 10 + 100 + 9, None]
    assert scored(PerCompletion(lambda text, **row: row == {"prompt": "p", "answer": "1", "level": 3})) == [1.0, 0.0]
    assert scored(PerCompletion(len), ("abc", "b")) == [3.0, 1.0]
    assert PerCompletion(one)(prompts=["p"], completions=["ab"], answer=["1"], unknown=["x"]) == [2 + 10 + 100 + 9]


@pytest.mark.parametrize("function", [lambda *, completion: 0.0, lambda **row: 0.0])
def test_per_completion_needs_a_place_for_the_completion(function):
    with pytest.raises(ValueError, match="first argument"):
        PerCompletion(function)


@pytest.mark.parametrize(
    "function", [lambda completions, solution: [0, 0], PerCompletion(lambda text, solution, **_: 0)]
)
def test_a_parameter_that_is_no_column_is_found_before_anything_runs(function):
    message = r"reward 'mine': parameter 'solution' is no column of the data; there are \['answer', 'level'\]"
    with pytest.raises(RewardError, match=message):
        check_columns({"mine": RewardSpec(function, 1.0)}, ["level", "answer"])
    with pytest.raises(RewardError, match=message):
        scored(function)
    check_columns({"mine": RewardSpec(function, 1.0)}, ["solution"])


def test_all_problems_are_named_at_once():
    rewards = {
        "one": RewardSpec(lambda completions, x: [], 1.0),
        "two": RewardSpec(lambda y, z=1: [], 1.0),
        "three": RewardSpec(lambda completions, answer, *, tolerance: [], 1.0),
        "four": RewardSpec(type, 1.0),
    }
    with pytest.raises(RewardError) as error:
        check_columns(rewards, ["prompts"])
    expected = ["column 'prompts'", "'one': parameter 'x'", "'two': parameter 'y'", "'three': parameter 'answer'"]
    expected += ["'three': parameter 'tolerance'", "'four': its signature cannot be read"]
    assert [part for part in expected if part not in str(error.value)] == []
    assert str(error.value).count(";") == 5 + 4  # between six problems, and before "there are" in four of them


# --- what a function returns


def test_whatever_is_a_finite_number_becomes_a_float():
    values = [True, np.float32(0.5), np.int64(3), np.bool_(False), Fraction(1, 4), 2, None]
    result = score({"m": RewardSpec(lambda completions: iter(values), 1.0)}, ["p"] * 7, ["t"] * 7, {})["m"]
    assert result == [1.0, 0.5, 3.0, 0.0, 0.25, 2.0, None]
    assert {type(value) for value in result} == {float, type(None)}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "1.0", 1j, [1.0], np.zeros(2), 10**400, np.str_("1")])
def test_anything_else_names_the_row_and_the_beginning_of_its_text(bad):
    with pytest.raises(RewardError) as error:
        scored(lambda completions: [0.0, bad], ("fine", "\x1b[31m" + "x" * 500))
    assert "reward 'mine'" in str(error.value)
    assert "row 1" in str(error.value)
    assert r"'\x1b[31m" + "x" * 75 + "'…" in str(error.value)  # 80 characters
    assert "x" * 76 not in str(error.value)


@pytest.mark.parametrize("result", [[], [1.0], [1.0, 1.0, 1.0]])
def test_a_wrong_count_is_an_error(result):
    with pytest.raises(RewardError, match=f"reward 'mine': expected 2 scores, got {len(result)}"):
        scored(lambda completions: result)


def test_an_exception_names_the_first_row_that_raises():
    def picky(completions, answer):
        return [1 / (len(text) - int(right)) for text, right in zip(completions, answer, strict=True)]

    with pytest.raises(RewardError) as error:
        score({"picky": RewardSpec(picky, 1.0)}, list("pqr"), ["a", "bb", "cc"], {"answer": [4, 2, 2]})
    division = "ZeroDivisionError: division by zero"
    assert str(error.value).startswith(
        f"reward 'picky' raised {division}; row 1 raises {division}, completion 'bb'. (reward.picky.timeout=SECONDS "
    )
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_an_exception_that_no_row_causes_alone_says_so():
    with pytest.raises(RewardError, match="KeyError: 'whole'; no row raises when it is scored alone"):
        scored(lambda completions: {}["whole"] if len(completions) > 1 else [0.0])


# --- weights


def test_total_adds_what_applies():
    rewards = {"a": RewardSpec(len, 2.0), "b": RewardSpec(len, -0.5), "c": RewardSpec(len, 0.0)}
    scores = {"a": [1.0, None, None, 0.25, 0.0], "b": [3.0, 4.0] + [None] * 3, "c": [7.0, None, None, 1.0, None]}
    assert total(rewards, scores) == [2 * 1 - 0.5 * 3, -0.5 * 4, None, 2 * 0.25, 0.0]


@pytest.mark.parametrize("weight", [math.nan, math.inf, "1", None, True])
def test_a_weight_is_a_finite_number(weight):
    with pytest.raises(ValueError, match="weight=.*: must be a finite number"):
        RewardSpec(len, weight)
