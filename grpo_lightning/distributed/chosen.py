"""What the settings of a trainer ask for, and which process this is; read without torch."""

import os
from collections.abc import Mapping
from typing import Any


def settings_shard(trainer: Mapping[str, Any]) -> bool:
    """Whether the settings of a trainer are those of ``trainer=fsdp``."""
    strategy = trainer.get("strategy")
    return isinstance(strategy, Mapping) and "FullySharded" in str(strategy.get("_target_"))


def is_first_process() -> bool:
    """Whether this is the process that prints, as far as the variables of launchers say."""
    numbers = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ]
    return not numbers or numbers[0] == "0"
