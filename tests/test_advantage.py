import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.advantage import centered, leave_one_out, standardized

NAN = float("nan")
ALL = [standardized, centered, leave_one_out]
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


@pytest.mark.parametrize("advantage", ALL)
@pytest.mark.parametrize("value", [0.6, 1 / 3, -7e-3, 1e30])
def test_rounding_in_equal_rewards_is_no_signal(advantage, value):
    rewards = torch.full((1, 6), value)
    arguments = {"eps": 1e-9} if advantage is standardized else {}
    assert advantage(rewards, **arguments).count_nonzero() == 0


@pytest.mark.parametrize("advantage", ALL)
def test_groups_do_not_mix(advantage):
    rewards = torch.tensor([[0.0, 1.0, 5.0], [2.0, 2.5, 9.0]])
    changed = rewards.clone()
    changed[1] += torch.tensor([3.0, -1.0, 0.5])
    assert_close(advantage(changed)[0], advantage(rewards)[0], rtol=0, atol=0)
    assert_close(advantage(rewards.flip(0)).flip(0), advantage(rewards), rtol=0, atol=0)


@pytest.mark.parametrize("advantage", ALL)
@pytest.mark.parametrize("shape", [(3, 1), (4,)])
def test_a_group_of_one_is_refused(advantage, shape):
    with pytest.raises(ValueError, match="at least 2"):
        advantage(torch.ones(shape))


def test_only_two_corrections_exist():
    with pytest.raises(ValueError, match=r"advantage.correction=2: allowed are 0"):
        standardized(REWARDS, correction=2)


def test_the_tutorials_example_has_mean_one_half():
    # github.com/huggingface/open-r1's setting: rewards [1, 0, 1, 0], advantages r - mean
    assert_close(centered(torch.tensor([[1.0, 0.0, 1.0, 0.0]])), torch.tensor([[0.5, -0.5, 0.5, -0.5]]))
