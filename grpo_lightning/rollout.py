"""Prompts -> samples -> rewards -> advantages. Runs without a Trainer."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.batch import Prompts, Rollout, Sampled, Sampling, microbatches
from grpo_lightning.clock import Clock
from grpo_lightning.policy import Policy, Poll
from grpo_lightning.reward import Weighted, score, total

log = logging.getLogger(__name__)

Advantage = Callable[[Tensor], Tensor]
"""Rewards [P, G], NaN where none applies -> advantages [P, G]."""


@dataclass(frozen=True)
class Judged:
    """Samples and what the rewards say of them. B = P * G rows, a prompt's rows adjacent."""

    prompts: Prompts
    sampled: Sampled
    rewards: Mapping[str, Tensor]
    """Name -> [B] score, NaN where it does not apply; "total" is the weighted sum."""
    right: Tensor
    """[B] (bool) whether the outcome reward reaches its threshold."""


@dataclass(frozen=True)
class Judge:
    """Samples completions and scores them; holds settings, never weights.

    Args:
        rewards: Name -> function and weight.
        outcome: The reward that says whether a completion is right, for pass@k and the group counts.
        threshold: Its least score that counts as right.
    """

    rewards: Mapping[str, Weighted]
    outcome: str
    threshold: float

    def __call__(
        self,
        policy: Policy,
        prompts: Prompts,
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        clock: Clock,
        poll: Poll | None = None,
    ) -> Judged:
        """``group_size`` completions per prompt with their rewards; arguments as in ``Policy.sample``."""
        with clock("rollout"):
            sampled = policy.sample(prompts.texts, group_size=group_size, sampling=sampling, seed=seed, poll=poll)
        with clock("reward"):
            texts = _per_row(prompts.texts, group_size)
            columns = {name: _per_row(values, group_size) for name, values in prompts.columns.items()}
            scores = score(self.rewards, texts, sampled.texts, columns)
            named = scores | {"total": total(self.rewards, scores)}
            rewards = {
                name: torch.tensor([torch.nan if value is None else value for value in values])
                for name, values in named.items()
            }
        return Judged(prompts, sampled, rewards, rewards[self.outcome] >= self.threshold)


@dataclass(frozen=True)
class Collector:
    """One rollout: ``group_size`` completions per prompt, judged against one another.

    Args:
        judge: Samples and scores.
        advantage: From the group's rewards to its advantages.
        group_size: Completions per prompt, G >= 2.
        sampling: How they are drawn.
    """

    judge: Judge
    advantage: Advantage
    group_size: int
    sampling: Sampling

    @torch.no_grad()
    def __call__(
        self,
        policy: Policy,
        reference: Policy | None,
        prompts: Prompts,
        *,
        microbatch_tokens: int,
        seed: int,
        clock: Clock,
        poll: Poll | None = None,
    ) -> tuple[Rollout, Judged, dict[str, Tensor]]:
        """Sample, score, compare.

        Args:
            policy: Samples.
            reference: Scored once on the samples; None for no KL term.
            prompts: [P]
            microbatch_tokens: Most tokens in one forward pass of the reference.
            seed: Of the samples.
            clock: Counts the phases rollout, reward and score.
            poll: As in ``Policy.sample``.

        Returns:
            The rollout, whose old log-probabilities are the sampler's; what was judged; metrics by name.
        """
        judged = self.judge(
            policy, prompts, group_size=self.group_size, sampling=self.sampling, seed=seed, clock=clock, poll=poll
        )
        sampled, rewards = judged.sampled, judged.rewards["total"].view(len(prompts), self.group_size)
        if unscored := int(rewards.isnan().sum()):
            log.warning("%d completions got None from every reward: their advantage is 0", unscored)
        advantages = self.advantage(rewards)
        with clock("score"):
            ref_logprobs = torch.zeros_like(sampled.logprobs)
            if reference is not None:
                for rows in split(sampled, microbatch_tokens):
                    ref_logprobs[rows] = reference.logprobs(sampled[rows], temperature=self.sampling.temperature)
        rollout = Rollout(
            ids=sampled.ids,
            attention_mask=sampled.attention_mask,
            mask=sampled.mask,
            old_logprobs=sampled.logprobs,
            ref_logprobs=ref_logprobs,
            advantages=advantages.flatten().to(sampled.mask.device).unsqueeze(-1) * sampled.mask,
        )
        return rollout, judged, self._metrics(judged, rewards, advantages)

    def _metrics(self, judged: Judged, rewards: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        right = judged.right.view_as(rewards).float().mean(-1)
        lengths = judged.sampled.mask.sum(-1).float()
        spread = replace_nan(rewards).std(-1).mean()
        return {f"reward/{name}": values.nanmean() for name, values in judged.rewards.items()} | {
            "reward/std": spread,
            "advantage/mean": advantages.mean(),
            "advantage/std": advantages.std(),
            "group/all_right": (right == 1).float().mean(),
            "group/all_wrong": (right == 0).float().mean(),
            "group/mixed": ((right > 0) & (right < 1)).float().mean(),
            "completion/length_mean": lengths.mean(),
            "completion/length_max": lengths.max(),
            "completion/truncated_fraction": 1 - torch.tensor(judged.sampled.finished).float().mean(),
        }


def collector(
    *,
    reward: Mapping[str, Weighted],
    advantage: Advantage,
    outcome: str | None,
    threshold: float,
    group_size: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    max_new_tokens: int,
    stop: Sequence[str],
) -> Collector:
    """A ``Collector`` from the keys of conf/rollout, which ``Judge``, ``Collector`` and ``Sampling`` explain."""
    sampling = Sampling(temperature, top_p, top_k, min_p, max_new_tokens, tuple(stop))
    return Collector(judge(reward, outcome, threshold), advantage, group_size, sampling)


def judge(reward: Mapping[str, Weighted], outcome: str | None, threshold: float) -> Judge:
    """A ``Judge``; without a named ``outcome`` it goes by ``accuracy`` or, where there is none, by the first reward."""
    return Judge(reward, outcome or ("accuracy" if "accuracy" in reward else next(iter(reward))), threshold)


def split(rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
    """Micro-batches of ``rows`` within a budget of tokens, as index tensors."""
    prompt_lengths = rows.attention_mask.sum(-1) - rows.mask.sum(-1)
    return microbatches(rows.mask, prompt_lengths, tokens=tokens)


def on_policy(rows: Rollout, logprobs: Tensor) -> Rollout:
    """``rows`` with the policy's own log-probabilities as the old ones: the ratio is exactly 1."""
    return replace(rows, old_logprobs=logprobs.detach())


def replace_nan(rewards: Tensor) -> Tensor:
    """[P, G] with every NaN replaced by the mean of its group's other rewards; 0 in a group of NaN."""
    return torch.where(rewards.isnan(), rewards.nanmean(-1, keepdim=True).nan_to_num(0.0), rewards)


def _per_row(values: Sequence[Any], group_size: int) -> list[Any]:
    """[P] -> [P * G], every value ``group_size`` times in a row."""
    return list(chain.from_iterable(repeat(value, group_size) for value in values))
