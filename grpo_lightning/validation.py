"""Validation on held-out prompts, with its own sampling: pass@1, pass@k, maj@k and the rewards."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torchmetrics import MeanMetric

from grpo_lightning.batch import Prompts, Sampling
from grpo_lightning.clock import Clock
from grpo_lightning.judge import Judge, Judged, judge
from grpo_lightning.metric import MajorityAtK, PassAtK
from grpo_lightning.policy import Policy, Poll
from grpo_lightning.ranks import ALONE, Ranks
from grpo_lightning.reward import Weighted
from grpo_lightning.reward.text import answer_text
from grpo_lightning.varying import at


class Validation(nn.Module):
    """Collects metrics over the held-out prompts.

    Args:
        reward: As in training.
        outcome: The reward that says whether a completion is right; None as in ``rollout.judge``.
        threshold: Its least score that counts as right.
        every: Steps between validations; kept for whoever schedules them.
        samples_per_prompt: Completions of each prompt, n.
        ks: pass@k and maj@k are reported for these, each at most n; pass@1 always is.
        temperature: 0 is greedy; the others as in ``Sampling``.
        top_p: As in ``Sampling``.
        top_k: As in ``Sampling``.
        min_p: As in ``Sampling``.
        max_new_tokens: As in ``Sampling``.
        stop: As in ``Sampling``.
    """

    def __init__(
        self,
        reward: Mapping[str, Weighted],
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
    ) -> None:
        super().__init__()
        self.judge = judge(reward, outcome, threshold)
        self.seen = 0
        self.every = every
        self.samples_per_prompt = samples_per_prompt
        self.sampling = Sampling(temperature, top_p, top_k, min_p, max_new_tokens, tuple(stop))
        own: dict[str, Any] = {"sync_on_compute": False}  # every process counts everything
        self.passes = {f"val/pass@{k}": PassAtK(k, **own) for k in sorted({1, *ks})}
        self.majorities = {f"val/maj@{k}": MajorityAtK(k, **own) for k in sorted(set(ks)) if k > 1}
        self.rewards = {name: MeanMetric(nan_strategy="ignore", **own) for name in (*reward, "total")}
        # Registered, so that they move to the device with the module.
        self._metrics = nn.ModuleList([*self.passes.values(), *self.majorities.values(), *self.rewards.values()])

    def step(
        self,
        policy: Policy,
        prompts: Prompts,
        *,
        completed_steps: int,
        seed: int,
        clock: Clock,
        poll: Poll | None = None,
        ranks: Ranks = ALONE,
    ) -> Judged:
        """Sample and count the next prompts; returns what was sampled. Varying weights are those of the next step."""
        judge: Judge = at(self.judge, completed_steps)
        judged, _ = judge(
            policy,
            prompts,
            group_size=self.samples_per_prompt,
            sampling=self.sampling,
            seed=seed,
            first_prompt=self.seen,
            clock=clock,
            poll=poll,
            ranks=ranks,
        )
        self.seen += len(prompts)
        right = judged.right.view(len(prompts), self.samples_per_prompt)
        answers = [answer_text(text) for text in judged.sampled.texts]
        groups = [answers[i : i + self.samples_per_prompt] for i in range(0, len(answers), self.samples_per_prompt)]
        for passes in self.passes.values():
            passes.update(right)
        for majority in self.majorities.values():
            majority.update(right, groups)
        for name, mean in self.rewards.items():
            mean.update(judged.rewards[name].to(mean.device))
        return judged

    def compute(self) -> dict[str, Tensor]:
        """The metrics over everything counted since the last call, by name."""
        self.seen = 0
        rewards = {f"val/reward/{name}": mean for name, mean in self.rewards.items()}
        values: dict[str, Tensor] = {}
        for name, metric in (self.passes | self.majorities | rewards).items():
            values[name] = metric.compute()
            metric.reset()
        return values
