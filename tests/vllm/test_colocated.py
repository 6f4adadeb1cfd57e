"""vLLM inside this process, against the policy's own sampler and scores, in float32."""

from dataclasses import replace

import pytest
import torch

from tests.vllm.support import PROMPTS, SHARED, check_turns, disturb, engine, gap, sample, sampling, sync_weights, tiny


@pytest.fixture(scope="module")
def vllm():
    return engine()


@pytest.fixture
def policy():
    return tiny()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_log_probabilities_are_of_the_distribution_that_is_trained(vllm, policy, temperature):
    found = sample(vllm, policy, temperature=temperature)
    assert gap(policy, found, temperature) < 1e-3
    assert gap(policy, found, temperature + 0.1) > 1e-2  # not before the temperature, which is vLLM's default
    assert len(set(found.texts)) > len(PROMPTS)  # the completions of a group differ
    assert torch.equal(found.entropy, -found.logprobs)  # an estimate, which is right on average


@pytest.mark.parametrize(
    "filters",
    [{"top_p": 0.9, "top_k": 20}, {"min_p": 0.05}, {"top_p": 0.7, "min_p": 0.05}],
    ids=str,
)
def test_log_probabilities_are_of_the_sets_that_are_found_again(vllm, policy, filters):
    asked = replace(sampling(temperature=1.6), **filters)
    with sync_weights(vllm, policy):
        rows = vllm.generate(policy, PROMPTS, group_size=12, sampling=asked, seed=3)
    found = policy.support(rows, asked)
    near = torch.zeros_like(rows.mask)  # a bound, so that rounding decides
    for factor in (1 - 1e-4, 1 + 1e-4):
        top_p = asked.top_p * factor if asked.top_p < 1 else 1.0
        moved = replace(asked, top_p=top_p, min_p=asked.min_p * factor)
        near |= policy.support(rows, moved).support.sizes != found.support.sizes
    assert near.sum() < 0.02 * rows.mask.sum()
    clear = rows.mask & ~near
    assert not (found.outside & clear).any()
    own = policy.logprobs(replace(rows, support=found.support), temperature=1.6)
    assert (own - rows.logprobs).abs()[clear].max() < 1e-3
    assert (policy.logprobs(rows, temperature=1.6) - rows.logprobs).abs()[clear].max() > 0.02  # of all tokens


def test_new_weights_are_used_and_keys_and_values_of_older_ones_are_not(vllm, policy):
    prompts = [*PROMPTS, *(SHARED + word for word in ("cat", "dog"))]
    before = sample(vllm, policy, prompts)
    disturb(policy)
    after = sample(vllm, policy, prompts, version=1)
    assert gap(policy, before) > 0.05
    assert gap(policy, after) < 1e-3
    assert vllm.metrics == {"sampler/weight_version": 1.0}


def test_stop_strings_end_a_completion_with_the_token_that_completes_them(vllm, policy):
    stop = (" l", " i", "zz")
    free, cut = (sample(vllm, policy, stop=texts, temperature=1.3) for texts in ((), stop))
    assert free.texts != cut.texts
    for whole, part, finished in zip(free.texts, cut.texts, cut.finished):
        places = [whole.index(text) + len(text) for text in stop if text in whole]
        assert part == (whole[: min(places)] if places else whole)
        assert finished or len(part) >= 20
    assert gap(policy, cut, 1.3) < 1e-3


def test_a_rollout_can_be_left(vllm, policy):
    found, polls = sample(vllm, policy), []

    def poll():
        polls.append(1)
        if len(polls) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), sync_weights(vllm, policy):
        vllm.generate(policy, PROMPTS, group_size=4, sampling=sampling(), seed=3, poll=poll)
    assert sample(vllm, policy).texts == found.texts  # nothing of it is left in the engine


def test_an_adapter_is_merged(vllm):
    policy = tiny(adapter={"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
    disturb(policy, scale=0.2)
    assert gap(policy, sample(vllm, policy)) < 1e-3


def test_every_turn_is_drawn_from_the_distribution_that_is_trained(vllm, policy):
    check_turns(vllm, policy)
