"""Learning-rate schedules and numbers that change during a run."""

from functools import partial

import pytest

from grpo_lightning.loss import PolicyLoss, clipped, completion_mean, k3
from grpo_lightning.reward import RewardSpec
from grpo_lightning.schedule import (
    Cosine,
    Linear,
    Proportional,
    constant,
    cosine,
    linear,
    resolve_schedules,
    schedule_values,
)
from grpo_lightning.types import Sampling
from tests.support.running import small_module


def test_learning_rates_by_hand():
    for schedule, expected in (
        (constant, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (linear, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        (cosine, [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),  # (1 + cos(pi / 4)) / 2, (1 + cos(3 pi / 4)) / 2
    ):
        assert [schedule(step, total_steps=6, warmup_steps=2) for step in range(6)] == pytest.approx(expected)
        assert schedule(0, total_steps=3, warmup_steps=0) == 1.0
        assert schedule(99, total_steps=3, warmup_steps=0) in (0.0, 1.0)  # never below zero
        assert schedule(0, total_steps=1, warmup_steps=5) == pytest.approx(0.2)


def test_numbers_by_hand():
    for schedule, expected in (
        (Linear(1.0, 0.5, steps=4, begin=2), [1.0, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]),
        (Linear(10, 20, steps=4), [10, 12, 15, 18, 20, 20]),  # integers: 12.5 and 17.5 to the even neighbour
        # (1 - cos(pi s)) / 2 at s = 0, 1/4, 1/2, 3/4, 1: 0, .146447, .5, .853553, 1
        (Cosine(0.0, 4.0, steps=4), [0, 0.585786, 2, 3.414214, 4, 4]),
        (Linear(0.2, 0.3, steps=1, begin=2), [0.2, 0.2, 0.2, 0.3, 0.3]),  # a jump
    ):
        assert [schedule.value_at(step) for step in range(len(expected))] == pytest.approx(expected, abs=1e-6)
    assert type(Linear(10, 20, steps=4).value_at(1)) is int


def test_a_proportional_coefficient_follows_its_metric():
    for start, target, rate, measured in (
        # 10 % above: 1 + .1 * .1; far above counts as 20 %; far below as -20 %
        (0.1, 0.05, 0.1, ((0.055, 1.01), (5.0, 1.02), (0.0, 0.98))),
        # a negative rate: 10 % below: 1 + .5 * .1; far above counts as 20 %
        (0.02, 0.2, -0.5, ((0.18, 1.05), (0.9, 0.9))),
    ):
        schedule, expected = Proportional(start, "policy/entropy", target, rate), start
        for value, factor in measured:
            schedule.update(value)
            expected *= factor
            assert schedule.value_at(99) == pytest.approx(expected)


def test_impossible_ones_are_refused():
    for build, message in (
        (lambda: Linear(1.0, 0.0, steps=0), "steps=0"),
        (lambda: Proportional(0.1, "m", target=0.0, rate=0.1), "target=0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


def parts():
    surrogate = partial(clipped, epsilon_low=0.2, epsilon_high=Linear(0.2, 0.4, steps=2))
    coefficient = Proportional(start=0.1, metric="policy/kl_divergence", target=0.05, rate=0.5)
    return {
        "loss": PolicyLoss(surrogate, k3, completion_mean, coefficient, 0.0),
        "rewards": {"a": RewardSpec(len, Linear(1.0, 0.0, steps=10)), "b": RewardSpec(len, 2.0)},
        "sampling": Sampling(
            temperature=Linear(1.0, 0.6, steps=4), top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=Linear(8, 16, steps=4)
        ),
    }


def test_schedules_are_resolved_wherever_they_stand():
    whole = parts()
    found = resolve_schedules(whole, 1)
    assert found["loss"].surrogate.keywords == {"epsilon_low": 0.2, "epsilon_high": pytest.approx(0.3)}
    assert found["loss"].kl_coef == 0.1
    assert found["rewards"]["a"].weight == pytest.approx(0.9)
    assert found["rewards"]["b"] is whole["rewards"]["b"]
    assert (found["sampling"].temperature, found["sampling"].max_new_tokens) == (pytest.approx(0.9), 10)
    assert isinstance(whole["sampling"].temperature, Linear)  # the argument is not written into
    assert schedule_values(whole, 1) == {
        "loss.surrogate.epsilon_high": pytest.approx(0.3),
        "loss.kl_coef": 0.1,
        "rewards.a.weight": pytest.approx(0.9),
        "sampling.temperature": pytest.approx(0.9),
        "sampling.max_new_tokens": 10,
    }
    fixed = {"a": [1, 2.0], "b": partial(len, 3), "c": found["sampling"]}
    assert resolve_schedules(fixed, 5) is fixed


BY_KEY = {
    "rollout.temperature": "Linear, start: 1.0, end: 0.5, steps: 4",
    "rollout.max_new_tokens": "Linear, start: 10, end: 6, steps: 1",
    "reward.format.weight": "Linear, start: 1.0, end: 0.0, steps: 2",
    # a completion is never shorter than a token, and no entropy that high: both grow in every step
    "reward.custom.weight": "Proportional, start: 2.0, metric: completion/length_mean, target: 0.5, rate: 1.0",
    "rollout.kl_penalty": "Proportional, start: 0.1, metric: policy/entropy, target: 99, rate: -1.0",
    "loss.kl_coef": "Proportional, start: 0.5, metric: policy/entropy, target: 99, rate: 0.5",
}
"""Key as the user writes it -> what stands there."""


def scheduled_module():
    words = [f"{key}={{_target_: grpo_lightning.schedule.{number}}}" for key, number in BY_KEY.items()]
    module = small_module(*words, "steps=3", "validation.max_new_tokens=10")
    module.sampled = []
    generate = module.sampler.generate

    def remembering(*where, sampling, **arguments):
        module.sampled.append((sampling.temperature, sampling.max_new_tokens))
        return generate(*where, sampling=sampling, **arguments)

    module.sampler.generate = remembering
    return module


def test_numbers_are_logged_and_kept_under_the_users_keys():
    module = scheduled_module()
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
    resumed = scheduled_module()
    resumed.on_load_checkpoint(checkpoint)
    assert step(resumed) == pytest.approx(expected[2])
    assert step(module) == pytest.approx(expected[2])
