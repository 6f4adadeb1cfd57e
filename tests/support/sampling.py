"""Completions by the native sampler, and by policies of tests that make up their own."""

from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import load
from grpo_lightning.rollout.scoring import StepContext
from grpo_lightning.sampler import Sampler
from grpo_lightning.sampler.native import NativeSampler

generate = NativeSampler().generate

PROMPTS = ["The meaning of life is", "12 + 34 =", "Corgis are small dogs. The best food in the world"]
LENGTH = 30
ENDS = list(range(24))
"""Many end tokens, so that completions of a random model have different lengths."""
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": LENGTH}
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "truncated": {"temperature": 1.2, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "stop": {"stop": ("a", "th"), "top_k": 300},
    "greedy": {"temperature": 0.0},
    "multi_turn": {"top_p": 0.9},
}
FREE = PLAIN | {"max_new_tokens": 12}
NUCLEUS = FREE | {"temperature": 0.6, "top_p": 0.95}


def opened(path, *, end_ids=ENDS, **options) -> HFPolicy:
    defaults = {"dtype": "float32", "attn_implementation": "sdpa", "trust_remote_code": False}
    policy = load(str(path), **defaults | options)
    policy.end_ids = policy.end_ids if end_ids is None else end_ids
    return policy


class OfPolicy(Sampler):
    """Returns what the method ``sample`` of a policy makes up."""

    def generate(self, policy, prompts, *, responder=None, **arguments):
        return policy.sample(prompts, **arguments)

    def sample(self, policy, request):
        raise NotImplementedError


def context(**given):
    return StepContext(sampler=OfPolicy(), **given)
