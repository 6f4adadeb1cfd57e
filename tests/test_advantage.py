import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.advantage import (
    batch_standardized,
    batch_whitened,
    centered,
    gdpo,
    leave_one_out,
    per_reward,
    process,
    standardized,
    to_go,
)

NAN = float("nan")
ALL = [standardized, centered, leave_one_out]
EVERY = [*ALL, batch_standardized, batch_whitened]
REWARDS = torch.tensor([[1.0, 0.0, 0.0, 2.0], [3.0, 3.0, 3.0, 3.0]])


@pytest.mark.parametrize(
    "advantage, expected",
    [
        (centered, [0.25, -0.75, -0.75, 1.25]),  # mean 3/4
        (leave_one_out, [1 / 3, -1.0, -1.0, 5 / 3]),  # 1 - (0+0+2)/3, 0 - (1+0+2)/3, ., 2 - (1+0+0)/3
        # squares .0625 + .5625 + .5625 + 1.5625 = 2.75: std sqrt(2.75/3) = .957427 and sqrt(2.75/4) = .829156
        (lambda r: standardized(r, eps=0.5), [0.171534, -0.514603, -0.514603, 0.857672]),
        (lambda r: standardized(r, eps=0.5, correction=0), [0.188090, -0.564271, -0.564271, 0.940451]),
    ],
    ids=["centered", "leave_one_out", "sample", "population"],
)
def test_by_hand_and_equal_rewards_teach_nothing(advantage, expected):
    assert_close(advantage(REWARDS), torch.tensor([expected, [0.0] * 4]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "advantage, expected",
    [
        (centered, [-1.0, 0.0, 1.0, 0.0]),
        (leave_one_out, [-2.0, 0.0, 2.0, 0.0]),  # n = 2: 2/1
        (lambda r: standardized(r, eps=0.0), [-(0.5**0.5), 0.0, 0.5**0.5, 0.0]),  # sample std of (1, 3) = sqrt 2
        (lambda r: standardized(r, eps=0.0, correction=0), [-1.0, 0.0, 1.0, 0.0]),
    ],
    ids=["centered", "leave_one_out", "sample", "population"],
)
def test_a_reward_that_does_not_apply_enters_nothing(advantage, expected):
    rewards = torch.tensor([[1.0, NAN, 3.0, NAN], [NAN, NAN, NAN, 7.0], [NAN] * 4])
    assert_close(advantage(rewards), torch.tensor([expected, [0.0] * 4, [0.0] * 4]))


@pytest.mark.parametrize("value", [0.6, 1 / 3, -7e-3, 1e30])
def test_rounding_in_equal_rewards_scores_and_steps_is_no_signal(value):
    for advantage in EVERY:
        arguments = {"eps": 1e-9} if advantage in (standardized, batch_standardized, batch_whitened) else {}
        assert advantage(torch.full((1, 6), value), **arguments).count_nonzero() == 0
    assert per_reward(torch.full((2, 1, 6), value), torch.tensor([1.0, 0.1]), eps=1e-9).count_nonzero() == 0
    steps = torch.full((1, 3, 4), NAN)
    steps[0, :, 1] = steps[0, :, 3] = value
    assert process(steps, eps=1e-9).count_nonzero() == 0


def test_batch_whitened_by_hand():
    # centered: (-1, 1), (-.25, .25); squares sum to 2.125; sample std over 4: sqrt(2.125 / 3) = .841625
    found = batch_whitened(torch.tensor([[0.0, 2.0], [0.5, 1.0]]), eps=0.0)
    assert_close(found, torch.tensor([[-1.188177, 1.188177], [-0.297044, 0.297044]]), rtol=1e-5, atol=0)
    # population: sqrt(2.125 / 4) = .728869; a reward that does not apply is none of the 4
    rewards = torch.tensor([[0.0, 2.0, NAN], [0.5, NAN, 1.0]])
    found = batch_whitened(rewards, eps=0.271131, correction=0)
    assert_close(found, torch.tensor([[-1.0, 1.0, 0.0], [-0.25, 0.0, 0.25]]), rtol=1e-5, atol=1e-6)


def test_batch_standardized_by_hand():
    # all four: mean .875, deviations -.875, 1.125, -.375, .125: squares sum 2.1875; sample sqrt(2.1875 / 3) = .853913
    found = batch_standardized(torch.tensor([[0.0, 2.0], [0.5, 1.0]]), eps=0.0)
    assert_close(found, torch.tensor([[-1.171080, 1.171080], [-0.292770, 0.292770]]), rtol=1e-5, atol=0)
    # population: sqrt(2.1875 / 4) = .739510
    rewards = torch.tensor([[0.0, 2.0, NAN], [0.5, NAN, 1.0]])
    found = batch_standardized(rewards, eps=0.26049, correction=0)
    assert_close(found, torch.tensor([[-1.0, 1.0, 0.0], [-0.25, 0.0, 0.25]]), rtol=1e-5, atol=1e-6)


def test_every_reward_by_itself_by_hand():
    # two rewards of a group of two: each standardized is (-1, 1) / sqrt 2 whatever its scale; the equal one is 0
    scores = torch.tensor([[[0.0, 1.0], [5.0, 5.0]], [[900.0, 300.0], [1.0, 3.0]]])
    found = per_reward(scores, torch.tensor([1.0, 0.25]), eps=0.0)
    half = 0.5**0.5
    assert_close(found, half * torch.tensor([[-1 + 0.25, 1 - 0.25], [-0.25, 0.25]]))
    missing = torch.tensor([[[0.0, 1.0, 1.0]], [[NAN, 2.0, 4.0]]])
    expected = standardized(missing[0]) + 3 * standardized(missing[1])
    assert_close(per_reward(missing, torch.tensor([1.0, 3.0])), expected)


def test_gdpo_by_hand():
    # per reward: sqrt(1/2) (-.75, .75), (-.25, .25); mean 0; squares sum (.5625 + .0625) = .625; std sqrt(.625 / 3)
    scores = torch.tensor([[[0.0, 1.0], [5.0, 5.0]], [[900.0, 300.0], [1.0, 3.0]]])
    found = gdpo(scores, torch.tensor([1.0, 0.25]), eps=0.0)
    expected = torch.tensor([[-0.75, 0.75], [-0.25, 0.25]]) * 0.5**0.5 / (0.625 / 3) ** 0.5
    assert_close(found, expected)
    assert gdpo(torch.full((2, 2, 3), 0.6), torch.tensor([1.0, 0.1]), eps=1e-9).count_nonzero() == 0
    nothing = torch.full((2, 1, 3), NAN)
    assert gdpo(nothing, torch.tensor([1.0, 0.1]), eps=1e-9).count_nonzero() == 0


def test_process_supervision_by_hand():
    # completion a: steps end at tokens 1 (score 0) and 3 (score 4); b: one step ends at token 2 (score 2)
    # mean 2, sample std 2: normalized -1, 1 and 0; a token has what ends at it or after it
    steps = torch.full((1, 2, 5), NAN)
    steps[0, 0, 1], steps[0, 0, 3], steps[0, 1, 2] = 0.0, 4.0, 2.0
    expected = torch.tensor([[[0.0, 0.0, 1.0, 1.0, 0.0], [0.0] * 5]])
    assert_close(process(steps, eps=0.0), expected)
    # population deviation sqrt(8/3): -1.224745, 1.224745
    assert_close(process(steps, eps=0.0, correction=0), 1.2247449 * expected)
    steps[0, 1, 2] = 5.0  # mean 3, deviations -3, 1, 2: sample std sqrt 7
    expected = torch.tensor([[[-2.0, -2.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 0.0, 0.0]]]) / 7**0.5
    assert_close(process(steps, eps=0.0), expected)


def test_a_group_of_one_and_other_corrections_are_refused():
    for advantage in EVERY:
        for shape in ((3, 1), (4,)):
            with pytest.raises(ValueError, match="at least 2"):
                advantage(torch.ones(shape))
    for advantage in (process, to_go):
        with pytest.raises(ValueError, match="at least 2"):
            advantage(torch.zeros(1, 1, 3))
    with pytest.raises(ValueError, match=r"advantage.correction=2: allowed are 0"):
        standardized(REWARDS, correction=2)
