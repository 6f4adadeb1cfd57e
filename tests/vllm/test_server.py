"""A real ``vllm serve`` on this machine's CPU."""

from dataclasses import replace

from grpo_lightning.sampler.vllm.server import VLLMServer
from tests.vllm.support import PROMPTS, SHARED, check_turns, disturb, gap, sample, sampling, sync_weights, tiny


def test_a_real_server_draws_with_the_weights_that_are_trained(url, tmp_path):
    policy, sampler = tiny(), VLLMServer(url=url, directory=str(tmp_path), timeout=60)
    prompts = [*PROMPTS, SHARED]
    found = sample(sampler, policy, prompts)
    assert gap(policy, found) < 1e-3
    assert gap(policy, found, 0.9) > 1e-2
    assert sample(sampler, policy, prompts).texts == found.texts
    disturb(policy)
    again = sample(sampler, policy, prompts, version=1)
    assert gap(policy, found) > 0.05
    assert gap(policy, again) < 1e-3
    assert sampler.metrics == {"sampler/weight_version": 1.0}


def test_a_real_server_draws_from_the_sets_that_are_found_again(url, tmp_path):
    policy, sampler = tiny(), VLLMServer(url=url, directory=str(tmp_path), timeout=60)
    asked = replace(sampling(temperature=1.3), top_p=0.8, top_k=10, min_p=0.02)
    with sync_weights(sampler, policy):
        found = sampler.generate(policy, PROMPTS, group_size=4, sampling=asked, seed=3)
    kept = policy.support(found, asked)
    assert not kept.outside.any()
    assert gap(policy, found, 1.3) > 0.02
    assert gap(policy, replace(found, support=kept.support), 1.3) < 1e-3


def test_every_turn_on_a_real_server_is_drawn_from_the_distribution_that_is_trained(url, tmp_path):
    policy, sampler = tiny(), VLLMServer(url=url, directory=str(tmp_path), timeout=60)
    check_turns(sampler, policy)
