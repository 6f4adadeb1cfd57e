"""Numbers that change during a run."""

import math
from functools import partial

import pytest

from grpo_lightning.loss import PolicyLoss, clipped, completion_mean, k3
from grpo_lightning.reward import Weighted
from grpo_lightning.types import Sampling
from grpo_lightning.varying import (
    Cosine,
    Linear,
    Piecewise,
    Proportional,
    at,
    observe,
    restore,
    state,
    values,
)
from tests.support.running import small_module, small_run


def test_linear_by_hand():
    line = Linear(1.0, 0.5, steps=4, begin=2)
    assert [line.at(step) for step in range(8)] == [1.0, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]


def test_whole_numbers_stay_whole():
    tokens = Linear(10, 20, steps=4)
    assert [tokens.at(step) for step in range(6)] == [10, 12, 15, 18, 20, 20]  # 12.5 and 17.5 to the even neighbour
    assert all(isinstance(tokens.at(step), int) for step in range(6))


def test_cosine_by_hand():
    curve = Cosine(0.0, 4.0, steps=4)
    # (1 - cos(pi s)) / 2 at s = 0, 1/4, 1/2, 3/4, 1: 0, .146447, .5, .853553, 1
    assert [curve.at(step) for step in range(6)] == pytest.approx([0, 0.585786, 2, 3.414214, 4, 4], abs=1e-6)


def test_piecewise_by_hand():
    stairs = Piecewise([1.0, 0.5, 2.0], [3, 5])
    assert [stairs.at(step) for step in range(7)] == [1.0, 1.0, 1.0, 0.5, 0.5, 2.0, 2.0]


def test_a_proportional_coefficient_follows_its_metric():
    number = Proportional(start=0.1, metric="policy/kl_divergence", target=0.05, rate=0.1)
    number.observe(0.055)  # 10 % above: 1 + .1 * .1
    assert number.at(99) == pytest.approx(0.1 * 1.01)
    number.observe(5.0)  # far above counts as 20 %
    assert number.at(0) == pytest.approx(0.1 * 1.01 * 1.02)
    number.observe(0.0)  # far below as -20 %
    assert number.at(0) == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)


def test_a_negative_rate_turns_the_direction():
    number = Proportional(start=0.02, metric="policy/entropy", target=0.2, rate=-0.5)
    number.observe(0.18)  # 10 % below: 1 + .5 * .1
    assert number.at(0) == pytest.approx(0.02 * 1.05)
    number.observe(0.9)  # far above counts as 20 %
    assert number.at(0) == pytest.approx(0.02 * 1.05 * 0.9)


def parts():
    surrogate = partial(clipped, epsilon_low=0.2, epsilon_high=Linear(0.2, 0.4, steps=2))
    coefficient = Proportional(start=0.1, metric="policy/kl_divergence", target=0.05, rate=0.5)
    return {
        "loss": PolicyLoss(surrogate, k3, completion_mean, coefficient, 0.0),
        "rewards": {"a": Weighted(len, Linear(1.0, 0.0, steps=10)), "b": Weighted(len, 2.0)},
        "sampling": Sampling(
            temperature=Linear(1.0, 0.6, steps=4), top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=Linear(8, 16, steps=4)
        ),
    }


def test_every_number_wherever_it_stands():
    whole = parts()
    found = at(whole, 1)
    assert found["loss"].surrogate.keywords == {"epsilon_low": 0.2, "epsilon_high": pytest.approx(0.3)}
    assert found["loss"].kl_coef == 0.1
    assert found["rewards"]["a"].weight == pytest.approx(0.9)
    assert found["rewards"]["b"] is whole["rewards"]["b"]
    assert (found["sampling"].temperature, found["sampling"].max_new_tokens) == (pytest.approx(0.9), 10)
    assert isinstance(whole["sampling"].temperature, Linear)  # what was given is not touched
    assert values(whole, 1) == {
        "loss.surrogate.epsilon_high": pytest.approx(0.3),
        "loss.kl_coef": 0.1,
        "rewards.a.weight": pytest.approx(0.9),
        "sampling.temperature": pytest.approx(0.9),
        "sampling.max_new_tokens": 10,
    }


def test_what_does_not_vary_is_left_as_it_is():
    fixed = {
        "a": [1, 2.0],
        "b": partial(len, 3),
        "c": Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=8),
    }
    assert at(fixed, 5) is fixed


