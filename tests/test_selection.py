"""Which groups and completions are trained on, against brute force and by hand."""

from itertools import combinations

import pytest
import torch

from grpo_lightning.advantage import replace_nan
from grpo_lightning.rollout.collector import max_variance, mixed, top_entropy_mask

NAN = float("nan")


def test_groups_whose_outcomes_differ():
    outcomes = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.6, 0.6], [NAN, 1.0], [NAN, NAN], [0.25, 0.5], [-1.0, NAN]])
    assert mixed(outcomes).tolist() == [False, True, False, False, False, True, False]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_no_other_choice_varies_more(size):
    rewards = torch.rand(20, 7, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    chosen = max_variance(rewards, size=size)
    for group, picked in zip(rewards, chosen):
        best = max(group[list(some)].var(correction=0) for some in combinations(range(7), size))
        assert group[picked].var(correction=0).item() == pytest.approx(best.item(), rel=1e-12)
        assert len(set(picked.tolist())) == size


def test_what_does_not_apply_is_replaced_by_the_mean_of_its_group():
    rewards = torch.tensor([[NAN, 1.0, 4.0], [2.0, NAN, NAN], [NAN, NAN, NAN], [0.5, 1.0, 2.0]])
    expected = [[2.5, 1.0, 4.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0], [0.5, 1.0, 2.0]]
    assert replace_nan(rewards).tolist() == expected


def test_tokens_of_highest_entropy():
    entropy = torch.tensor([[0.1, 0.9, 0.3], [0.5, 2.0, 3.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert top_entropy_mask(entropy, mask, fraction=0.4).tolist() == [
        [False, True, False],
        [False, True, False],
    ]  # 2 of 5
    assert top_entropy_mask(entropy, mask, fraction=0.01).tolist() == [
        [False, False, False],
        [False, True, False],
    ]  # 1 at least
    assert torch.equal(top_entropy_mask(entropy, mask, fraction=1.0), mask)
