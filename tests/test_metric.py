"""pass@k and maj@k by hand and by enumeration."""

import itertools

import pytest
import torch

from grpo_lightning.validation import MajorityAtK, PassAtK


def rights(*rows: str) -> torch.Tensor:
    return torch.tensor([[c == "x" for c in row] for row in rows])


def test_pass_at_k_by_hand_and_as_the_mean_over_all_subsets():
    for k, expected in (
        (1, (1 / 4 + 0 + 3 / 4) / 3),
        (2, (1 / 2 + 0 + 1) / 3),  # 1 - C(3,2)/C(4,2) = 1/2; 1 - C(1,2)/C(4,2) = 1
        (4, 2 / 3),
    ):
        metric = PassAtK(k)
        metric.update(rights("x...", "...."))
        metric.update(rights("xx.x"))
        assert metric.compute().item() == pytest.approx(expected)
    subsets = list(itertools.combinations("x..x.", 3))
    metric = PassAtK(3)
    metric.update(rights("x..x."))
    assert metric.compute().item() == pytest.approx(sum("x" in subset for subset in subsets) / len(subsets))
    metric.reset()
    metric.update(rights("...."))
    assert metric.compute().item() == 0.0


def test_majority_by_hand():
    metric = MajorityAtK(4)
    metric.update(rights("xx.."), [["7", "7", "1", "2"]])  # 7 wins, right
    assert metric.compute().item() == 1.0
    metric.update(rights(".x.."), [["1", "7", "1", "2"]])  # 1 wins, wrong
    assert metric.compute().item() == 0.5
    metric.reset()
    metric.update(rights("xx..", "x..."), [["7", "7", "1", "1"], ["7", "1", "2", "3"]])  # ties: 1/2 and 1/4
    assert metric.compute().item() == pytest.approx((1 / 2 + 1 / 4) / 2)
    metric = MajorityAtK(3)  # looks at the first three only
    metric.update(rights("xx..."), [["7", "7", "1", "1", "1"]])
    assert metric.compute().item() == 1.0


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="pass@3 needs at least 3"):
        PassAtK(3).update(rights("x."))
    with pytest.raises(ValueError, match="maj@3 needs at least 3"):
        MajorityAtK(3).update(rights("x."), [["1", "2"]])
