"""Multi-turn completions: what rewards receive of their turns, and at which tokens turns end.

B completions, T tokens of the longest.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_lightning import environment, reward
from grpo_lightning.environment import Environment, EpisodeError, Episodes
from grpo_lightning.reward import RewardSpec, Score
from grpo_lightning.reward.accuracy import of_environment
from grpo_lightning.types import Sampled, spans

COLUMNS = ("turns", "replies", "episode_tokens", "turn_scores")
"""What rewards may ask for besides the columns of the data."""


def check_columns(
    rewards: Mapping[str, RewardSpec], environment_: Environment | None, column_names: Collection[str]
) -> None:
    """Check that every reward and the environment can be called with these columns of the data.

    Raises:
        RewardError: See `grpo_lightning.reward.check_columns`.
        EpisodeError: See `grpo_lightning.environment.check_columns`; or a column has the name of one of `COLUMNS`.
    """
    if environment_ is None:
        reward.check_columns(rewards, column_names)
        return
    if taken := sorted({*COLUMNS} & {*column_names}):
        raise EpisodeError(
            f"column {taken[0]!r} of the data has the name of a column that multi-turn rollouts pass to rewards "
            f"({', '.join(COLUMNS)}): rename it"
        )
    environment.check_columns(environment_, column_names)
    reward.check_columns(rewards, [*column_names, *COLUMNS])


def reward_columns(sampled: Sampled, episodes: Episodes | None) -> dict[str, Sequence[Any]]:
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
