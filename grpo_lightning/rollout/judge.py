"""Prompts -> completions with what the rewards say of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_lightning.batch import Prompts, Sampled, Sampling, Scored
from grpo_lightning.clock import Clock
from grpo_lightning.environment import Environment
from grpo_lightning.policy import Policy
from grpo_lightning.reward import Score, Scoring, Weighted, scalar, shaped, total
from grpo_lightning.rollout.step_context import StepContext

_CPU = torch.device("cpu")


class TokenAt(Protocol):
    """Knows which token of a completion a place in its text belongs to."""

    def token_at(self, ids: Sequence[int], end: int) -> int:
        """As in ``Policy.token_at``."""
        ...


@dataclass(frozen=True)
class Judge:
    """Samples completions and scores them; holds settings, never weights.

    Args:
        rewards: Name -> function and weight.
        outcome: The reward that says whether a completion is right, for pass@k and the group counts; None goes by
            ``accuracy`` or, where there is none, by the first reward.
        threshold: Its least score that counts as right.
        environment: Whom the policy talks to; None: a completion is one turn.
    """

    rewards: Mapping[str, Weighted]
    outcome: str | None
    threshold: float
    environment: Environment | None = None

    @property
    def outcome_name(self) -> str:
        """The reward that says whether a completion is right."""
        return self.outcome or ("accuracy" if "accuracy" in self.rewards else next(iter(self.rewards)))

    @property
    def weights(self) -> Tensor:
        """[K] of the rewards."""
        return torch.tensor([reward.factor for reward in self.rewards.values()])

    def score(
        self,
        policy: Policy,
        prompts: Prompts,
        *,
        group_size: int,
        sampling: Sampling,
        context: StepContext,
        first_prompt: int = 0,
    ) -> tuple[Scored, dict[str, float]]:
        """Sample and score; arguments as in ``Policy.sample``.

        Every process does so for its portion of the prompts and gets to know all. Rewards with a timeout start on a
        completion as soon as it has ended.

        Returns:
            ``group_size`` completions per prompt with their rewards; and for each reward with a timeout the fraction
            of the completions on which it failed.
        """
        ranks, clock = context.ranks, context.clock
        portion = ranks.portion(len(prompts))
        own = prompts[portion]
        scoring = self._scoring(own, group_size, context)

        def sample() -> Sampled:
            with clock("rollout"):
                return policy.sample(
                    own.texts,
                    group_size=group_size,
                    sampling=sampling,
                    seed=context.seed,
                    first_prompt=first_prompt + portion.start,
                    poll=context.poll,
                    on_finished=scoring.begin if scoring.may_begin else None,
                    ranks=ranks,
                )

        # In lockstep all forward calls are common ones: an error between them could not be told to the others.
        early = sample() if ranks.lockstep else None

        def scored() -> tuple[Scored, dict[str, float], torch.device]:
            sampled = sample() if early is None else early
            judged, failures = self._scored(policy, own, sampled, scoring, clock)
            return judged.to(_CPU) if ranks.size > 1 else judged, failures, sampled.mask.device

        parts = ranks.together(scored, waiting=clock("wait"))
        return _joined([(part, failed) for part, failed, _ in parts], parts[ranks.rank][2])

    def score_sampled(
        self, tokens: TokenAt, prompts: Prompts, sampled: Sampled, *, context: StepContext
    ) -> tuple[Scored, dict[str, float]]:
        """Score completions that were sampled before; every process does its portion of the prompts.

        Args:
            tokens: Finds the tokens where steps end; a policy does.
            prompts: [P]
            sampled: [B] their completions, known to all processes.
            context: What watches over it.

        Returns:
            As `score` does.
        """
        ranks, group_size = context.ranks, len(sampled) // len(prompts)

        def judged() -> tuple[Scored, dict[str, float]]:
            portion = ranks.portion(len(prompts))
            own, rows = prompts[portion], range(portion.start * group_size, portion.stop * group_size)
            scoring = self._scoring(own, group_size, context)
            completions = sampled[torch.tensor(rows, device=sampled.mask.device)]
            found, failed = self._scored(tokens, own, completions, scoring, context.clock)
            return found.to(_CPU) if ranks.size > 1 else found, failed

        return _joined(ranks.together(judged, waiting=context.clock("wait")), sampled.mask.device)

    def _scoring(self, prompts: Prompts, group_size: int, context: StepContext) -> Scoring:
        columns = {name: _per_row(values, group_size) for name, values in prompts.columns.items()}
        return Scoring(self.rewards, _per_row(prompts.texts, group_size), columns, context.poll)

    def _scored(
        self, policy: TokenAt, prompts: Prompts, sampled: Sampled, scoring: Scoring, clock: Clock
    ) -> tuple[Scored, dict[str, float]]:
        with clock("reward"):
            length = sampled.mask.shape[1]
            ids = [
                row[is_real].tolist()
                for row, is_real in zip(sampled.ids[:, -length:].cpu(), sampled.mask.cpu(), strict=True)
            ]
            scores = scoring.finish(sampled.texts, ids)
            entering = shaped(self.rewards, scores.values)
            raw = {name: [scalar(value) for value in values] for name, values in scores.values.items()}
            named = raw | {"total": total(self.rewards, entering)}
            rewards = {name: _tensor(values) for name, values in named.items()}
            scored = Scored(
                prompts,
                sampled,
                rewards,
                right=rewards[self.outcome_name] >= self.threshold,
                scores=torch.stack([_tensor([scalar(v) for v in values]) for values in entering.values()], -1),
                steps=self._steps(policy, entering, ids, length),
            )
        return scored, dict(scores.failed)

    def _steps(
        self, policy: TokenAt, scores: Mapping[str, Sequence[Score]], ids: Sequence[Sequence[int]], length: int
    ) -> Tensor:
        """[B, T] weighted scores at the token where each step ends, NaN elsewhere."""
        steps = torch.full((len(ids), length), torch.nan)
        for name, values in scores.items():
            weight = self.rewards[name].factor
            for row, value in enumerate(values):
                pairs = () if value is None else value if isinstance(value, tuple) else ((None, value),)
                for end, step in pairs:
                    token = len(ids[row]) - 1 if end is None else policy.token_at(ids[row], end)
                    before = steps[row, token].nan_to_num(0.0)
                    steps[row, token] = before + weight * step
        return steps


def _joined(parts: Sequence[tuple[Scored, dict[str, float]]], device: torch.device) -> tuple[Scored, dict[str, float]]:
    """What the processes scored, by rank, as one; a failure counts as often as its process has completions."""
    sizes = [len(part.right) for part, _ in parts]
    failures = {
        name: sum(failed[name] * size for (_, failed), size in zip(parts, sizes, strict=True)) / sum(sizes)
        for name in parts[0][1]
    }
    return Scored.concatenate([part for part, _ in parts]).to(device), failures


def _tensor(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([torch.nan if value is None else value for value in values])


def _per_row(values: Sequence[Any], group_size: int) -> list[Any]:
    """[P] -> [P * G], every value ``group_size`` times in a row."""
    return list(chain.from_iterable(repeat(value, group_size) for value in values))
