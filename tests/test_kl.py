"""The gradients of the KL estimators, by exact enumeration: expectations over a small softmax without any sampling."""

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.loss import k1, k2, k3, k3_weighted

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1, -0.4], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.4, 0.2, 1.1, 0.0], dtype=torch.float64).log_softmax(-1)
SAMPLER = torch.tensor([0.1, -0.7, 0.2, 0.6, -0.1], dtype=torch.float64).log_softmax(-1)


def expected_gradient(estimator, sampler=None):
    """sum over tokens of sampler(token) * d estimator(token) / d logits; on-policy if no sampler is given."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    old = logprobs.detach() if sampler is None else sampler
    (old.exp() * estimator(logprobs, REFERENCE, logprobs - old)).sum().backward()
    return logits.grad


def divergence(forward):
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    one, other = (logprobs, REFERENCE) if forward else (REFERENCE, logprobs)
    value = (one.exp() * (one - other)).sum()
    value.backward()
    return value.item(), logits.grad


POLICY_TO_REFERENCE, REFERENCE_TO_POLICY = divergence(True), divergence(False)


def test_k1_as_a_loss_does_nothing():
    assert_close(expected_gradient(k1), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "estimator, expected",
    [(k2, POLICY_TO_REFERENCE[1]), (k3, REFERENCE_TO_POLICY[1]), (k3_weighted, POLICY_TO_REFERENCE[1])],
)
def test_expected_gradients_on_policy(estimator, expected):
    assert_close(expected_gradient(estimator), expected, rtol=0, atol=1e-12)


def test_off_policy_only_the_weighted_one_keeps_its_gradient():
    assert_close(expected_gradient(k3_weighted, SAMPLER), POLICY_TO_REFERENCE[1], rtol=0, atol=1e-12)
    for estimator in (k2, k3):
        for exact in (POLICY_TO_REFERENCE[1], REFERENCE_TO_POLICY[1]):
            assert (expected_gradient(estimator, SAMPLER) - exact).abs().max() > 0.01


@pytest.mark.parametrize("estimator", [k1, k3, k3_weighted])
def test_values_are_unbiased(estimator):
    logprobs = LOGITS.log_softmax(-1)
    value = (logprobs.exp() * estimator(logprobs, REFERENCE, torch.zeros(5))).sum()
    assert value.item() == pytest.approx(POLICY_TO_REFERENCE[0], abs=1e-12)


def test_a_penalty_in_the_reward_has_the_gradient_of_the_divergence():
    # the policy gradient of the reward -k1: E[-k1 d log pi] = -d KL(policy || reference)
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    reward = -k1(logprobs, REFERENCE).detach()
    (logprobs.detach().exp() * reward * logprobs).sum().backward()
    assert_close(logits.grad, -POLICY_TO_REFERENCE[1], rtol=0, atol=1e-12)
