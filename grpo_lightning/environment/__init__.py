"""Environments: functions of what the model has said so far, which reply to it or end the episode.

An environment keeps nothing between two turns: it is called with all turns so far, and with the columns of the row. So
any process can play any turn, and a run that is continued plays the same. Nothing here needs torch: worker processes
import it.
"""

from grpo_lightning.environment.base import BadCall, Environment, EpisodeError, Episodes, check_columns

__all__ = ["BadCall", "Environment", "EpisodeError", "Episodes", "check_columns"]
