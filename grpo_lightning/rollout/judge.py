"""Prompts -> completions with what the rewards say of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_lightning.environment import Environment, Episodes
from grpo_lightning.policy import Policy
from grpo_lightning.reward import RewardSpec, Score, Scoring, clip_scores, scalar, total
from grpo_lightning.rollout import episodes
from grpo_lightning.rollout.step_context import StepContext
from grpo_lightning.types import Prompts, Sampled, Sampling, Scored

_CPU = torch.device("cpu")
_NOTHING: Mapping[str, Sequence[Any]] = {}


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
        environment: Whom the model talks to; None: completions have one turn.
    """

    rewards: Mapping[str, RewardSpec]
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
        """Sample and score; arguments as in `Sampler.generate`.

        Every process does so for its portion of the prompts and gets to know all. Rewards with a timeout start on a
        completion as soon as it has ended.

        Returns:
            ``group_size`` completions per prompt with their rewards; and metrics: for each reward with a timeout the
            fraction of the completions on which it failed, and what the environment has to say.
        """
        ranks, clock = context.ranks, context.clock
        portion = ranks.shard_range(len(prompts))
        own = prompts[portion]
        talk = self._episodes(own, group_size, first_prompt + portion.start, context)
        # What happened in episodes is known only when they are over.
        scoring = self._scoring(own, group_size, context) if talk is None else None
        talking: dict[str, Any] = {} if talk is None else {"responder": talk}

        def sample() -> Sampled:
            with clock("rollout"):
                sampled = context.sampler.generate(
                    policy,
                    own.texts,
                    group_size=group_size,
                    sampling=sampling,
                    seed=context.seed,
                    first_prompt=first_prompt + portion.start,
                    poll=context.poll,
                    on_finished=scoring.begin if scoring and scoring.may_begin else None,
                    **talking,
                )
            if talk is None:
                return sampled
            clock.move(talk.seconds, "rollout", "environment")
            return episodes.ended(sampled, talk)

        def scored() -> tuple[Scored, dict[str, float], torch.device]:
            sampled = sample()
            judged, metrics = self._scored(policy, own, sampled, scoring, talk, context)
            return judged.to(_CPU) if ranks.size > 1 else judged, metrics, sampled.mask.device

        parts = ranks.all_or_raise(scored, waiting=clock("wait"))
        return _joined([(part, metrics) for part, metrics, _ in parts], parts[ranks.rank][2])

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
            portion = ranks.shard_range(len(prompts))
            own, rows = prompts[portion], range(portion.start * group_size, portion.stop * group_size)
            completions = sampled[torch.tensor(rows, device=sampled.mask.device)]
            found, metrics = self._scored(tokens, own, completions, None, None, context)
            return found.to(_CPU) if ranks.size > 1 else found, metrics

        return _joined(ranks.all_or_raise(judged, waiting=context.clock("wait")), sampled.mask.device)

    def _episodes(self, prompts: Prompts, group_size: int, first_prompt: int, context: StepContext) -> Episodes | None:
        """Those that begin with this rollout; None where the model talks to nobody."""
        if self.environment is None:
            return None
        return episodes.begin(
            self.environment,
            _per_row(prompts.texts, group_size),
            {name: _per_row(values, group_size) for name, values in prompts.columns.items()},
            group_size=group_size,
            first_prompt=first_prompt,
            context=context,
        )

    def _scoring(
        self,
        prompts: Prompts,
        group_size: int,
        context: StepContext,
        further: Mapping[str, Sequence[Any]] | None = None,
    ) -> Scoring:
        columns = {name: _per_row(values, group_size) for name, values in prompts.columns.items()}
        return Scoring(self.rewards, _per_row(prompts.texts, group_size), columns | dict(further or {}), context.poll)

    def _scored(
        self,
        policy: TokenAt,
        prompts: Prompts,
        sampled: Sampled,
        scoring: Scoring | None,
        talk: Episodes | None,
        context: StepContext,
    ) -> tuple[Scored, dict[str, float]]:
        with context.clock("reward"):
            if talk is not None:
                talk.check()
            if scoring is None:
                group_size = len(sampled) // len(prompts)
                scoring = self._scoring(prompts, group_size, context, episodes.columns(sampled, talk))
            ids = episodes.last_turn_ids(sampled)
            scores = scoring.finish(sampled.texts, ids)
            values = scores.values
            if talk is not None and self.environment is not None:
                failed = [problem is not None for problem in talk.failed]
                values = episodes.without_failed(values, self.rewards, failed, self.environment.failed_score)
            entering = clip_scores(self.rewards, values)
            raw = {name: [scalar(value) for value in given] for name, given in values.items()}
            named = raw | {"total": total(self.rewards, entering)}
            rewards = {name: _tensor(given) for name, given in named.items()}
            scored = Scored(
                prompts,
                sampled,
                rewards,
                right=rewards[self.outcome_name] >= self.threshold,
                scores=torch.stack([_tensor([scalar(v) for v in given]) for given in entering.values()], -1),
                steps=self._steps(policy, entering, ids, sampled, talk),
            )
        metrics = {f"failure/{name}": fraction for name, fraction in scores.failed.items()}
        return scored, metrics | ({} if talk is None else talk.metrics)

    def _steps(
        self,
        policy: TokenAt,
        scores: Mapping[str, Sequence[Score]],
        ids: Sequence[Sequence[int]],
        sampled: Sampled,
        talk: Episodes | None,
    ) -> Tensor:
        """[B, T] weighted scores at the token where each step ends, NaN elsewhere."""
        steps = torch.full(tuple(sampled.mask.shape), torch.nan)
        turn_ends = episodes.turn_ends(sampled)
        of_turns = None if talk is None else talk.scores
        for name, values in scores.items():
            weight = self.rewards[name].factor
            for row, value in enumerate(values):
                ends, start = turn_ends[row], turn_ends[row][-1] + 1 - len(ids[row])
                if of_turns is not None and episodes.is_own(self.rewards[name]):
                    placed = [(ends[turn], score) for turn, score in episodes.by_turn(of_turns[row], value)]
                else:
                    pairs = () if value is None else value if isinstance(value, tuple) else ((None, value),)
                    placed = [
                        (ends[-1] if end is None else start + policy.token_at(ids[row], end), score)
                        for end, score in pairs
                    ]
                for token, score in placed:
                    steps[row, token] = steps[row, token].nan_to_num(0.0) + weight * score
        return steps


def _joined(parts: Sequence[tuple[Scored, dict[str, float]]], device: torch.device) -> tuple[Scored, dict[str, float]]:
    """What the processes scored, by rank, as one; metrics count as often as their process has completions."""
    sizes = [len(part.right) for part, _ in parts]
    metrics = {
        name: sum(own[name] * size for (_, own), size in zip(parts, sizes, strict=True)) / sum(sizes)
        for name in parts[0][1]
    }
    return Scored.concatenate([part for part, _ in parts]).to(device), metrics


def _tensor(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([torch.nan if value is None else value for value in values])


def _per_row(values: Sequence[Any], group_size: int) -> list[Any]:
    """[P] -> [P * G], every value ``group_size`` times in a row."""
    return list(chain.from_iterable(repeat(value, group_size) for value in values))
