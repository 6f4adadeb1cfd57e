"""Metrics of held-out prompts, by hand and by enumeration."""

import itertools
import math

import pytest

from grpo_lightning.reward import RewardSpec
from grpo_lightning.schedule import Linear
from grpo_lightning.types import Prompts
from grpo_lightning.validation import Validation, majority_at_k, pass_at_k
from tests.support.sampling import context as make_context
from tests.test_rollout import REWARDS, Fixed

SAMPLING = {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 3, "stop": ["x"]}


def rights(row: str) -> list[bool]:
    return [c == "x" for c in row]


def test_pass_at_k_by_hand_and_as_the_mean_over_all_subsets():
    for k, expected in (
        (1, [1 / 4, 0, 3 / 4]),
        (2, [1 / 2, 0, 1]),  # 1 - C(3,2)/C(4,2) = 1/2; 1 - C(1,2)/C(4,2) = 1
        (4, [1, 0, 1]),
    ):
        assert [pass_at_k(rights(row), k) for row in ("x...", "....", "xx.x")] == pytest.approx(expected)
    subsets = list(itertools.combinations("x..x.", 3))
    assert pass_at_k(rights("x..x."), 3) == pytest.approx(sum("x" in subset for subset in subsets) / len(subsets))


def test_majority_by_hand():
    for row, answers, k, expected in (
        ("xx..", "7712", 4, 1),  # 7 wins, right
        (".x..", "1712", 4, 0),  # 1 wins, wrong
        ("xx..", "7711", 4, 1 / 2),  # ties
        ("x...", "7123", 4, 1 / 4),
        ("xx...", "77111", 3, 1),  # looks at the first three only
    ):
        assert majority_at_k(rights(row), list(answers), k) == pytest.approx(expected), answers


def validation(reward=REWARDS, **changed):
    settings = {"outcome": "has_answer", "threshold": 1.0, "every": 5, "samples_per_prompt": 3, "ks": [1, 3]}
    return Validation(reward, **(settings | SAMPLING | changed))


def test_metrics_by_hand():
    policy, made = Fixed(), validation()
    columns = {"answer": ("a", "b"), "data_source": ("words", "sums")}
    made.step(policy, Prompts(("p", "q"), columns), completed_steps=0, context=make_context(seed=3))
    # p: a, b, ab -> right, wrong, right;   q: "", abc, q -> wrong, right, wrong; every answer is another: ties
    assert made.compute() == {
        "val/pass@1": pytest.approx((2 / 3 + 1 / 3) / 2),
        "val/words/pass@1": pytest.approx(2 / 3),
        "val/sums/pass@1": pytest.approx(1 / 3),
        "val/pass@3": 1.0,
        "val/maj@3": pytest.approx((2 / 3 + 1 / 3) / 2),
        "val/reward/total": pytest.approx(7 / 6),
        "val/reward/has_answer": pytest.approx(1 / 2),
        "val/reward/length": pytest.approx(8 / 5),
    }
    (call,) = policy.calls
    assert (call[1], call[2].temperature, call[2].stop, call[3]) == (3, 0.5, ("x",), 3)


def test_batches_add_up_are_numbered_and_computing_starts_over():
    class Numbered(Fixed):
        def sample(self, prompts, *, first_prompt, **arguments):
            numbers.append(first_prompt)
            return super().sample(prompts, **arguments)

    numbers: list[int] = []
    made = validation({"r": RewardSpec(lambda completions: [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 2.0)}, outcome=None)
    for batches in (2, 1):
        for _ in range(batches):
            made.step(Numbered(), Prompts(("p", "q"), {}), completed_steps=0, context=make_context(seed=0))
        found = made.compute()
        assert found["val/pass@1"] == pytest.approx(1 / 6)
        assert found["val/reward/total"] == pytest.approx(1 / 3)
    assert numbers == [0, 2, 0]


def test_prompts_without_a_score_are_left_out_and_without_any_there_is_no_pass_at_1():
    for scores, expected in (([None, 1.0, 0.0, *[None] * 3], 1 / 3), ([None] * 6, math.nan)):
        made = validation({"r": RewardSpec(lambda completions, scores=scores: scores, 1.0)}, outcome=None)
        made.step(Fixed(), Prompts(("p", "q"), {}), completed_steps=0, context=make_context(seed=0))
        assert made.compute()["val/pass@1"] == pytest.approx(expected, nan_ok=True)


def test_without_an_outcome_accuracy_decides_and_varying_weights_are_those_of_the_next_step():
    never, always = (
        RewardSpec(lambda completions, score=score: [score] * 6, weight)
        for score, weight in ((0.0, 1.0), (1.0, Linear(1.0, 3.0, steps=4)))
    )
    made = validation({"format": never, "accuracy": always}, outcome=None)
    made.step(Fixed(), Prompts(("p", "q"), {}), completed_steps=1, context=make_context(seed=0))
    found = made.compute()
    assert (found["val/pass@1"], found["val/reward/total"]) == (1.0, 1.5)
