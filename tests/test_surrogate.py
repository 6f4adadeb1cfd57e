"""What all surrogates have in common; test_formulas.py has their values and gradients."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.loss import (
    PolicyLoss,
    cispo,
    clipped,
    completion_mean,
    gmpo,
    gspo,
    k3,
    reinforce,
    response_clipped,
    sapo,
)
from tests.test_loss import rollout

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


def test_on_policy_the_gradient_is_the_advantage():
    for surrogate in ALL:
        mask = torch.tensor([[True, True, True], [True, False, False]])
        advantages = torch.tensor([[1.5] * 3, [-0.5] * 3])
        log_ratio = torch.zeros(2, 3, requires_grad=True)
        objective, bounded = surrogate(log_ratio, advantages, mask)
        lengths = mask.sum(-1, keepdim=True)
        (objective * mask / lengths).sum().backward()
        # of a mean over the tokens; the ratio of a whole response is a product, whose gradient no length divides
        assert_close(log_ratio.grad, advantages * mask / (1 if surrogate is RESPONSE else lengths))
        assert not bounded.any()


def test_a_gradient_is_known_beforehand_only_where_no_other_token_decides_it():
    for surrogate in ALL:
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
        known = objective.gradient_by_logprobs(batch, completion_mean(batch.mask), on_policy=False)
        assert (known is not None) == independent
        if known is not None:
            assert_close(known(one.detach().flatten(), torch.arange(6)).view(2, 3), gradients[0])


def test_extreme_ratios_stay_finite_and_other_shapes_are_refused():
    for surrogate in ALL:
        log_ratio = torch.tensor([[300.0] * 2, [-300.0] * 2] * 2, requires_grad=True)
        advantages, mask = (
            torch.tensor([[1.0] * 2, [1.0] * 2, [-1.0] * 2, [-1.0] * 2]),
            torch.ones(4, 2, dtype=torch.bool),
        )
        objective, _ = surrogate(log_ratio, advantages, mask)
        objective.sum().backward()
        assert objective.isfinite().all()
        assert log_ratio.grad.isfinite().all()
        with pytest.raises(ValueError, match="must match"):
            surrogate(torch.zeros(2, 3), torch.ones(2), torch.ones(2, 3, dtype=torch.bool))


def test_padding_and_a_row_without_tokens_disturb_nothing():
    for surrogate in ALL:
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
