"""Kills by the clock, a few of them; ``python -m tests.kills`` makes more."""

import pytest
import torch

from tests.kills import difference, main


@pytest.mark.slow
def test_runs_killed_at_random_moments_continue_exactly_and_leave_nothing(tmp_path):
    assert main(count=2, seed=5, place=tmp_path, most=1) == 0


def test_two_checkpoints_differ_where_one_bit_does():
    one = {"state": [{"a": torch.tensor([1.0, 2.0]), "rate": 0.5}]}
    same = {"state": ({"a": torch.tensor([1.0, 2.0]), "rate": 0.5},)}
    assert difference(one, same, "x") is None
    same["state"][0]["a"][1] += 2.4e-7
    assert difference(one, same, "x") == "x.state.0.a"
    assert difference(one, {"state": [{"a": torch.tensor([1.0, 2.0]), "rate": 0.4}]}, "x") == "x.state.0.rate"
    assert difference(one, {}, "x") == "x: the keys ['state']"
