"""Each error is really made in a policy, and named."""

import pytest
import torch

from grpo_lightning.advantage import centered
from grpo_lightning.module.update import SelfCheckError, check_rollout
from grpo_lightning.policy.loading import character_llama
from grpo_lightning.reference import frozen_copy
from grpo_lightning.reward import RewardSpec
from grpo_lightning.rollout import Collector
from grpo_lightning.rollout.scoring import StepContext
from grpo_lightning.types import Prompts, Sampling

SAMPLING = Sampling(temperature=0.8, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=6)


@pytest.fixture
def policy():
    made = character_llama(hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, context=64, seed=1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return made


def check(policy, reference=None, sampling=SAMPLING, **changed):
    reward = RewardSpec(lambda completions: [float(len(t)) for t in completions], 1.0)
    settings = {"reward": {"r": reward}, "advantage": centered, "outcome": "r", "threshold": 1.0, "group_size": 2}
    collector = Collector(**settings, **vars(SAMPLING))
    prompts = Prompts(("1 + 1", "a longer prompt"), {})
    collected = collector.collect(policy, reference, prompts, context=StepContext(seed=1, microbatch_tokens=999))
    check_rollout(policy, reference, collected.rollout, sampling, 999)


def test_a_sound_policy_passes(policy):
    check(policy)
    check(policy, frozen_copy(policy))


def test_another_temperature_than_sampled(policy):
    with pytest.raises(SelfCheckError, match="differ from the sampler's by up to .*another temperature was sampled"):
        check(policy, sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=6))


def test_randomness_in_the_model(policy):
    layer = policy.model.model.layers[0].mlp
    layer.register_forward_hook(lambda _m, _i, output: torch.nn.functional.dropout(output, 0.5))
    with pytest.raises(SelfCheckError, match="scoring the same completions twice differs .* dropout"):
        check(policy)


def test_a_model_that_ignores_the_attention_mask(policy):
    plain = policy.model.forward

    def forward(*arguments, attention_mask=None, **keywords):
        return plain(*arguments, attention_mask=None, **keywords)

    policy.model.forward = forward
    policy.share_prompts = False
    with pytest.raises(SelfCheckError, match=r"attention_mask or position_ids \(padding\)|step by step with its cache"):
        check(policy)


def test_a_reference_that_computes_something_else_with_the_same_weights(policy):
    reference = frozen_copy(policy)
    plain = reference.logprobs_and_entropy
    reference.logprobs_and_entropy = lambda rows, temperature: plain(rows, temperature=2 * temperature)
    with pytest.raises(SelfCheckError, match="the reference is a copy of the policy, yet"):
        check(policy, reference)


def test_a_reference_with_other_weights_is_none_of_its_business(policy):
    other = character_llama(hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, context=64, seed=2)
    check(policy, frozen_copy(other))
