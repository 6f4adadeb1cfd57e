"""Prompts -> completions with what the rewards say of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.batch import Prompts, Sampled, Sampling
from grpo_lightning.clock import Clock
from grpo_lightning.policy import Policy, Poll
from grpo_lightning.ranks import ALONE, Ranks
from grpo_lightning.reward import Score, Scoring, Weighted, scalar, shaped, total


@dataclass(frozen=True)
class Judged:
    """Samples and what the rewards say of them. B = P * G rows, a prompt's rows adjacent; K rewards."""

    prompts: Prompts
    sampled: Sampled
    rewards: Mapping[str, Tensor]
    """Name -> [B] score as the function gave it, NaN where it does not apply; "total" is the weighted sum."""
    right: Tensor
    """[B] (bool) whether the outcome reward reaches its threshold."""
    scores: Tensor
    """[B, K] as they enter the total: clipped and gated, before their weights."""
    steps: Tensor
    """[B, T] weighted scores at the token where each step ends, NaN elsewhere; a whole completion is one step."""

    @property
    def group_size(self) -> int:
        """Completions per prompt, G."""
        return len(self.right) // len(self.prompts)

    def rows(self, chosen: Tensor) -> "Judged":
        """Some rows [B'], as many of every prompt."""
        return replace(
            self,
            sampled=self.sampled[chosen.to(self.sampled.mask.device)],
            rewards={name: values[chosen] for name, values in self.rewards.items()},
            right=self.right[chosen],
            scores=self.scores[chosen],
            steps=self.steps[chosen],
        )

    def groups(self, chosen: Sequence[int]) -> "Judged":
        """Some prompts with all their rows."""
        size = self.group_size
        rows = torch.tensor([group * size + member for group in chosen for member in range(size)], dtype=torch.long)
        return replace(self.rows(rows), prompts=self.prompts[chosen])

    @classmethod
    def concatenate(cls, parts: Sequence["Judged"]) -> "Judged":
        """All groups of all parts. Columns stay behind unless all parts come from the same data."""
        if len(parts) == 1:
            return parts[0]
        names = set.intersection(*(set(part.prompts.columns) for part in parts))
        length = max(part.steps.shape[1] for part in parts)
        pad = torch.nn.functional.pad
        return cls(
            prompts=Prompts(
                tuple(text for part in parts for text in part.prompts.texts),
                {name: tuple(chain.from_iterable(part.prompts.columns[name] for part in parts)) for name in names},
            ),
            sampled=Sampled.concatenate([part.sampled for part in parts]),
            rewards={name: torch.cat([part.rewards[name] for part in parts]) for name in parts[0].rewards},
            right=torch.cat([part.right for part in parts]),
            scores=torch.cat([part.scores for part in parts]),
            steps=torch.cat([pad(p.steps, (0, length - p.steps.shape[1]), value=torch.nan) for p in parts]),
        )

    def to(self, device: torch.device) -> "Judged":
        """With the samples on ``device``; rewards stay on the CPU."""
        moved: dict[str, Any] = {
            name: value.to(device) if isinstance(value, Tensor) else value for name, value in vars(self.sampled).items()
        }
        return replace(self, sampled=Sampled(**moved))

    def state(self) -> dict[str, Any]:
        """Everything but the columns, as tensors and plain values, for a checkpoint."""
        own = {name: getattr(self, name) for name in ("rewards", "right", "scores", "steps")}
        return {**own, "prompts": list(self.prompts.texts), "sampled": dict(vars(self.sampled))}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Judged":
        """What `state` described."""
        sampled = Sampled(**state["sampled"])
        return cls(**{**state, "prompts": Prompts(tuple(state["prompts"]), {}), "sampled": sampled})


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

    @property
    def weights(self) -> Tensor:
        """[K] of the rewards."""
        return torch.tensor([reward.factor for reward in self.rewards.values()])

    def __call__(
        self,
        policy: Policy,
        prompts: Prompts,
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        first_prompt: int = 0,
        clock: Clock,
        poll: Poll | None = None,
        ranks: Ranks = ALONE,
    ) -> tuple[Judged, dict[str, float]]:
        """Sample and score; arguments as in ``Policy.sample``.

        Every process does so for its share of the prompts and gets to know all. Rewards with a timeout start on a
        completion as soon as it has ended.

        Returns:
            ``group_size`` completions per prompt with their rewards; and for each reward with a timeout the share of
            completions on which it failed.
        """
        mine = ranks.share(len(prompts))
        own = prompts[mine]
        texts = _per_row(own.texts, group_size)
        columns = {name: _per_row(values, group_size) for name, values in own.columns.items()}
        scoring = Scoring(self.rewards, texts, columns)

        def sample() -> Sampled:
            with clock("rollout"):
                return policy.sample(
                    own.texts,
                    group_size=group_size,
                    sampling=sampling,
                    seed=seed,
                    first_prompt=first_prompt + mine.start,
                    poll=poll,
                    ended=scoring.begin if scoring.may_begin else None,
                )

        if ranks.size == 1:
            return self._scored(policy, own, sample(), scoring, clock)
        if ranks.lockstep:  # forward calls are common ones: an error between them cannot be told to the others
            sampled = sample()
            outcome = ranks.attempt(lambda: self._scored(policy, own, sampled, scoring, clock))
        else:
            outcome = ranks.attempt(lambda: self._scored(policy, own, sample(), scoring, clock))
        device = torch.device("cpu")
        if outcome.value is not None:
            judged, failed = outcome.value
            device = judged.sampled.mask.device
            outcome = replace(outcome, value=(judged.to(torch.device("cpu")), failed))
        with clock("wait"):
            parts = ranks.agree(outcome)
        counts = [len(part.right) for part, _ in parts]
        together = Judged.concatenate([part for part, _ in parts])
        failures = {
            name: sum(failed[name] * n for (_, failed), n in zip(parts, counts, strict=True)) / sum(counts)
            for name in parts[0][1]
        }
        return together.to(device), failures

    def _scored(
        self, policy: Policy, prompts: Prompts, sampled: Sampled, scoring: Scoring, clock: Clock
    ) -> tuple[Judged, dict[str, float]]:
        with clock("reward"):
            length = sampled.mask.shape[1]
            ids = [
                row[counts].tolist()
                for row, counts in zip(sampled.ids[:, -length:].cpu(), sampled.mask.cpu(), strict=True)
            ]
            found = scoring.finish(sampled.texts, ids)
            entering = shaped(self.rewards, found.values)
            raw = {name: [scalar(value) for value in values] for name, values in found.values.items()}
            named = raw | {"total": total(self.rewards, entering)}
            rewards = {name: _tensor(values) for name, values in named.items()}
            judged = Judged(
                prompts,
                sampled,
                rewards,
                right=rewards[self.outcome] >= self.threshold,
                scores=torch.stack([_tensor([scalar(v) for v in values]) for values in entering.values()], -1),
                steps=self._steps(policy, entering, ids, length),
            )
        return judged, dict(found.failed)

    def _steps(
        self, policy: Policy, scores: Mapping[str, Sequence[Score]], ids: Sequence[Sequence[int]], length: int
    ) -> Tensor:
        steps = torch.full((len(ids), length), torch.nan)
        for name, values in scores.items():
            weight = self.rewards[name].factor
            for row, value in enumerate(values):
                pairs = () if value is None else value if isinstance(value, tuple) else ((None, value),)
                for end, step in pairs:
                    token = len(ids[row]) - 1 if end is None else policy.token_at(ids[row], end)
                    known = steps[row, token].nan_to_num(0.0)
                    steps[row, token] = known + weight * step
        return steps


def judge(reward: Mapping[str, Weighted], outcome: str | None, threshold: float) -> Judge:
    """A ``Judge``; without a named ``outcome`` it goes by ``accuracy`` or, where there is none, by the first reward."""
    return Judge(reward, outcome or ("accuracy" if "accuracy" in reward else next(iter(reward))), threshold)


def _tensor(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([torch.nan if value is None else value for value in values])


def _per_row(values: Sequence[Any], group_size: int) -> list[Any]:
    """[P] -> [P * G], every value ``group_size`` times in a row."""
    return list(chain.from_iterable(repeat(value, group_size) for value in values))
