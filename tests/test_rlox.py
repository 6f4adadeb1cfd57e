"""rlox (Rust and PyTorch, by others) as an oracle: its group advantages, and whole updates of its GRPO.

rlox's conventions, as of 1.2.0: the deviation is the population's (divisor G), nothing is added to it, and a group
whose deviation is below 1e-8 gets zeros. Its loss is the mean over rows of
-A sum log pi + kl_coef sum (log pi - log pi_ref), over all tokens of what ``generate`` returns but the first one, so
over those of the prompt, too.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import grpo_lightning as grpo
from grpo_lightning.advantage import centered, standardized

rlox = pytest.importorskip("rlox", reason="a development requirement", exc_type=ImportError)
GRPO = pytest.importorskip("rlox.algorithms.grpo", exc_type=ImportError).GRPO

SETTINGS = (
    *("experiment=rlox_quickstart", "data.prompts_per_step=3", "data.max_prompt_length=null", "trainer=cpu"),
    *("advantage.correction=0", "advantage.eps=1e-12", "loss.kl._target_=grpo_lightning.loss.k1"),
    *("loss.weights._target_=grpo_lightning.loss.completion_sum", "~loss.weights.length"),
)
SGD = ("optimizer._target_=torch.optim.SGD", "~optimizer.betas", "~optimizer.fused", "optimizer.lr=1.0")
VOCABULARY = 11


def groups(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size, scale, shift", [(2, 1.0, 0.0), (8, 1e-3, 5.0), (64, 1e4, -1e4)])
def test_standardized_advantages_are_rloxs(size, scale, shift):
    rewards = groups(7, size, seed=size) * scale + shift
    expected = rlox.compute_batch_group_advantages(rewards.flatten().numpy(), size).reshape(7, size)
    found = standardized(rewards, eps=0.0, correction=0)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)
    single = np.stack([rlox.compute_group_advantages(group) for group in rewards.numpy()])
    np.testing.assert_allclose(single, expected)
    # and centered ones are these times the deviation that rlox divides by
    deviation = rewards.numpy().std(-1, keepdims=True)
    np.testing.assert_allclose(centered(rewards), expected * deviation, rtol=1e-8, atol=1e-8)


class Recurrent(nn.Module):
    """``forward(ids) -> logits``, each from the tokens so far."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.cell = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, ids):
        return self.head(self.cell(self.embedding(ids))[0])


class Answering(nn.Module):
    """The same network with rlox's ``generate``, which answers what it was told to."""

    def __init__(self, network):
        super().__init__()
        self.network, self.answers = network, []

    def forward(self, ids):
        return self.network(ids)

    def generate(self, prompts, max_new_tokens):
        answers = torch.tensor(self.answers.pop(0))
        assert answers.shape == (len(prompts), max_new_tokens)
        return torch.cat([prompts, answers], dim=1)


class Sides:
    """One network trained here, and a copy of it by rlox on the completions that were sampled here."""

    def __init__(self, prompts, *overrides, kl_coef=0.1, optimizer=None, max_grad_norm=1.0):
        torch.manual_seed(0)
        own, reference = Recurrent(), Recurrent()
        with torch.no_grad():
            for parameter in [*own.parameters(), *reference.parameters()]:
                parameter.mul_(2.0)
        self.prompts = prompts
        self.ids, self.rewards = [], []
        self.theirs = Answering(copy.deepcopy(own))
        self.run = grpo.compose(
            *SETTINGS,
            f"loss.kl_coef={kl_coef}",
            f"module.max_grad_norm={max_grad_norm}",
            *overrides,
            run_dir="/nonexistent",
            policy=own,
            reference=reference,
            reward=self._reward,
            data=prompts,
        )
        self.own = own
        self.rlox = GRPO(
            model=self.theirs,
            ref_model=copy.deepcopy(reference).eval(),
            reward_fn=lambda completions, prompts: self.rewards[-1],
            group_size=4,
            kl_coef=kl_coef,
            learning_rate=1e-4,
            max_new_tokens=8,
        )
        self.rlox.max_grad_norm = max_grad_norm
        if optimizer is not None:
            self.rlox.optimizer = optimizer(self.theirs.parameters())

    def _reward(self, completion_ids):
        self.ids.append(completion_ids)
        self.rewards.append([sum(row) / 40 + (row[0] == 3) for row in completion_ids])
        return self.rewards[-1]

    def step(self):
        """One update on both sides; the metrics of each."""
        found = self.run.module.train_step(self.prompts)
        self.theirs.answers.append(self.ids[-1])
        return found, self.rlox.train_step(torch.tensor(self.prompts))

    def weights(self):
        return [torch.cat([p.detach().flatten() for p in side.parameters()]) for side in (self.own, self.theirs)]


def by_gradient(prompts, *overrides, kl_coef):
    """Steps of length 1 against the gradient, which is not clipped: before minus after is the gradient."""
    return Sides(
        prompts,
        *SGD,
        *overrides,
        kl_coef=kl_coef,
        max_grad_norm=1e9,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )


def test_one_update_has_rloxs_gradient():
    kl_coef = 0.5
    sides = by_gradient([[1], [4], [9]], kl_coef=kl_coef)  # rlox counts a prompt's tokens but the first: none here
    before = sides.weights()[0]
    reference = copy.deepcopy(sides.rlox.ref_model)
    start = copy.deepcopy(sides.theirs)
    found, theirs = sides.step()
    own, other = (before - after for after in sides.weights())
    assert own.norm() > 1
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    assert found["reward/total"] == pytest.approx(theirs["mean_reward"])
    assert found["optim/grad_norm"] == pytest.approx(float(other.norm()), rel=1e-4)
    # The value of the penalty, by rlox's log-probabilities; the two policy terms have one gradient and two values.
    rows = torch.cat([torch.tensor([[1], [4], [9]]).repeat_interleave(4, 0), torch.tensor(sides.ids[0])], 1)
    distance = sides.rlox._get_per_token_logprobs(start, rows) - sides.rlox._get_per_token_logprobs(reference, rows)
    assert found["loss/kl"] == pytest.approx(kl_coef * distance.sum(-1).mean().item(), rel=1e-4)
    assert abs(found["loss/kl"]) > 0.1
