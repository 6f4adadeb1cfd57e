"""Validation on held-out prompts, with its own sampling: pass@1, pass@k, maj@k and the rewards."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from grpo_lightning.policy import Policy
from grpo_lightning.reward import RewardSpec
from grpo_lightning.reward.accuracy import answer_text
from grpo_lightning.rollout.scoring import Scorer, StepContext
from grpo_lightning.schedule import resolve_schedules
from grpo_lightning.types import Prompts, Sampling, Scored

if TYPE_CHECKING:
    from grpo_lightning.environment import Environment


class _PromptMean(Metric):
    """The mean of one value per prompt.

    Args:
        k: Samples of a prompt that are looked at.
        options: What every torchmetrics ``Metric`` takes.
    """

    full_state_update = False
    total: Tensor
    prompts: Tensor

    def __init__(self, k: int, **options: Any) -> None:
        super().__init__(**options)
        self.k = k
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("prompts", torch.tensor(0), dist_reduce_fx="sum")

    def _add(self, values: Sequence[float]) -> None:
        self.total += sum(values)
        self.prompts += len(values)

    def compute(self) -> Tensor:
        return self.total / self.prompts.clamp(min=1)


class PassAtK(_PromptMean):
    """The chance that at least one of k samples is right, estimated without bias from n >= k samples.

    1 - C(n - c, k) / C(n, k)

    arXiv:2107.03374, Eq. 1, with c of the n samples right.
    """

    def update(self, right: Tensor) -> None:
        """Count some prompts.

        Args:
            right: [P, n] (bool) which samples are right.

        Raises:
            ValueError: n < k.
        """
        samples = right.shape[-1]
        if samples < self.k:
            raise ValueError(f"pass@{self.k} needs at least {self.k} samples per prompt, got {samples}")
        self._add([1 - comb(samples - c, self.k) / comb(samples, self.k) for c in right.sum(-1).tolist()])


class MajorityAtK(_PromptMean):
    """The chance that the commonest answer among the first k samples is right; one of several tied answers is drawn.

    arXiv:2203.11171 (self-consistency).
    """

    def update(self, right: Tensor, answers: Sequence[Sequence[str]]) -> None:
        """Count some prompts.

        Args:
            right: [P, n] (bool) which samples are right, with n >= k.
            answers: [P][n] what each sample answers.

        Raises:
            ValueError: n < k.
        """
        if right.shape[-1] < self.k:
            raise ValueError(f"maj@{self.k} needs at least {self.k} samples per prompt, got {right.shape[-1]}")
        self._add([self._vote(row[: self.k], given) for row, given in zip(right.tolist(), answers, strict=True)])

    @staticmethod
    def _vote(right: list[bool], answers: Sequence[str]) -> float:
        votes = Counter(answers[: len(right)])
        most = max(votes.values())
        verdicts = dict(zip(answers, right, strict=False))
        winners = [answer for answer, count in votes.items() if count == most]
        return sum(verdicts[answer] for answer in winners) / len(winners)


class Validation(nn.Module):
    """Collects metrics over the held-out prompts.

    Args:
        reward: The rewards by name, the same as in training.
        outcome: As in `Scorer`, like ``threshold`` and ``environment``.
        threshold: The outcome reward's least score that counts as right.
        every: Steps between validations; the data and the module read it.
        samples_per_prompt: Completions per prompt, n.
        ks: pass@k and maj@k are reported for these, each at most n; pass@1 always is.
        temperature: As in `Sampling`, like the following; 0 takes the likeliest token.
        top_p: Nucleus sampling.
        top_k: Top-k sampling.
        min_p: Min-p sampling.
        max_new_tokens: The longest completion, in tokens.
        stop: Texts that end a completion.
        kv_cache_gib: Limit of the KV cache.
        environment: Environment for multi-turn rollouts, or None for single-turn.
    """

    def __init__(
        self,
        reward: Mapping[str, RewardSpec],
        outcome: str | None,
        threshold: float,
        *,
        every: int,
        samples_per_prompt: int,
        ks: Sequence[int],
        temperature: float,
        top_p: float,
        top_k: int,
        min_p: float,
        max_new_tokens: int,
        stop: Sequence[str],
        kv_cache_gib: float | None = None,
        environment: "Environment | None" = None,
    ) -> None:
        super().__init__()
        self.scorer = Scorer(reward, outcome, threshold, environment)
        self.seen = 0
        self.every = every
        self.samples_per_prompt = samples_per_prompt
        self.sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_new_tokens=max_new_tokens,
            stop=tuple(stop),
            kv_cache_gib=kv_cache_gib,
        )
        own: dict[str, Any] = {"sync_on_compute": False}  # every process counts everything
        self.passes = {f"val/pass@{k}": PassAtK(k, **own) for k in sorted({1, *ks})}
        self.majorities = {f"val/maj@{k}": MajorityAtK(k, **own) for k in sorted(set(ks)) if k > 1}
        self.rewards = {name: MeanMetric(nan_strategy="ignore", **own) for name in (*reward, "total")}
        # Registered, so that they move to the device with the module.
        self._metrics = nn.ModuleList([*self.passes.values(), *self.majorities.values(), *self.rewards.values()])

    def step(self, policy: Policy, prompts: Prompts, *, completed_steps: int, context: StepContext) -> Scored:
        """Sample completions of the next prompts and count them.

        Args:
            policy: The policy that answers.
            prompts: The next held-out prompts.
            completed_steps: Which values varying weights have: those of the step after these.
            context: The seed, and what watches over the sampling.

        Returns:
            What was sampled, with its rewards.
        """
        scored, _ = resolve_schedules(self.scorer, completed_steps).generate_and_score(
            policy,
            prompts,
            group_size=self.samples_per_prompt,
            sampling=self.sampling,
            context=context,
            first_prompt=self.seen,
        )
        self.seen += len(prompts)
        right = scored.right.view(len(prompts), self.samples_per_prompt)
        answers = [answer_text(text) for text in scored.sampled.texts]
        groups = [answers[i : i + self.samples_per_prompt] for i in range(0, len(answers), self.samples_per_prompt)]
        for passes in self.passes.values():
            passes.update(right)
        for majority in self.majorities.values():
            majority.update(right, groups)
        for name, mean in self.rewards.items():
            mean.update(scored.rewards[name].to(mean.device))
        return scored

    def compute(self) -> dict[str, Tensor]:
        """The metrics over everything counted since the last call, by name."""
        self.seen = 0
        rewards = {f"val/reward/{name}": mean for name, mean in self.rewards.items()}
        values: dict[str, Tensor] = {}
        for name, metric in (self.passes | self.majorities | rewards).items():
            values[name] = metric.compute()
            metric.reset()
        return values
