"""Numbers that change during a run."""

from functools import partial

import pytest

from grpo_lightning.batch import Sampling
from grpo_lightning.loss import PolicyLoss, clipped, completion_mean, k3
from grpo_lightning.reward import Weighted
from grpo_lightning.varying import (
    Cosine,
    Linear,
    Piecewise,
    Proportional,
    Stepwise,
    at,
    observe,
    restore,
    state,
    values,
)


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


def test_a_stepwise_coefficient_follows_its_metric_within_bounds():
    number = Stepwise(start=0.02, metric="policy/entropy", target=0.2, step=0.01, lowest=0.0, highest=0.03)
    seen = []
    for entropy in (0.1, 0.1, 0.3, 0.3, 0.3, 0.3):
        number.observe(entropy)
        seen.append(number.at(0))
    assert seen == pytest.approx([0.03, 0.03, 0.02, 0.01, 0.0, 0.0])


def parts():
    surrogate = partial(clipped, epsilon_low=0.2, epsilon_high=Linear(0.2, 0.4, steps=2))
    coefficient = Proportional(start=0.1, metric="policy/kl_divergence", target=0.05, rate=0.5)
    return {
        "loss": PolicyLoss(surrogate, k3, completion_mean, coefficient, 0.0),
        "rewards": {"a": Weighted(len, Linear(1.0, 0.0, steps=10)), "b": Weighted(len, 2.0)},
        "sampling": Sampling(Linear(1.0, 0.6, steps=4), 1.0, 0, 0.0, Linear(8, 16, steps=4)),
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
    fixed = {"a": [1, 2.0], "b": partial(len, 3), "c": Sampling(1.0, 1.0, 0, 0.0, 8)}
    assert at(fixed, 5) is fixed


def test_adaptive_numbers_observe_and_survive_a_checkpoint():
    whole, resumed = parts(), parts()
    observe(whole, {"policy/kl_divergence": 0.06, "other": 1.0})
    assert whole["loss"].kl_coef.value == pytest.approx(0.1 * (1 + 0.5 * 0.2))
    observe(whole, {"other": 1.0})  # not measured: stays
    assert state(whole) == {"loss.kl_coef": pytest.approx(0.11)}
    restore(resumed, state(whole))
    assert resumed["loss"].kl_coef.at(3) == pytest.approx(0.11)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Linear(1.0, 0.0, steps=0), "steps=0"),
        (lambda: Piecewise([1.0, 2.0], []), "one value more"),
        (lambda: Piecewise([1.0, 2.0, 3.0], [5, 5]), "increasing"),
        (lambda: Proportional(0.1, "m", target=0.0, rate=0.1), "target=0.0"),
    ],
)
def test_impossible_ones_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