def test_adaptive_numbers_observe_and_survive_a_checkpoint():
    whole, resumed = parts(), parts()
    observe(whole, {"policy/kl_divergence": 0.06, "other": 1.0})
    assert whole["loss"].kl_coef.value == pytest.approx(0.1 * (1 + 0.5 * 0.2))
    observe(whole, {"other": 1.0})  # not measured: stays
    assert state(whole) == {"loss.kl_coef": pytest.approx(0.11)}
    restore(resumed, state(whole))
    assert resumed["loss"].kl_coef.at(3) == pytest.approx(0.11)
    for odd in ("../x", True, None, math.nan, [0.1]):
        restore(resumed, {"loss.kl_coef": odd})
        assert resumed["loss"].kl_coef.at(3) == pytest.approx(0.11)


BY_KEY = {
    "rollout.temperature": "Linear, start: 1.0, end: 0.5, steps: 4",
    "rollout.max_new_tokens": "Piecewise, values: [10, 6], borders: [1]",
    "reward.format.weight": "Linear, start: 1.0, end: 0.0, steps: 2",
    # a completion is never shorter than a token, and no entropy that high: both grow in every step
    "reward.custom.weight": "Proportional, start: 2.0, metric: completion/length_mean, target: 0.5, rate: 1.0",
    "rollout.kl_penalty": "Proportional, start: 0.1, metric: policy/entropy, target: 99, rate: -1.0",
    "loss.kl_coef": "Proportional, start: 0.5, metric: policy/entropy, target: 99, rate: 0.5",
}
"""Key as the user writes it -> what stands there."""


def varying_module():
    words = [f"{key}={{_target_: grpo_lightning.varying.{number}}}" for key, number in BY_KEY.items()]
    module = small_module(*words, "steps=3", "validation.max_new_tokens=10")
    module.sampled = []
    generate = module.sampler.generate

    def remembering(*where, sampling, **arguments):
        module.sampled.append((sampling.temperature, sampling.max_new_tokens))
        return generate(*where, sampling=sampling, **arguments)

    module.sampler.generate = remembering
    return module


def test_numbers_are_logged_and_kept_under_the_users_keys():
    module = varying_module()
    seen = {
        "rollout.temperature": (1.0, 0.875, 0.75),
        "rollout.max_new_tokens": (10, 6, 6),
        "reward.format.weight": (1.0, 0.5, 0.0),
        "reward.custom.weight": (2.0, 2.4, 2.88),  # 20 % more at most
        "rollout.kl_penalty": (0.1, 0.12, 0.144),  # 20 % more
        "loss.kl_coef": (0.5, 0.45, 0.405),  # 20 % less at most, times .5
    }
    expected = [{key: numbers[step] for key, numbers in seen.items()} for step in range(3)]

    def step(module):
        metrics = module.train_step(["1 + 1 =", "what is 20 + 3 ?"])
        logged = {name.removeprefix("varying/"): v for name, v in metrics.items() if name.startswith("varying/")}
        weighted = [logged[f"reward.{name}.weight"] * metrics[f"reward/{name}"] for name in ("custom", "format")]
        assert metrics["reward/total"] == pytest.approx(sum(weighted), abs=1e-6)
        assert module.sampled.pop() == (logged["rollout.temperature"], logged["rollout.max_new_tokens"])
        return logged

    assert step(module) == pytest.approx(expected[0])
    assert step(module) == pytest.approx(expected[1])
    checkpoint = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    adaptive = {"reward.custom.weight", "rollout.kl_penalty", "loss.kl_coef"}
    assert checkpoint["grpo"]["varying"] == pytest.approx({key: expected[2][key] for key in adaptive})
    resumed = varying_module()
    resumed.on_load_checkpoint(checkpoint)
    assert step(resumed) == pytest.approx(expected[2])
    assert step(module) == pytest.approx(expected[2])


def test_impossible_ones_are_refused():
    for build, message in (
        (lambda: Linear(1.0, 0.0, steps=0), "steps=0"),
        (lambda: Piecewise([1.0, 2.0], []), "one value more"),
        (lambda: Piecewise([1.0, 2.0, 3.0], [5, 5]), "increasing"),
        (lambda: Proportional(0.1, "m", target=0.0, rate=0.1), "target=0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


@pytest.mark.slow
def test_adaptive_weights_of_rewards_hold_in_validations_too(tmp_path):
    weight = "{_target_: grpo_lightning.varying.Proportional, start: 2.0, metric: reward/format, target: 9.0, rate: -1}"
    module = small_run(tmp_path, "steps=2", "validation.every=1", f"reward.format.weight={weight}")
    trained, measured = (
        rewards["format"].weight for rewards in (module.rollout.reward, module.validation.judge.rewards)
    )
    assert trained is not measured
    assert trained.value == measured.value == pytest.approx(2.88)  # 2, two times 20 % more
    total = trained.value * module.metrics["val/reward/format"] + module.metrics["val/reward/custom"]
    assert module.metrics["val/reward/total"] == pytest.approx(total)
