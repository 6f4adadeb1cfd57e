import math

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.advantage import centered
from grpo_lightning.batch import Prompts, Sampled, Sampling
from grpo_lightning.clock import Clock
from grpo_lightning.group import mixed
from grpo_lightning.judge import Judge, judge
from grpo_lightning.policy import Policy
from grpo_lightning.reward import Weighted
from grpo_lightning.rollout import Collector, collector, on_policy
from tests.test_loss import rollout as two_rows

SAMPLING = Sampling(temperature=0.5, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=3)
NAN = float("nan")


class Fixed(Policy):
    """Always answers the same six texts to two prompts; token t of row b has log-probability -(b + t / 10).

    Its entropy is (b + 1) / 10 nats; a token is a character.
    """

    texts = ("a", "b", "ab", "", "abc", "q")
    lengths = (1, 2, 3, 1, 3, 2)

    def __init__(self):
        super().__init__()
        self.calls = []

    def sample(self, prompts, *, group_size, sampling, seed, first_prompt=0, poll=None, ended=None):
        self.calls.append((tuple(prompts), group_size, sampling, seed))
        mask = torch.arange(3) < torch.tensor(self.lengths)[:, None]
        return Sampled(
            ids=torch.arange(6)[:, None].expand(6, 5),
            attention_mask=torch.cat([torch.ones(6, 2, dtype=torch.bool), mask], 1),
            mask=mask,
            logprobs=self.expected(torch.arange(6), mask),
            entropy=(torch.arange(6)[:, None] + 1) / 10 * mask,
            texts=self.texts,
            finished=(True, True, False, True, False, True),
        )

    @staticmethod
    def expected(rows, mask):
        return -(rows[:, None] + torch.arange(3) / 10) * mask

    def score(self, rows, *, temperature):
        self.calls.append(("score", len(rows), temperature))
        return self.expected(rows.ids[:, 0], rows.mask), torch.zeros(rows.mask.shape)

    def token_at(self, ids, end):
        return end - 1

    demonstrate = count_tokens = export = None  # not used here


Fixed.__abstractmethods__ = frozenset()
REWARDS = {
    "has_answer": Weighted(lambda completions, answer: [float(a in t) for t, a in zip(completions, answer)], 1.0),
    "length": Weighted(lambda completions: [float(len(t)) if t else None for t in completions], 0.5),
}
PROMPTS = Prompts(("p", "q"), {"answer": ("a", "b")})


def collect(policy, reference=None, tokens=1000, advantage=centered):
    collect = Collector(Judge(REWARDS, "has_answer", 1.0), advantage, 3, SAMPLING)
    return collect(policy, reference, PROMPTS, microbatch_tokens=tokens, seed=11, clock=Clock())


def test_rewards_are_weighted_and_centred_within_their_own_prompt():
    policy = Fixed()
    collected = collect(policy)
    rollout, judged = collected.rollout, collected.judged
    # prompt p (answer a): a -> 1 + .5, b -> 0 + .5, ab -> 1 + 1;   mean 4/3
    # prompt q (answer b): "" -> 0 (no length), abc -> 1 + 1.5, q -> 0 + .5;   mean 1
    assert_close(judged.rewards["total"], torch.tensor([1.5, 0.5, 2.0, 0.0, 2.5, 0.5]))
    assert_close(judged.rewards["length"], torch.tensor([1.0, 1.0, 2.0, NAN, 3.0, 1.0]), equal_nan=True)
    assert_close(
        rollout.advantages,
        torch.tensor([[1 / 6], [-5 / 6], [2 / 3], [-1.0], [1.5], [-0.5]]) * rollout.mask,
    )
    assert judged.right.tolist() == [True, False, True, False, True, False]
    assert policy.calls == [(("p", "q"), 3, SAMPLING, 11)]
    assert_close(rollout.old_logprobs, judged.sampled.logprobs)
    assert rollout.ref_logprobs.count_nonzero() == 0


