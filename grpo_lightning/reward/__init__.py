"""Rewards: functions of prompts, completions and data columns that give each completion a finite number or None.

A process reward gives (end, score) pairs: the score of each step of the reasoning and where in the text the step ends,
in characters. Only the reward model needs torch.
"""

from grpo_lightning.reward.scoring import Scores, Scoring, check_columns, check_rows
from grpo_lightning.reward.spec import (
    PerCompletion,
    PermanentError,
    Reward,
    RewardError,
    RewardSpec,
    Score,
    clip_scores,
    scalar,
    total,
)

__all__ = [
    "PerCompletion",
    "PermanentError",
    "Reward",
    "RewardError",
    "RewardSpec",
    "Score",
    "Scores",
    "Scoring",
    "check_columns",
    "check_rows",
    "clip_scores",
    "scalar",
    "total",
]
