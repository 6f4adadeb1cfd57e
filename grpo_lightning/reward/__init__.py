"""Rewards: functions of prompts, completions and data columns that give each completion a finite number or None.

A process reward gives (end, score) pairs: the score of each step of the reasoning and where in the text the step ends,
in characters. Only the reward model needs torch.
"""

from grpo_lightning.reward.scoring import Scoring, check_columns, check_rows
from grpo_lightning.reward.spec import PerCompletion, PermanentError, RewardError, RewardSpec

__all__ = ["PerCompletion", "PermanentError", "RewardError", "RewardSpec", "Scoring", "check_columns", "check_rows"]
