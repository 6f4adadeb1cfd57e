"""Two completions, worked by hand.

row  A   ratio            min(rA, clip(r, .8, 1.4) A)   bound active
0   +1   1.0  1.5  0.5    1.0   1.4   0.5               -  x  -
1   -2   1.0  0.5  pad   -2.0  -1.6                     -  x
"""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.loss import PolicyLoss, clipped, completion_mean, constant, k3, token_mean
from grpo_lightning.types import Rollout

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
LOG_RATIO = torch.tensor([[1.0, 1.5, 0.5], [1.0, 0.5, 1.0]]).log()
ENTROPY = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.0]])
CLIP = partial(clipped, epsilon_low=0.2, epsilon_high=0.4)
ALL_WEIGHTS = [completion_mean, token_mean, partial(constant, length=4)]


def rollout(**changed) -> Rollout:
    """The two completions, old log-probabilities all zero."""
    zeros = torch.zeros(2, 3)
    fields = {
        "ids": torch.zeros(2, 5, dtype=torch.long),
        "attention_mask": torch.ones(2, 5, dtype=torch.bool),
        "mask": MASK,
        "old_logprobs": zeros,
        "ref_logprobs": zeros,
        "advantages": torch.tensor([[1.0], [-2.0]]).expand(2, 3),
    }
    return Rollout(**fields | changed)


def loss(weights=completion_mean, kl_coef=0.0, entropy_coef=0.0, kl=k3) -> PolicyLoss:
    return PolicyLoss(CLIP, kl, weights, kl_coef, entropy_coef)


@pytest.mark.parametrize(
    "weights, expected",
    [
        (completion_mean, 0.4166667),  # -( 2.9 / 3  +  -3.6 / 2 ) / 2
        (token_mean, 0.14),  # -( 2.9 - 3.6 ) / 5
        (partial(constant, length=4), 0.0875),  # -( 2.9 - 3.6 ) / (2 * 4)
    ],
    ids=["completion_mean", "token_mean", "constant"],
)
def test_loss(weights, expected):
    total, parts = loss(weights)(LOG_RATIO, ENTROPY, rollout(), weights(MASK))
    assert_close(total.item(), expected, rtol=1e-5, atol=0)
    assert parts.keys() == {"policy", "total"}
    assert_close(parts["policy"].item(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("weights", ALL_WEIGHTS)
def test_a_completion_without_tokens_weighs_nothing(weights):
    mask = torch.tensor([[True, True], [False, False]])
    found = weights(mask)
    assert found[1].tolist() == [0.0, 0.0]
    assert found.isfinite().all()


def test_kl_and_entropy_terms():
    ref = torch.tensor([[math.log(2.0)] * 3, [0.0] * 3])
    total, parts = loss(token_mean, kl_coef=0.5, entropy_coef=0.1)(
        torch.zeros(2, 3), ENTROPY, rollout(ref_logprobs=ref), token_mean(MASK)
    )
    assert_close(parts["kl"].item(), 0.5 * 3 * (1 - math.log(2.0)) / 5)  # 2 - log 2 - 1 on three of five tokens
    assert_close(parts["entropy"].item(), -0.1 * 1.5 / 5)
    assert_close(parts["policy"].item(), -(3 * 1 - 2 * 2) / 5)
    assert_close(total.item(), sum(parts[name].item() for name in ("kl", "entropy", "policy")))


def test_statistics_by_hand():
    found = loss(kl_coef=0.1).statistics(LOG_RATIO, rollout())
    assert_close(found["tokens"].item(), 5.0)
    assert_close(found["ratio_mean"].item(), 1.0 + 1.5 + 0.5 + 1.0 + 0.5)
    assert_close(found["ratio_max"].item(), 1.5)
    assert_close(found["clip_fraction"].item(), 2.0)
    metrics = PolicyLoss.metrics({"total": torch.tensor(7.0)}, found)
    assert {name: round(value.item(), 6) for name, value in metrics.items()} == {
        "loss/total": 7.0,
        "policy/clip_fraction": 0.4,
        "policy/ratio_mean": 0.9,
        "policy/ratio_max": 1.5,
    }


@pytest.mark.parametrize("kl_coef, entropy_coef, expected", [(0.0, 0.0, [0]), (0.1, 0.0, [0, 1]), (0.0, 0.1, [0, 1])])
def test_rows_that_can_have_a_gradient(kl_coef, entropy_coef, expected):
    advantages = torch.tensor([[0.0, -0.5, 0.0], [0.0, 0.0, 0.0]])
    found = loss(kl_coef=kl_coef, entropy_coef=entropy_coef).has_gradient(rollout(advantages=advantages))
    assert found.nonzero().flatten().tolist() == expected
    empty = rollout(mask=torch.zeros_like(MASK))
    assert not loss(kl_coef=kl_coef, entropy_coef=entropy_coef).has_gradient(empty).any()


@pytest.mark.parametrize("reduced", [lambda r, a, m: (r.sum(), r > 1), lambda r, a, m: r])
def test_a_surrogate_that_reduces_is_refused(reduced):
    loss = PolicyLoss(surrogate=reduced, kl=k3, weights=token_mean, kl_coef=0.0, entropy_coef=0.0)
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    rows = Rollout(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool), mask, zeros, zeros, zeros)
    with pytest.raises(ValueError, match=r"loss.surrogate: expected \(objective, bounded\), both \[1, 2\]"):
        loss(zeros, None, rows, torch.ones(1, 2))
