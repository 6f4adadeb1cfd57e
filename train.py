"""Train, validate or export a policy: ``python train.py algorithm=dapo rollout.group_size=8 seed=1``."""

from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float:
    """Run what the settings describe and return the value a sweep maximizes."""
    from grpo_lightning.run import run  # here, since worker processes of rewards import this file, and need no torch

    hydra_config = HydraConfig.get()
    given = hydra_config.overrides
    config: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return run(
        config,
        lambda part: instantiate(cfg[part], _convert_="all"),
        overrides=list(given.task),
        directory_given=any(override.startswith(("hydra.run.dir=", "hydra.sweep.dir=")) for override in given.hydra),
        multirun=hydra_config.mode == RunMode.MULTIRUN,
    )


if __name__ == "__main__":
    main()
