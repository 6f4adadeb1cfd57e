import pytest
import torch

from grpo_lightning.batch import Prompts
from grpo_lightning.clock import Clock
from grpo_lightning.reward import Weighted
from grpo_lightning.validation import Validation
from tests.test_rollout import REWARDS, Fixed

SAMPLING = {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 3, "stop": ["x"]}


def validation(reward=REWARDS, **changed):
    settings = {"outcome": "has_answer", "threshold": 1.0, "every": 5, "samples_per_prompt": 3, "ks": [1, 3]}
    return Validation(reward, **(settings | SAMPLING | changed))


def test_metrics_by_hand():
    policy, made = Fixed(), validation()
    made.step(policy, Prompts(("p", "q"), {"answer": ("a", "b")}), completed_steps=0, seed=3, clock=Clock())
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
    made = validation({"r": Weighted(lambda completions: [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 2.0)}, outcome=None)
    for _ in range(2):
        made.step(Fixed(), Prompts(("p", "q"), {}), completed_steps=0, seed=0, clock=Clock())
    assert made.compute()["val/pass@1"].item() == pytest.approx(1 / 6)
    made.step(Fixed(), Prompts(("p", "q"), {}), completed_steps=0, seed=0, clock=Clock())
    found = made.compute()
    assert found["val/pass@1"].item() == pytest.approx(1 / 6)
    assert found["val/reward/total"].item() == pytest.approx(1 / 3)
    assert torch.tensor(list(found.values())).isfinite().all()
