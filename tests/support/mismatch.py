"""Samplers that are not the policy: a rollout of ragged rows, and one for whole runs."""

from dataclasses import replace

import torch
from torch import Tensor

from grpo_lightning.policy import Policy
from grpo_lightning.rollout import Collector
from grpo_lightning.types import Rollout, Scored
from tests.support.running import small_module

NOISE = 0.4
"""The most, in nats, by which the log-probabilities of `Disturbed` are wrong."""


class Disturbed(Collector):
    """A rollout whose sampler states other log-probabilities than the policy's, the same in any process."""

    def compare(self, scored: Scored, ref_logprobs: Tensor) -> Rollout:
        rollout = super().compare(scored, ref_logprobs)
        length = rollout.mask.shape[1]
        places = torch.arange(length, device=rollout.mask.device)
        wrong = NOISE * torch.sin(rollout.ids[:, -length:] * 1.7 + places * 0.9 + 0.4)  # [B, T]
        return replace(rollout, old_logprobs=rollout.old_logprobs + wrong * rollout.mask)


def ragged(dtype: torch.dtype, noise: float) -> "tuple[Policy, Rollout]":
    """A policy and a rollout of ragged lengths, by a sampler and a reference that are off by ``noise`` nats or so.

    Two of the eight rows have no advantage.
    """
    policy = small_module("loss.kl_coef=0").policy.to(dtype)
    generator = torch.Generator().manual_seed(5)
    lengths, prompts, length, width = [1, 7, 3, 5, 2, 6, 4, 7], [3, 5, 2, 4, 5, 1, 4, 3], 7, 5
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    advantages = torch.randn(8, 1, generator=generator).to(dtype)
    advantages[2] = advantages[6] = 0.0
    rows = Rollout(
        ids=torch.randint(5, 90, (8, width + length), generator=generator),
        attention_mask=torch.cat([torch.arange(width) >= width - torch.tensor(prompts)[:, None], mask], 1),
        mask=mask,
        old_logprobs=torch.zeros(8, length, dtype=dtype),
        ref_logprobs=torch.zeros(8, length, dtype=dtype),
        advantages=advantages * mask,
    )
    with torch.no_grad():
        logprobs = policy.logprobs(rows, temperature=1.0).to(dtype)
    wrong = noise * torch.randn(2, 8, length, generator=generator).to(dtype) * mask
    return policy, replace(rows, old_logprobs=logprobs + wrong[0], ref_logprobs=logprobs + wrong[1])
