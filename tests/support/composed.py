"""The settings as train.py composes them, without a run."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"


def settings(*overrides: str) -> DictConfig:
    """conf/train.yaml with overrides; the run directory is one that nobody writes to unless named."""
    return _compose(overrides)


@lru_cache(8)
def _compose(overrides: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", ["run_dir=/nonexistent", *overrides])


def composed(*overrides: str) -> dict[str, Any]:
    """The same, resolved, as the package sees it."""
    config: Any = OmegaConf.to_container(settings(*overrides), resolve=True, throw_on_missing=True)
    return config


def build(*overrides: str) -> Any:
    """Part -> what its settings describe."""
    config = settings(*overrides)

    def built(part: str, **more: Any) -> Any:
        made = instantiate(config[part], _convert_="all", **({"_partial_": True} if more else {}))
        return made(**more) if more else made

    return built
