"""Generate completions, of one turn or several, and score them with the rewards; processes divide the work."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from grpo_lightning import reward
from grpo_lightning.clock import Clock
from grpo_lightning.distributed.ranks import SINGLE_PROCESS, Ranks
from grpo_lightning.policy import Policy
from grpo_lightning.reward import RewardSpec, Score, Scoring, clip_scores, scalar, total
from grpo_lightning.reward.accuracy import of_environment
from grpo_lightning.sampler.base import Poll, Sampler
from grpo_lightning.sampler.native.sampler import NativeSampler
from grpo_lightning.types import Prompts, Sampled, Sampling, Scored, spans

if TYPE_CHECKING:
    from grpo_lightning.environment import Environment, Episodes

_CPU = torch.device("cpu")

COLUMNS = ("turns", "replies", "episode_tokens", "turn_scores")
"""What rewards may ask for besides the columns of the data."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The seed of a step's samples, and the step's sampler, clock and processes.

    Example:
        ``StepContext(seed=7)`` is all that a rollout in a script of one's own needs.
    """

    seed: int
    """Decides everything that is sampled, in [0, 2^64)."""
    step: int = 0
    """Steps completed before."""
    clock: Clock = field(default_factory=Clock)
    """Adds up the seconds of the phases rollout, reward, wait and score."""
    poll: Poll | None = None
    """Called between generated tokens; may raise to abandon the sampling."""
    ranks: Ranks = SINGLE_PROCESS
    """The processes that divide the work among them."""
    sampler: Sampler = field(default_factory=NativeSampler)
    """Generates the completions."""


class TokenLocator(Protocol):
    """Knows which token of a completion a character of its text belongs to; a policy does."""

    def token_at(self, ids: Sequence[int], end: int) -> int:
        """As in ``Policy.token_at``."""
        ...


@dataclass(frozen=True)
class Scorer:
    """Generates completions and scores them; holds settings, never weights.

    Args:
        rewards: Name -> function and weight.
        outcome: The reward that decides whether a completion is right, for pass@k and the group counts; None takes
            ``accuracy`` or, without one, the first reward.
        threshold: Its least score that counts as right.
        environment: Environment for multi-turn rollouts, or None for single-turn.
    """

    rewards: Mapping[str, RewardSpec]
    outcome: str | None
    threshold: float
    environment: "Environment | None" = None

    @property
    def outcome_name(self) -> str:
        """The reward that decides whether a completion is right."""
        return self.outcome or ("accuracy" if "accuracy" in self.rewards else next(iter(self.rewards)))

    @property
    def weights(self) -> Tensor:
        """[K] of the rewards."""
        return torch.tensor([reward.factor for reward in self.rewards.values()])

    def generate_and_score(
        self,
        policy: Policy,
        prompts: Prompts,
        *,
        group_size: int,
        sampling: Sampling,
        context: StepContext,
        first_prompt: int = 0,
    ) -> tuple[Scored, dict[str, float]]:
        """Generate ``group_size`` completions per prompt and score them; arguments as in `Sampler.generate`.

        Every process does so for its share of the prompts and receives the results of all. Rewards with a timeout start
        on a completion as soon as it has ended.

        Returns:
            The completions with their rewards; and metrics: for each reward with a timeout the fraction of the
            completions on which it failed, and the environment's own metrics.
        """
        ranks = context.ranks
        shard = ranks.shard_range(len(prompts))
        local, first_prompt = prompts[shard], first_prompt + shard.start

        def work() -> tuple[Scored, dict[str, float], torch.device]:
            episodes = self._episodes(local, group_size, first_prompt, context)
            # What happened in episodes is known only when they are over.
            scoring = self._scoring(local, group_size, context, {}) if episodes is None else None
            with context.clock("rollout"):
                sampled = context.sampler.generate(
                    policy,
                    local.texts,
                    group_size=group_size,
                    sampling=sampling,
                    seed=context.seed,
                    first_prompt=first_prompt,
                    poll=context.poll,
                    on_finished=scoring.begin if scoring and scoring.may_begin else None,
                    responder=episodes,
                )
            if episodes is not None:
                context.clock.move(episodes.seconds, "rollout", "environment")
                finished = tuple(own and over for own, over in zip(sampled.finished, episodes.over, strict=True))
                sampled = replace(sampled, finished=finished)
            scored, metrics = self._score(policy, local, sampled, scoring, episodes, context)
            return scored.to(_CPU) if ranks.size > 1 else scored, metrics, sampled.mask.device

        parts = ranks.all_or_raise(work, waiting=context.clock("wait"))
        return _concatenate([(scored, metrics) for scored, metrics, _ in parts], parts[ranks.rank][2])

    def score(
        self, locator: TokenLocator, prompts: Prompts, sampled: Sampled, *, context: StepContext
    ) -> tuple[Scored, dict[str, float]]:
        """Score completions that were sampled before; every process scores its share of the prompts.

        Args:
            locator: Finds the tokens where steps end; a policy does.
            prompts: [P]
            sampled: [B] their completions, the same in all processes.
            context: The processes and the clock.

        Returns:
            As `generate_and_score` does.
        """
        ranks, group_size = context.ranks, len(sampled) // len(prompts)

        def work() -> tuple[Scored, dict[str, float]]:
            shard = ranks.shard_range(len(prompts))
            rows = torch.arange(shard.start * group_size, shard.stop * group_size, device=sampled.mask.device)
            scored, metrics = self._score(locator, prompts[shard], sampled[rows], None, None, context)
            return scored.to(_CPU) if ranks.size > 1 else scored, metrics

        return _concatenate(ranks.all_or_raise(work, waiting=context.clock("wait")), sampled.mask.device)

    def _episodes(
        self, prompts: Prompts, group_size: int, first_prompt: int, context: StepContext
    ) -> "Episodes | None":
        """One new episode per completion; None without an environment."""
        if self.environment is None:
            return None
        from grpo_lightning.environment import Episodes

        rows = range(len(prompts) * group_size)
        seeds = [(context.seed, first_prompt + row // group_size, row % group_size) for row in rows]
        columns = {name: _per_row(values, group_size) for name, values in prompts.columns.items()}
        return Episodes(self.environment, _per_row(prompts.texts, group_size), columns, seeds, context.poll)

    def _scoring(
        self, prompts: Prompts, group_size: int, context: StepContext, turn_columns: Mapping[str, Sequence[Any]]
    ) -> Scoring:
        columns = {name: _per_row(values, group_size) for name, values in prompts.columns.items()}
        return Scoring(self.rewards, _per_row(prompts.texts, group_size), columns | dict(turn_columns), context.poll)

    def _score(
        self,
        locator: TokenLocator,
        prompts: Prompts,
        sampled: Sampled,
        scoring: Scoring | None,
        episodes: "Episodes | None",
        context: StepContext,
    ) -> tuple[Scored, dict[str, float]]:
        with context.clock("reward"):
            if episodes is not None:
                episodes.check()
            if scoring is None:
                group_size = len(sampled) // len(prompts)
                scoring = self._scoring(prompts, group_size, context, reward_columns(sampled, episodes))
            ids = last_turn_ids(sampled)
            scores = scoring.finish(sampled.texts, ids)
            values = scores.values
            if episodes is not None and self.environment is not None:
                values = without_failed(values, self.rewards, episodes.failed, self.environment.failed_score)
            clipped = clip_scores(self.rewards, values)
            raw = {name: [scalar(value) for value in given] for name, given in values.items()}
            raw["total"] = total(self.rewards, clipped)
            rewards = {name: _tensor(given) for name, given in raw.items()}
            scored = Scored(
                prompts,
                sampled,
                rewards,
                right=rewards[self.outcome_name] >= self.threshold,
                scores=torch.stack([_tensor([scalar(v) for v in given]) for given in clipped.values()], -1),
                steps=self._step_rewards(locator, clipped, ids, sampled, episodes),
            )
        metrics = {f"failure/{name}": fraction for name, fraction in scores.failed.items()}
        return scored, metrics | ({} if episodes is None else episodes.metrics)

    def _step_rewards(
        self,
        locator: TokenLocator,
        scores: Mapping[str, Sequence[Score]],
        ids: Sequence[Sequence[int]],
        sampled: Sampled,
        episodes: "Episodes | None",
    ) -> Tensor:
        """[B, T] weighted scores at the token where each step ends, NaN elsewhere."""
        steps = torch.full(tuple(sampled.mask.shape), torch.nan)
        ends_by_row = turn_ends(sampled)
        for name, values in scores.items():
            reward = self.rewards[name]
            by_turn = None if episodes is None or not is_of_environment(reward) else episodes.scores
            for row, value in enumerate(values):
                ends, start = ends_by_row[row], ends_by_row[row][-1] + 1 - len(ids[row])
                placed: list[tuple[int, float]] = []
                if by_turn is not None:
                    placed = [(ends[turn], score) for turn, score in scores_by_turn(by_turn[row], value)]
                elif isinstance(value, tuple):
                    placed = [(start + locator.token_at(ids[row], end), score) for end, score in value]
                elif value is not None:
                    placed = [(ends[-1], value)]
                for token, score in placed:
                    steps[row, token] = steps[row, token].nan_to_num(0.0) + reward.factor * score
        return steps


def _concatenate(
    parts: Sequence[tuple[Scored, dict[str, float]]], device: torch.device
) -> tuple[Scored, dict[str, float]]:
    """What the processes scored, by rank, as one; metrics are weighted by the completions of their process."""
    sizes = [len(scored.right) for scored, _ in parts]
    metrics = {
        name: sum(values[name] * size for (_, values), size in zip(parts, sizes, strict=True)) / sum(sizes)
        for name in parts[0][1]
    }
    return Scored.concatenate([scored for scored, _ in parts]).to(device), metrics


def _tensor(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([torch.nan if value is None else value for value in values])


def _per_row(values: Sequence[Any], group_size: int) -> list[Any]:
    """[P] -> [P * G], every value ``group_size`` times in a row."""
    return list(chain.from_iterable(repeat(value, group_size) for value in values))


def check_columns(
    rewards: Mapping[str, RewardSpec], environment: "Environment | None", column_names: Collection[str]
) -> None:
    """Check that every reward and the environment can be called with these columns of the data.

    Raises:
        RewardError: See `grpo_lightning.reward.check_columns`.
        EpisodeError: See `grpo_lightning.environment.check_columns`; or a column has the name of one of `COLUMNS`.
    """
    if environment is None:
        reward.check_columns(rewards, column_names)
        return
    from grpo_lightning.environment import EpisodeError, check_columns

    if taken := sorted({*COLUMNS} & {*column_names}):
        raise EpisodeError(
            f"column {taken[0]!r} of the data has the name of a column that multi-turn rollouts pass to rewards "
            f"({', '.join(COLUMNS)}): rename it"
        )
    check_columns(environment, column_names)
    reward.check_columns(rewards, [*column_names, *COLUMNS])


def reward_columns(sampled: Sampled, episodes: "Episodes | None") -> dict[str, Sequence[Any]]:
    """`COLUMNS` by name, [B] each; recorded completions have no scores of turns, single-turn ones no columns."""
    if sampled.turns is None or sampled.replies is None:
        return {}
    columns: dict[str, Sequence[Any]] = {
        "turns": [list(texts) for texts in sampled.turns],
        "replies": [list(texts) for texts in sampled.replies],
        "episode_tokens": sampled.attention_mask[:, -sampled.mask.shape[1] :].sum(-1).tolist(),
    }
    return columns if episodes is None else {**columns, "turn_scores": episodes.scores}


def without_failed(
    values: Mapping[str, Sequence[Score]],
    rewards: Mapping[str, RewardSpec],
    failed: Sequence[str | None],
    score: float | None,
) -> dict[str, list[Score]]:
    """Scores in which no reward applies to episodes whose environment has failed.

    Args:
        values: Name -> [B] of each reward.
        rewards: The rewards.
        failed: [B] what failed, or None.
        score: The environment's own reward of a failed episode; None: it does not apply either.
    """
    return {
        name: [
            value if problem is None else (score if is_of_environment(rewards[name]) else None)
            for value, problem in zip(column, failed, strict=True)
        ]
        for name, column in values.items()
    }


def is_of_environment(reward: RewardSpec) -> bool:
    """Whether a reward is the environment's own."""
    function: Callable[..., Any] = reward.function
    return (function.func if isinstance(function, partial) else function) is of_environment


