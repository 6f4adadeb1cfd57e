import pytest
import torch

from grpo_lightning.reward import RewardSpec
from grpo_lightning.schedule import Linear
from grpo_lightning.types import Prompts
from grpo_lightning.validation import Validation
from tests.support.sampling import context as make_context
from tests.test_rollout import REWARDS, Fixed

SAMPLING = {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 3, "stop": ["x"]}


def validation(reward=REWARDS, **changed):
    settings = {"outcome": "has_answer", "threshold": 1.0, "every": 5, "samples_per_prompt": 3, "ks": [1, 3]}
    return Validation(reward, **(settings | SAMPLING | changed))


def test_metrics_by_hand():
    policy, made = Fixed(), validation()
    made.step(policy, Prompts(("p", "q"), {"answer": ("a", "b")}), completed_steps=0, context=make_context(seed=3))
    found = {name: value.item() for name, value in made.compute().items()}
    # p: a, b, ab -> right, wrong, right;   q: "", abc, q -> wrong, right, wrong; every answer is another: ties
    assert found["val/pass@1"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert found["val/pass@3"] == 1.0
    assert found["val/maj@3"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert found["val/reward/total"] == pytest.approx(7 / 6)
    assert found["val/reward/has_answer"] == pytest.approx(1 / 2)
    assert found["val/reward/length"] == pytest.approx(8 / 5)
    assert found.keys() == {
        *("val/pass@1", "val/pass@3", "val/maj@3", "val/reward/total", "val/reward/has_answer", "val/reward/length")
    }
    (call,) = policy.calls
    assert call[1] == 3
    assert call[2].temperature == 0.5
    assert call[2].stop == ("x",)
    assert call[3] == 3


def test_batches_add_up_and_computing_starts_over():
    made = validation({"r": RewardSpec(lambda completions: [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 2.0)}, outcome=None)
    for _ in range(2):
        made.step(Fixed(), Prompts(("p", "q"), {}), completed_steps=0, context=make_context(seed=0))
    assert made.compute()["val/pass@1"].item() == pytest.approx(1 / 6)
    made.step(Fixed(), Prompts(("p", "q"), {}), completed_steps=0, context=make_context(seed=0))
    found = made.compute()
    assert found["val/pass@1"].item() == pytest.approx(1 / 6)
    assert found["val/reward/total"].item() == pytest.approx(1 / 3)
    assert torch.tensor(list(found.values())).isfinite().all()


def test_without_an_outcome_accuracy_decides():
    never, always = (RewardSpec(lambda completions, score=score: [score] * 6, 1.0) for score in (0.0, 1.0))
    made = validation({"format": never, "accuracy": always}, outcome=None)
    made.step(Fixed(), Prompts(("p", "q"), {}), completed_steps=0, context=make_context(seed=0))
    assert made.compute()["val/pass@1"] == 1.0


def test_varying_weights_are_those_of_the_next_step():
    made = validation({"r": RewardSpec(lambda completions: [1.0] * 6, Linear(1.0, 3.0, steps=4))}, outcome=None)
    made.step(Fixed(), Prompts(("p", "q"), {}), completed_steps=1, context=make_context(seed=0))
    assert made.compute()["val/reward/total"].item() == 1.5


def test_prompts_are_numbered_over_the_batches_of_one_validation():
    class Numbered(Fixed):
        def sample(self, prompts, *, first_prompt, **arguments):
            numbers.append(first_prompt)
            return super().sample(prompts, **arguments)

    numbers: list[int] = []
    made = validation()
    for _ in range(2):
        for _ in range(2):
            made.step(
                Numbered(), Prompts(("p", "q"), {"answer": ("a", "b")}), completed_steps=0, context=make_context(seed=0)
            )
        made.compute()
    assert numbers == [0, 2, 0, 2]
