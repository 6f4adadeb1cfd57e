"""Completions by the native sampler, and by policies of tests that make up their own."""

from grpo_lightning.rollout.scoring import StepContext
from grpo_lightning.sampler.base import Sampler
from grpo_lightning.sampler.native.sampler import NativeSampler

generate = NativeSampler().generate


class OfPolicy(Sampler):
    """Returns what the method ``sample`` of a policy makes up."""

    def generate(self, policy, prompts, *, responder=None, **arguments):
        return policy.sample(prompts, **arguments)


def context(**given):
    return StepContext(sampler=OfPolicy(), **given)
