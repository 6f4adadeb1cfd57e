"""Whether what judges and what replies can be called with the columns of the data, before anything is sampled."""

from collections.abc import Collection, Mapping

from grpo_lightning import environment, reward
from grpo_lightning.environment import Environment, EpisodeError
from grpo_lightning.reward import Weighted
from grpo_lightning.rollout.episodes import COLUMNS


def check_columns(rewards: Mapping[str, Weighted], partner: Environment | None, column_names: Collection[str]) -> None:
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
