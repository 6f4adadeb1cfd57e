"""Engines and policies small enough for seconds."""

import torch

from grpo_lightning.distributed.ranks import SINGLE_PROCESS
from grpo_lightning.policy.loading import load
from grpo_lightning.sampler.vllm.colocated import VLLM
from grpo_lightning.types import Clock, Sampling
from tests.support.episodes import FakeResponder, chatty

TINY = "pkg://grpo_lightning/policy/tiny"
PROMPTS = ["Spell backward: lamp", "Spell backward: winter", "What is 12 + 31?"]
SHARED = "Spell backward the last of these words: " + "cat dog sun moon tree house river stone " * 6
"""More than a block of keys and values, so that the engine keeps them."""


def tiny(**options):
    return load(TINY, dtype="float32", attn_implementation="sdpa", trust_remote_code=False, **options)


def engine(**options):
    own = {"seed": 0, "kv_cache_gib": 0.1, "enforce_eager": True, "engine": {"block_size": 32, "max_num_seqs": 32}}
    return VLLM(**{**own, **options})


def sampling(temperature=0.7, max_new_tokens=24, stop=()):
    return Sampling(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=max_new_tokens, stop=stop)


def sync_weights(sampler, policy, version=0):
    return sampler.sync_weights(policy, version=version, clock=Clock(), ranks=SINGLE_PROCESS)


def sample(sampler, policy, prompts=PROMPTS, *, group_size=4, seed=3, first_prompt=0, version=0, **options):
    """What the engine draws with the policy's weights as they are."""
    with sync_weights(sampler, policy, version):
        return sampler.generate(
            policy, prompts, group_size=group_size, sampling=sampling(**options), seed=seed, first_prompt=first_prompt
        )


def gap(policy, sampled, temperature=0.7):
    """The largest difference in nats between the engine's log-probabilities and the policy's of the same tokens."""
    with torch.no_grad():
        own = policy.logprobs(sampled, temperature=temperature)
    return float((own - sampled.logprobs).abs()[sampled.mask].max())


def disturb(policy, scale=0.05, seed=1):
    """Other weights, as after an optimizer step that is far too large."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight += scale * torch.randn(weight.shape, generator=generator)


def check_turns(sampler, policy):
    """Completions of several turns: replies are read and not trained, and every token has its own log-probability."""
    with sync_weights(sampler, policy):
        found = sampler.generate(
            policy, PROMPTS, group_size=4, sampling=sampling(max_new_tokens=80), seed=3, responder=FakeResponder(chatty)
        )
    replied = found.attention_mask[:, -found.mask.shape[1] :] & ~found.mask
    assert max(map(len, found.turns)) > 2
    assert replied.sum() > 10
    assert found.logprobs[replied].abs().max() == 0
    assert gap(policy, found) < 1e-3
    assert gap(policy, found, 0.9) > 1e-2
