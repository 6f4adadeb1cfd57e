"""Whether what judges and what replies can be called with the columns of the data, before anything is sampled."""

from collections.abc import Collection, Mapping

from grpo_lightning import environment, reward
from grpo_lightning.environment import Environment
from grpo_lightning.reward import Weighted


def check_columns(rewards: Mapping[str, Weighted], partner: Environment | None, column_names: Collection[str]) -> None:
    """Check that every reward and the environment can be called with these columns.

    Args:
        rewards: Name -> function and weight.
        partner: Whom the policy talks to; None: nobody.
        column_names: Those of the data.

    Raises:
        RewardError: See `grpo_lightning.reward.check_columns`.
        EpisodeError: See `grpo_lightning.environment.check_columns`.
    """
    reward.check_columns(rewards, column_names)
    if partner is not None:
        environment.check_columns(partner, column_names)
