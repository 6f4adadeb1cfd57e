"""Rewards: functions of prompts, completions and data columns that give each completion a finite number or None.

A process reward gives (end, score) pairs instead: the score of each step of the reasoning and where in the text the
step ends, in characters. Nothing here needs torch but the reward model: worker processes import it.
"""

from grpo_lightning.reward.engine.coroutines import Later, Refused
from grpo_lightning.reward.engine.scoring import Scores, Scoring, check_columns, score
from grpo_lightning.reward.engine.total import scalar, shaped, total
from grpo_lightning.reward.engine.weighted import PerCompletion, Reward, RewardError, Score, Weighted

__all__ = [
    "Later",
    "PerCompletion",
    "Refused",
    "Reward",
    "RewardError",
    "Score",
    "Scores",
    "Scoring",
    "Weighted",
    "check_columns",
    "scalar",
    "score",
    "shaped",
    "total",
]
