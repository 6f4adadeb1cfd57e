"""The callbacks of a trainer that settings make."""

from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig


def with_callbacks(trainer: DictConfig) -> tuple[DictConfig, dict[str, Any]]:
    """A trainer's settings without its callbacks, and arguments with these, made.

    Where none of them keeps checkpoints, Lightning is told to keep none: else it would add a ``ModelCheckpoint`` of its
    own, which writes where the first logger's texts lead.

    Args:
        trainer: The settings; without ``callbacks`` they stand for a live trainer.
    """
    from lightning.pytorch.callbacks import Checkpoint

    if "callbacks" not in trainer:
        return trainer, {}
    rest = trainer.copy()
    made = instantiate(rest.pop("callbacks"), _convert_="all")
    every = [one for one in (made if isinstance(made, list) else [made]) if one is not None]  # callbacks.NAME=null
    return rest, {"callbacks": every, "enable_checkpointing": any(isinstance(one, Checkpoint) for one in every)}
