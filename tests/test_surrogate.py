"""Surrogates worked by hand, row by row; log r and A beside each."""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.loss import cispo, clipped, completion_sum, gmpo, gspo, reinforce, sapo

ONE = torch.ones(1, 1, dtype=torch.bool)


def token(surrogate, ratio, advantage):
    """(objective, bounded, gradient with respect to log r) of one token."""
    log_ratio = torch.tensor([[math.log(ratio)]], requires_grad=True)
    objective, bounded = surrogate(log_ratio, torch.tensor([[advantage]]), ONE)
    objective.sum().backward()
    return objective.item(), bounded.item(), log_ratio.grad.item()


@pytest.mark.parametrize(
    "ratio, advantage, expected",
    [
        (5.0, -1.0, (-3.0, True, 0.0)),  # max(min(-5, -1.28), 3 * -1)
        (2.0, -1.0, (-2.0, False, -2.0)),  # -2 > -3: the dual bound is not reached
        (5.0, 1.0, (1.28, True, 0.0)),  # A > 0: the usual clip
        (0.5, -1.0, (-0.8, True, 0.0)),
    ],
)
def test_dual_clip(ratio, advantage, expected):
    surrogate = partial(clipped, epsilon_low=0.2, epsilon_high=0.28, dual_clip=3.0)
    assert token(surrogate, ratio, advantage) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "ratio, advantage, expected",
    [
        (5.0, -1.0, (-4.0, True, 0.0)),  # min(min(5, 4) * -1, 1.2 * -1)
        (3.0, -1.0, (-3.0, False, -3.0)),
        (5.0, 2.0, (2.4, True, 0.0)),
        (0.5, 2.0, (1.0, False, 1.0)),
    ],
)
def test_two_sided_clip(ratio, advantage, expected):
    surrogate = partial(clipped, epsilon_low=0.2, epsilon_high=0.2, delta=4.0)
    assert token(surrogate, ratio, advantage) == pytest.approx(expected, abs=1e-5)


def rows(surrogate, ratios, advantages, mask):
    log_ratio = torch.tensor(ratios).log().requires_grad_()
    advantages = torch.tensor(advantages).unsqueeze(-1).expand_as(log_ratio)
    objective, bounded = surrogate(log_ratio, advantages, torch.tensor(mask, dtype=torch.bool))
    return objective, bounded, log_ratio


def test_gspo():
    # row 0: s = sqrt(2 * .5) = 1, A 1; row 1: s = sqrt(4 * 9) = 6 > 1.4, A 1; row 2: s = 6, A -1; padding is no token
    surrogate = partial(gspo, epsilon_low=0.2, epsilon_high=0.4)
    mask = [[1, 1, 0], [1, 1, 0], [1, 1, 0]]
    ratios = [[2.0, 0.5, 7.0], [4.0, 9.0, 7.0], [4.0, 9.0, 7.0]]
    objective, bounded, log_ratio = rows(surrogate, ratios, [1.0, 1.0, -1.0], mask)
    assert_close(objective[:, :2], torch.tensor([[1.0, 1.0], [1.4, 1.4], [-6.0, -6.0]]))
    assert bounded.tolist() == [[False] * 3, [True, True, False], [False] * 3]
    # a completion's mean has the gradient of s A: s A / length on each token
    (objective * torch.tensor(mask) / 2).sum().backward()
    assert_close(log_ratio.grad, torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [-3.0, -3.0, 0.0]]))


def test_cispo():
    # the weight has no gradient: sg(min(r, 5)) A d log r
    surrogate = partial(cispo, ratio_max=5.0)
    assert token(surrogate, 2.0, 3.0) == pytest.approx((2 * 3 * math.log(2), False, 6.0), abs=1e-5)
    assert token(surrogate, 8.0, 3.0) == pytest.approx((5 * 3 * math.log(8), True, 15.0), abs=1e-5)
    assert token(surrogate, 8.0, -3.0) == pytest.approx((-5 * 3 * math.log(8), True, -15.0), abs=1e-5)
    assert token(surrogate, 0.1, -3.0) == pytest.approx((-0.3 * math.log(0.1), False, -0.3), abs=1e-5)


