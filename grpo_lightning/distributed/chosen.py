"""What the settings of a trainer ask for; read without torch."""

from collections.abc import Mapping
from typing import Any


def settings_shard(trainer: Mapping[str, Any]) -> bool:
    """Whether the settings of a trainer are those of ``trainer=fsdp``."""
    strategy = trainer.get("strategy")
    return isinstance(strategy, Mapping) and "FullySharded" in str(strategy.get("_target_"))
