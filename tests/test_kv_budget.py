"""A budget for keys and values: completions beyond it wait, and are the same."""

import pytest
import torch

from grpo_lightning.memory import COPIED, GiB, Shape
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import load
from grpo_lightning.sampler.native.kv_cache import rows_within
from grpo_lightning.sampler.native.shared_prompt_cache import Buffers
from grpo_lightning.types import Sampling
from tests.support.checkpoints import write_checkpoint
from tests.support.composed import composed
from tests.support.sampling import generate

SHAPE = Shape(trained=0, frozen=0, body=0, hidden=64, layers=10, intermediate=1, vocabulary=9, keys=32)
TOKEN = 2 * 4 * 32 * 10  # bytes of keys and values in float32
PROMPTS = ["The meaning of life is", "12 + 34 =", "Corgis are small dogs. The best food in the world"]


def within(tokens: float, **more) -> int:
    given = {"number_bytes": 4, "prompts": 3, "prompt_tokens": 50, "completion_tokens": 100, "shares_prompts": True}
    return rows_within(tokens * TOKEN / GiB, SHAPE, **given | more)


def test_rows_by_hand():
    assert within(150 + 400) == 4  # three prompts of 50 tokens once, and four completions
    assert within(150 + 399) == 3
    assert within(150 + 450, copies_below=1 << 30) == 3  # each with a copy of its prompt
    assert within(600, shares_prompts=False) == 4
    assert within(600, shares_prompts=False, number_bytes=2) == 8


def test_a_budget_below_one_completion_is_refused_with_the_least_that_is_allowed():
    with pytest.raises(ValueError, match=r"rollout\.kv_cache_gib=.* must be at least 0\.0008: 3 prompts of up to 50"):
        within(249)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> HFPolicy:
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", chat=False)
    policy = load(str(path), dtype="float32", attn_implementation="sdpa", trust_remote_code=False)
    policy.end_ids = list(range(24))
    return policy


@pytest.mark.parametrize(("copied", "share_prompts"), [(4 << 20, True), (0, False)])
def test_completions_beyond_a_budget_wait_and_are_the_same(policy, monkeypatch, copied, share_prompts):
    monkeypatch.setitem(COPIED, "cpu", copied)
    monkeypatch.setattr(policy, "share_prompts", share_prompts)
    options = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 60}
    expected = generate(policy, PROMPTS, group_size=6, sampling=Sampling(**options), seed=2)
    held = []
    grow = Buffers.grow

    def watched(self, tokens: int, capacity: int) -> bool:
        held.append((len(self[0][0]), capacity))
        return grow(self, tokens, capacity)

    monkeypatch.setattr(Buffers, "grow", watched)
    shape = policy.shape()
    token = 2 * 4 * shape.keys * shape.layers
    longest = max(map(len, policy.tokenize(PROMPTS)))
    gib = (4 * 60 + 3 * longest + 4 * longest) * token / GiB
    found = generate(policy, PROMPTS, group_size=6, sampling=Sampling(**options, kv_cache_gib=gib), seed=2)
    assert found.texts == expected.texts
    assert torch.equal(found.ids, expected.ids)
    if share_prompts:
        assert 4 <= max(rows for rows, _ in held) <= 5
        assert max(rows * capacity * token for rows, capacity in held) <= gib * GiB


def test_validation_keeps_to_it_too():
    config = composed("rollout.kv_cache_gib=0.5")
    assert config["validation"]["kv_cache_gib"] == 0.5