def test_sapo():
    surrogate = partial(sapo, tau_positive=1.0, tau_negative=2.0)
    # at r = 1: 4 / tau * sigmoid(0) A = 2 A / tau, gradient A
    assert token(surrogate, 1.0, 3.0) == pytest.approx((6.0, False, 3.0), abs=1e-5)
    assert token(surrogate, 1.0, -3.0) == pytest.approx((-3.0, False, -3.0), abs=1e-5)
    # r = 2, tau 1: sigmoid(1) = .731059; gradient 4 * .731059 * .268941 * r A
    assert token(surrogate, 2.0, 1.0) == pytest.approx((2.924234, False, 1.572896), abs=1e-5)
    # r = 2, tau 2, A -1: sigmoid(2) = .880797; 2 * .880797; gradient 4 * .880797 * .119203 * 2
    assert token(surrogate, 2.0, -1.0) == pytest.approx((-1.761594, False, -0.839949), abs=1e-5)


def test_gmpo():
    # log r clipped to [-.4, .4] pessimistically: A > 0 from above, A < 0 from below
    e = math.e
    surrogate = partial(gmpo, epsilon_low=0.4, epsilon_high=0.4)
    ratios = [[e**1.0, e**-1.0, 7.0], [e**1.0, e**-1.0, 7.0]]
    objective, bounded, log_ratio = rows(surrogate, ratios, [2.0, -2.0], [[1, 1, 0], [1, 1, 0]])
    # A 2: (.4 - 1) / 2 = -.3;  A -2: (1 - .4) / 2 = .3
    assert_close(objective[:, :2], torch.tensor([[2 * e**-0.3] * 2, [-2 * e**0.3] * 2]))
    assert bounded.tolist() == [[True, False, False], [False, True, False]]
    (objective * torch.tensor([[1, 1, 0], [1, 1, 0]]) / 2).sum().backward()
    # of the tokens that are not bounded: value / length
    assert_close(log_ratio.grad, torch.tensor([[0.0, e**-0.3, 0.0], [-(e**0.3), 0.0, 0.0]]))


def test_reinforce():
    assert token(reinforce, 2.0, -3.0) == pytest.approx((-3 * math.log(2), False, -3.0), abs=1e-5)


ALL = [
    partial(clipped, epsilon_low=0.2, epsilon_high=0.2),
    partial(gspo, epsilon_low=0.2, epsilon_high=0.2),
    partial(cispo, ratio_max=5.0),
    partial(sapo, tau_positive=1.0, tau_negative=1.05),
    partial(gmpo, epsilon_low=0.4, epsilon_high=0.4),
    reinforce,
]


@pytest.mark.parametrize("surrogate", ALL)
def test_on_policy_the_gradient_is_the_advantage(surrogate):
    mask = torch.tensor([[True, True, True], [True, False, False]])
    advantages = torch.tensor([[1.5] * 3, [-0.5] * 3])
    log_ratio = torch.zeros(2, 3, requires_grad=True)
    objective, bounded = surrogate(log_ratio, advantages, mask)
    (objective * mask / mask.sum(-1, keepdim=True)).sum().backward()
    assert_close(log_ratio.grad, advantages * mask / mask.sum(-1, keepdim=True))
    assert not bounded.any()


@pytest.mark.parametrize("surrogate", ALL)
@pytest.mark.parametrize("value", [300.0, -300.0])
def test_extreme_ratios_stay_finite(surrogate, value):
    log_ratio = torch.full((2, 2), value, requires_grad=True)
    objective, _ = surrogate(log_ratio, torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.ones(2, 2, dtype=torch.bool))
    objective.sum().backward()
    assert objective.isfinite().all()
    assert log_ratio.grad.isfinite().all()


@pytest.mark.parametrize("surrogate", ALL)
def test_padding_and_a_row_without_tokens_disturb_nothing(surrogate):
    mask = torch.tensor([[True, True, False], [False, False, False]])
    advantages = torch.tensor([[2.0] * 3, [1.0] * 3])
    log_ratio = torch.tensor([[0.1, -0.2, 0.0], [0.0, 0.0, 0.0]])
    other = torch.tensor([[0.1, -0.2, 5.0], [3.0, -4.0, 2.0]])
    one, bounded = surrogate(log_ratio, advantages, mask)
    two, also = surrogate(other, advantages, mask)
    assert_close(one[mask], two[mask])
    assert two.isfinite().all()
    assert not bounded[~mask].any()
    assert not also[~mask].any()


@pytest.mark.parametrize("surrogate", ALL)
def test_other_shapes_are_refused(surrogate):
    with pytest.raises(ValueError, match="must match"):
        surrogate(torch.zeros(2, 3), torch.ones(2), torch.ones(2, 3, dtype=torch.bool))


def test_a_completions_sum():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert completion_sum(mask, mask.sum()).tolist() == [[0.5, 0.5, 0.0], [0.5, 0.0, 0.0]]