def test_metrics_by_hand():
    metrics = collect(Fixed()).metrics
    found = {name: value.item() for name, value in metrics.items()}
    assert found["reward/total"] == pytest.approx(7 / 6)
    assert found["reward/has_answer"] == pytest.approx(1 / 2)
    assert found["reward/length"] == pytest.approx(8 / 5)  # of the five it applies to
    # sample deviations of (1.5, .5, 2) and (0, 2.5, .5)
    assert found["reward/std"] == pytest.approx((math.sqrt(7 / 12) + math.sqrt(7 / 4)) / 2)
    assert found["advantage/mean"] == pytest.approx(0.0, abs=1e-7)
    assert found["group/mixed"] == 1.0
    assert found["group/all_right"] == found["group/all_wrong"] == 0.0
    assert found["completion/length_mean"] == 2.0
    assert found["completion/length_max"] == 3.0
    assert found["completion/truncated_fraction"] == pytest.approx(2 / 6)


def test_groups_of_one_kind_are_counted():
    always, never = Weighted(lambda completions: [1.0] * 6, 1.0), Weighted(lambda completions: [0.5] * 6, 1.0)
    for reward, all_right in ((always, 1.0), (never, 0.0)):
        collect = Collector(Judge({"r": reward}, "r", 1.0), centered, 3, SAMPLING)
        collected = collect(Fixed(), None, PROMPTS, microbatch_tokens=99, seed=0, clock=Clock())
        rollout, metrics = collected.rollout, collected.metrics
        assert metrics["group/all_right"] == all_right
        assert metrics["group/all_wrong"] == 1 - all_right
        assert metrics["group/mixed"] == 0.0
        assert rollout.advantages.count_nonzero() == 0


@pytest.mark.parametrize("tokens", [1000, 10, 1])
def test_the_reference_is_scored_once_per_row_at_the_sampling_temperature(tokens):
    reference = Fixed()
    rollout = collect(Fixed(), reference, tokens).rollout
    assert_close(rollout.ref_logprobs, Fixed.expected(torch.arange(6), rollout.mask))
    assert sum(rows for _, rows, _ in reference.calls) == 6
    assert {temperature for _, _, temperature in reference.calls} == {0.5}


def test_on_policy_replaces_the_old_logprobs_only():
    rows = two_rows()
    logprobs = torch.full((2, 3), -0.5, requires_grad=True)
    found = on_policy(rows, logprobs)
    assert_close(found.old_logprobs, logprobs.detach())
    assert not found.old_logprobs.requires_grad
    assert found.advantages is rows.advantages


def test_the_outcome_is_accuracy_or_the_first_reward():
    assert judge({"format": REWARDS["length"], "accuracy": REWARDS["length"]}, None, 1.0).outcome == "accuracy"
    assert judge({"format": REWARDS["length"], "other": REWARDS["length"]}, None, 1.0).outcome == "format"
    assert judge({"format": REWARDS["length"], "other": REWARDS["length"]}, "other", 1.0).outcome == "other"


def test_the_flat_settings_arrive():
    made = collector(
        reward=REWARDS,
        advantage=centered,
        outcome="length",
        threshold=0.25,
        group_size=5,
        temperature=0.9,
        top_p=0.8,
        top_k=7,
        min_p=0.1,
        max_new_tokens=11,
        stop=["x"],
        kl_penalty=0.25,
        group_filter=mixed,
        max_tries=3,
        downsample=None,
        mask_truncated=True,
        top_entropy=0.5,
    )
    sampling = Sampling(0.9, 0.8, 7, 0.1, 11, ("x",))
    assert made == Collector(
        Judge(REWARDS, "length", 0.25),
        centered,
        5,
        sampling,
        0.25,
        mixed,
        3,
        None,
        mask_truncated=True,
        top_entropy=0.5,
    )
    assert made.sampling.truncated
    assert not SAMPLING.truncated