def scores_by_turn(scores: Sequence[tuple[int, float]], value: Score) -> Sequence[tuple[int, float]]:
    """The environment's reward of one episode as (number of the turn, score) pairs.

    Args:
        scores: The pairs that the environment gave.
        value: What enters the total: their sum; or what clipping left of it, which belongs to the last turn, -1.
    """
    if not isinstance(value, float):
        return ()
    return scores if scores and value == of_environment([scores])[0] else ((-1, value),)


def turn_ends(sampled: Sampled) -> list[list[int]]:
    """[B] the last token of every turn; of a completion of one turn its last token, -1 where it has none."""
    ends = [[end - 1 for _, end in turns] for turns in spans(sampled.mask)]
    return [own or [-1] for own in ends] if sampled.turns is not None else [own[-1:] or [-1] for own in ends]


def last_turn_ids(sampled: Sampled) -> list[list[int]]:
    """[B] the token ids of the model's last turn, whose text is in ``texts``."""
    completions = sampled.ids[:, -sampled.mask.shape[1] :].tolist()
    starts = [turns[-1][0] if turns and sampled.turns is not None else 0 for turns in spans(sampled.mask)]
    masks = sampled.mask.tolist()
    return [
        [token for token, counts in zip(ids[start:], mask[start:], strict=True) if counts]
        for ids, mask, start in zip(completions, masks, starts, strict=True)
    ]


def turn_metrics(sampled: Sampled) -> dict[str, Tensor]:
    """Metrics of multi-turn completions; none of single-turn ones."""
    if sampled.turns is None:
        return {}
    turns = torch.tensor([len(texts) for texts in sampled.turns], dtype=torch.float)
    replied = sampled.attention_mask[:, -sampled.mask.shape[1] :] & ~sampled.mask
    return {
        "episode/turns": turns.mean(),
        "episode/turns_max": turns.max(),
        "episode/reply_tokens": replied.sum(-1).float().mean(),
    }
