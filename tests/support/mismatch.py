"""Samplers that are not the policy, staged: one for whole runs, and one whose expectations can be enumerated."""

import copy
import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from grpo_lightning.loss import Correction, PolicyLoss, constant, k3, reinforce
from grpo_lightning.rollout import Collector
from grpo_lightning.types import Rollout, Scored

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


VOCABULARY, LENGTH, WIDTH = 4, 5, 8
COMPLETIONS = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
"""[V^T, T] all that can be sampled."""
OFFSET = 24.0
"""Of all logits, as real models have them: probabilities do not see it, and between 16 and 32 numbers in bf16 are 0.125
apart."""


class Recurrent(nn.Module):
    """A language model of four tokens."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = {"token": (WIDTH, VOCABULARY), "before": (WIDTH, WIDTH), "head": (VOCABULARY, WIDTH)}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.randn(size, generator=generator) / size[1] ** 0.5 * 1.5))

    def forward(self) -> Tensor:
        """Log-probabilities [V^T, T] of the tokens of every completion, in the weights' arithmetic up to the logits.

        The softmax over these is computed in float64, so that the probabilities of all completions add up to 1.
        """
        token = self.token.new_zeros(len(COMPLETIONS), VOCABULARY)
        hidden, taken = self.token.new_zeros(len(COMPLETIONS), WIDTH), []
        for chosen in COMPLETIONS.T:
            hidden = torch.tanh(token @ self.token.T + hidden @ self.before.T)
            logits = hidden @ self.head.T + OFFSET
            taken.append(logits.double().log_softmax(-1).gather(-1, chosen[:, None]))
            token = nn.functional.one_hot(chosen, VOCABULARY).to(token.dtype)
        return torch.cat(taken, -1)


@dataclass(frozen=True)
class Staged:
    """A float32 policy, a sampler of the same weights in bf16, and a reward of every completion."""

    policy: Recurrent
    sampler: Tensor
    """[V^T, T] log mu."""
    advantages: Tensor
    """[V^T] the rewards less their mean under the sampler."""

    @classmethod
    @torch.no_grad()
    def of(cls, seed: int) -> "Staged":
        policy = Recurrent(seed)
        sampler = copy.deepcopy(policy).bfloat16()()
        rewards = torch.randn(len(COMPLETIONS), generator=torch.Generator().manual_seed(seed)).double()
        return cls(policy, sampler, rewards - (sampler.sum(-1).exp() * rewards).sum())

    def mean(self, drawn_by: Tensor, correction: Correction | None) -> Tensor:
        """[number of weights] the mean gradient, exactly, of the loss of a completion with log-probs [V^T, T]."""
        mask = torch.ones(COMPLETIONS.shape, dtype=torch.bool)
        loss = PolicyLoss(reinforce, k3, lambda m: constant(m, length=LENGTH) * len(m), 0.0, 0.0, correction)
        logprobs = self.policy()
        rows = Rollout(
            ids=torch.cat([torch.zeros(len(COMPLETIONS), 1, dtype=torch.long), COMPLETIONS], 1),
            attention_mask=torch.ones(len(COMPLETIONS), LENGTH + 1, dtype=torch.bool),
            mask=mask,
            old_logprobs=logprobs.detach(),
            ref_logprobs=torch.zeros_like(logprobs),
            advantages=self.advantages[:, None].expand(-1, LENGTH),
        )
        factor = loss.correct(logprobs.detach() - drawn_by, mask, on_policy=True)
        probabilities = drawn_by.sum(-1, keepdim=True).exp()  # [V^T, T] -> [V^T, 1]
        value, _ = loss(logprobs, None, rows, probabilities * loss.weights(mask) * factor)
        return torch.cat([part.flatten() for part in torch.autograd.grad(value, list(self.policy.parameters()))])
