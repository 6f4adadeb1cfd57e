import math
from dataclasses import MISSING, fields, replace

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.advantage import centered
from grpo_lightning.policy import Policy
from grpo_lightning.policy.generic import TokenizerAdapter
from grpo_lightning.reward import RewardSpec
from grpo_lightning.rollout import Collector, mixed
from grpo_lightning.rollout.scoring import Scorer
from grpo_lightning.types import Prompts, Sampled, Sampling
from tests.support.composed import build, composed
from tests.support.sampling import context as make_context

SAMPLING = Sampling(temperature=0.5, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=3)
NAN = float("nan")


class Fixed(Policy):
    """Always answers the same six texts to two prompts; token t of row b has log-probability -(b + t / 10).

    Its entropy is (b + 1) / 10 nats; a token is a character.
    """

    texts = ("a", "b", "ab", "", "abc", "q")
    lengths = (1, 2, 3, 1, 3, 2)

    def __init__(self):
        super().__init__(TokenizerAdapter(None), end_ids=[])
        self.calls = []

    def sample(self, prompts, *, group_size, sampling, seed, first_prompt=0, poll=None, on_finished=None):
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

    def logprobs_and_entropy(self, rows, *, temperature, entropy=False, loss_gradient=None):
        self.calls.append(("logprobs", len(rows), temperature))
        return self.expected(rows.ids[:, 0], rows.mask), torch.zeros(rows.mask.shape) if entropy else None

    def token_at(self, ids, end):
        return end - 1

    device = None  # not used here


REWARDS = {
    "has_answer": RewardSpec(lambda completions, answer: [float(a in t) for t, a in zip(completions, answer)], 1.0),
    "length": RewardSpec(lambda completions: [float(len(t)) if t else None for t in completions], 0.5),
}
PROMPTS = Prompts(("p", "q"), {"answer": ("a", "b")})


def collector(**changed):
    settings = {"reward": REWARDS, "advantage": centered, "outcome": "has_answer", "threshold": 1.0, "group_size": 3}
    return Collector(**settings | vars(SAMPLING) | changed)


def collect(policy, reference=None, tokens=1000, **changed):
    context = make_context(seed=11)
    return collector(**changed).collect(policy, reference, PROMPTS, context=replace(context, microbatch_tokens=tokens))


def test_rewards_are_weighted_and_centred_within_their_own_prompt():
    policy = Fixed()
    collected = collect(policy)
    rollout, scored = collected.rollout, collected.scored
    # prompt p (answer a): a -> 1 + .5, b -> 0 + .5, ab -> 1 + 1;   mean 4/3
    # prompt q (answer b): "" -> 0 (no length), abc -> 1 + 1.5, q -> 0 + .5;   mean 1
    assert_close(scored.rewards["total"], torch.tensor([1.5, 0.5, 2.0, 0.0, 2.5, 0.5]))
    assert_close(scored.rewards["length"], torch.tensor([1.0, 1.0, 2.0, NAN, 3.0, 1.0]), equal_nan=True)
    assert_close(rollout.advantages, torch.tensor([[1 / 6], [-5 / 6], [2 / 3], [-1.0], [1.5], [-0.5]]) * rollout.mask)
    assert scored.right.tolist() == [True, False, True, False, True, False]
    assert policy.calls == [(("p", "q"), 3, SAMPLING, 11)]
    assert_close(rollout.old_logprobs, scored.sampled.logprobs)
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


@pytest.mark.parametrize("tokens", [1000, 10, 1])
def test_the_reference_is_scored_once_per_row_at_the_sampling_temperature(tokens):
    reference = Fixed()
    rollout = collect(Fixed(), reference, tokens).rollout
    assert_close(rollout.ref_logprobs, Fixed.expected(torch.arange(6), rollout.mask))
    assert sum(rows for _, rows, _ in reference.calls) == 6
    assert {temperature for _, _, temperature in reference.calls} == {0.5}


LENGTH = REWARDS["length"]
NAMES = [
    (["format", "accuracy"], None, "accuracy"),
    (["format", "other"], None, "format"),
    (["format", "accuracy"], "format", "format"),
    (["format", "other"], "other", "other"),
]


@pytest.mark.parametrize("names, outcome, expected", NAMES)
def test_right_is_what_the_outcome_says_whatever_its_weight_and_the_other_rewards(names, outcome, expected):
    never = RewardSpec(lambda completions: [0.0] * len(completions), 100.0)
    rewards = dict.fromkeys(names, never) | {expected: RewardSpec(LENGTH.function, 0.0)}
    policy = Fixed()
    scored, failures = Scorer(rewards, outcome, 2.0).generate_and_score(
        policy, PROMPTS, group_size=3, sampling=SAMPLING, context=make_context(seed=11)
    )
    # lengths 1, 1, 2, none, 3, 1: a reward that does not apply is not right
    assert scored.right.tolist() == [False, False, True, False, True, False]
    assert failures == {}
    assert policy.calls == [(("p", "q"), 3, SAMPLING, 11)]


def test_its_fields_are_the_keys_of_the_settings_with_the_same_defaults():
    keys = {key: value for key, value in composed()["rollout"].items() if key != "_target_"}
    assert [field.name for field in fields(Collector)] == list(keys)
    defaults = {field.name: field.default for field in fields(Collector) if field.default is not MISSING}
    own = {"kl_penalty", "teacher_coef", "group_filter", "max_tries", "downsample", "mask_truncated", "top_entropy"}
    assert defaults.keys() == own | {"kv_cache_gib", "environment"}
    assert {name: keys[name] for name in defaults} == defaults
    given = {"kl_penalty": 0.25, "max_tries": 3, "mask_truncated": True, "top_entropy": 0.5, "group_size": 5}
    words = [f"rollout.{name}={value}" for name, value in given.items()]
    made = build("rollout=dynamic_sampling", "rollout.stop=[x]", *words)("rollout")
    assert {name: getattr(made, name) for name in given} == given
    assert made.group_filter.func is mixed
    assert (made.outcome, made.threshold, made.downsample) == (None, 1.0, None)
    assert made.sampling.stop == ("x",)
    assert list(made.reward) == ["accuracy", "format"]
