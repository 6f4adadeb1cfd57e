"""Rollouts in which the model talks to an environment.

B completions, T tokens of the longest.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_lightning import environment, reward
from grpo_lightning.environment import Environment, EpisodeError, Episodes
from grpo_lightning.reward import RewardSpec, Score
from grpo_lightning.reward.accuracy import of_environment
from grpo_lightning.rollout.step_context import StepContext
from grpo_lightning.types import Prompt, Sampled, spans

COLUMNS = ("turns", "replies", "episode_tokens", "turn_scores")
"""What rewards may ask for besides the columns of the data."""


def check_columns(
    rewards: Mapping[str, RewardSpec], partner: Environment | None, column_names: Collection[str]
) -> None:
    """Check that every reward and the environment can be called with these columns.

    Args:
        rewards: Name -> function and weight.
        partner: Whom the model talks to, of whom rewards may ask what was said; None: nobody.
        column_names: Those of the data.

    Raises:
        RewardError: See `grpo_lightning.reward.check_columns`.
        EpisodeError: See `grpo_lightning.environment.check_columns`; or a column has the name of what rewards are told
            of episodes.
    """
    if partner is None:
        reward.check_columns(rewards, column_names)
        return
    if taken := sorted({*COLUMNS} & {*column_names}):
        raise EpisodeError(
            f"column {taken[0]!r} has the name of what rewards are told of episodes; allowed with an environment are "
            f"names other than {', '.join(COLUMNS)}"
        )
    environment.check_columns(partner, column_names)
    reward.check_columns(rewards, [*column_names, *COLUMNS])


def begin(
    environment: Environment,
    prompts: Sequence[Prompt],
    columns: Mapping[str, Sequence[Any]],
    *,
    group_size: int,
    first_prompt: int,
    context: StepContext,
) -> Episodes:
    """Episodes that nothing has been said in.

    Args:
        environment: Whom the model talks to.
        prompts: [B] that of each completion.
        columns: Name -> [B] what else the data set knows of it.
        group_size: Completions per prompt.
        first_prompt: Number of the first prompt among all that are sampled with this seed.
        context: The step's seed, and what watches over it.
    """
    seeds = [(context.seed, first_prompt + row // group_size, row % group_size) for row in range(len(prompts))]
    return Episodes(environment, prompts, columns, seeds, context.poll)


def ended(sampled: Sampled, episodes: Episodes) -> Sampled:
    """The samples, of which only those are finished that the environment has ended."""
    finished = tuple(own and over for own, over in zip(sampled.finished, episodes.over, strict=True))
    return replace(sampled, finished=finished)


def columns(sampled: Sampled, episodes: Episodes | None) -> dict[str, Sequence[Any]]:
    """What rewards may ask for of each completion, by name; of recorded ones the scores of turns are not known."""
    if sampled.turns is None or sampled.replies is None:
        return {}
    scores = {} if episodes is None else {"turn_scores": episodes.scores}
    seen = sampled.attention_mask[:, -sampled.mask.shape[1] :].sum(-1).tolist()
    told = {"turns": sampled.turns, "replies": sampled.replies}
    return {**{name: [list(own) for own in texts] for name, texts in told.items()}, "episode_tokens": seen, **scores}


def without_failed(
    values: Mapping[str, Sequence[Score]],
    rewards: Mapping[str, RewardSpec],
    failed: Sequence[bool],
    score: float | None,
) -> dict[str, list[Score]]:
    """What the rewards gave, where no reward applies to episodes in which the environment has failed.

    Args:
        values: Name -> [B] of each reward.
        rewards: The rewards.
        failed: [B] whether it has.
        score: What the environment's own reward is then; None: it does not apply either.
    """
    return {
        name: [
            (score if is_own(rewards[name]) else None) if is_failed else value
            for value, is_failed in zip(given, failed, strict=True)
        ]
        for name, given in values.items()
    }


def is_own(reward: RewardSpec) -> bool:
    """Whether a reward is what the environment itself gives."""
    function: Callable[..., Any] = reward.function
    return (function.func if isinstance(function, partial) else function) is of_environment


def by_turn(scores: Sequence[tuple[int, float]], value: Score) -> Sequence[tuple[int, float]]:
    """Which turns the environment's reward of an episode belongs to, as (number of the turn, score) pairs.

    Args:
        scores: The pairs that the environment gave.
        value: What enters the total: their sum; or what remains of it, which belongs to the last turn, -1.
    """
    if not isinstance(value, float):
        return ()
    return scores if scores and value == of_environment([scores])[0] else ((-1, value),)


def turn_ends(sampled: Sampled) -> list[list[int]]:
    """[B] the last token of every turn; of a completion of one turn its last token, -1 where it has none."""
    ends = [[end - 1 for _, end in turns] for turns in spans(sampled.mask)]
    return [own or [-1] for own in ends] if sampled.turns is not None else [own[-1:] or [-1] for own in ends]


def last_turn_ids(sampled: Sampled) -> list[list[int]]:
    """[B] the tokens that the model has said in its last turn, which ``texts`` has."""
    completions = sampled.ids[:, -sampled.mask.shape[1] :].tolist()
    starts = [turns[-1][0] if turns and sampled.turns is not None else 0 for turns in spans(sampled.mask)]
    masks = sampled.mask.tolist()
    return [
        [token for token, is_own in zip(ids[start:], mask[start:], strict=True) if is_own]
        for ids, mask, start in zip(completions, masks, starts, strict=True)
    ]


def metrics(sampled: Sampled) -> dict[str, Tensor]:
    """What is logged of episodes; nothing of completions of one turn."""
    if sampled.turns is None:
        return {}
    turns = torch.tensor([len(own) for own in sampled.turns], dtype=torch.float)
    replied = sampled.attention_mask[:, -sampled.mask.shape[1] :] & ~sampled.mask
    return {
        "episode/turns": turns.mean(),
        "episode/turns_max": turns.max(),
        "episode/reply_tokens": replied.sum(-1).float().mean(),
    }
