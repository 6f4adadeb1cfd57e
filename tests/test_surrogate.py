"""Surrogates worked by hand, row by row; log r and A beside each."""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.loss import (
    PolicyLoss,
    cispo,
    clipped,
    completion_mean,
    completion_sum,
    gmpo,
    gspo,
    k3,
    reinforce,
    response_clipped,
    sapo,
)
from tests.test_loss import rollout

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


def test_response_clipped():
    # bounds .8 and 1.4    R         A   min(R A, clip(R) A)
    ratios = [
        [2.0, 0.5, 1.1],  # 1.1        1  1.1
        [4.0, 0.5, 7.0],  # 2          1  1.4   bounded; the third token is padding, as all that follow a 7
        [4.0, 0.5, 7.0],  # 2         -3  -6
        [0.5, 7.0, 7.0],  # .5        -3  -2.4  bounded
        [0.5, 7.0, 7.0],  # .5         1  .5
    ]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.bool)
    surrogate = partial(response_clipped, epsilon_low=0.2, epsilon_high=0.4)
    objective, bounded, log_ratio = rows(surrogate, ratios, [1.0, 1.0, -3.0, -3.0, 1.0], mask.tolist())
    values = [1.1, 1.4, -6.0, -2.4, 0.5]
    assert_close(objective[mask], torch.tensor([value for value, row in zip(values, mask) for _ in range(row.sum())]))
    assert bounded.tolist() == [[False] * 3, [True, True, False], [False] * 3, [True, False, False], [False] * 3]
    # a response counts once, whatever its length: 1 / 5 each, and R A / 5 is the gradient of every token of it
    total = (objective * completion_mean(mask)).sum()
    assert total.item() == pytest.approx((1.1 + 1.4 - 6.0 - 2.4 + 0.5) / 5, abs=1e-6)
    total.backward()
    expected = [[0.22] * 3, [0.0] * 3, [-1.2, -1.2, 0.0], [0.0] * 3, [0.1, 0.0, 0.0]]
    assert_close(log_ratio.grad, torch.tensor(expected))


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


RESPONSE = partial(response_clipped, epsilon_low=0.2, epsilon_high=0.2)
ALL = [
    RESPONSE,
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
    lengths = mask.sum(-1, keepdim=True)
    (objective * mask / lengths).sum().backward()
    # of a mean over the tokens; the ratio of a whole response is a product, whose gradient no length divides
    assert_close(log_ratio.grad, advantages * mask / (1 if surrogate is RESPONSE else lengths))
    assert not bounded.any()


@pytest.mark.parametrize("surrogate", ALL)
def test_a_gradient_is_known_beforehand_only_where_no_other_token_decides_it(surrogate):
    objective = PolicyLoss(surrogate, k3, completion_mean, 0.0, 0.0)
    batch = rollout(advantages=torch.tensor([[1.0] * 3, [-2.0] * 3]))
    one = torch.tensor([[0.1, 0.05, -0.1], [0.1, -0.05, 0.0]])
    other = one + torch.tensor([[0.0, 0.15, 0.2], [0.0, -0.2, 0.0]])  # the first token of each row is the same
    gradients = []
    for logprobs in (one, other):
        logprobs.requires_grad_()
        objective(logprobs, None, batch, completion_mean(batch.mask))[0].backward()
        gradients.append(logprobs.grad)
    independent = torch.equal(gradients[0][:, 0], gradients[1][:, 0])
    known = objective.gradient(batch, completion_mean(batch.mask), on_policy=False)
    assert (known is not None) == independent
    if known is not None:
        assert_close(known(one.detach().flatten(), torch.arange(6)).view(2, 3), gradients[0])


@pytest.mark.parametrize("surrogate", ALL)
def test_extreme_ratios_stay_finite_and_other_shapes_are_refused(surrogate):
    log_ratio = torch.tensor([[300.0] * 2, [-300.0] * 2] * 2, requires_grad=True)
    advantages, mask = torch.tensor([[1.0] * 2, [1.0] * 2, [-1.0] * 2, [-1.0] * 2]), torch.ones(4, 2, dtype=torch.bool)
    objective, _ = surrogate(log_ratio, advantages, mask)
    objective.sum().backward()
    assert objective.isfinite().all()
    assert log_ratio.grad.isfinite().all()
    with pytest.raises(ValueError, match="must match"):
        surrogate(torch.zeros(2, 3), torch.ones(2), torch.ones(2, 3, dtype=torch.bool))


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


def test_a_completions_sum():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert completion_sum(mask).tolist() == [[0.5, 0.5, 0.0], [0.5, 0.0, 0.0]]
