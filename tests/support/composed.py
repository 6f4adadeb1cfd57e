"""The settings as train.py composes them, without a run."""

import copy
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_lightning import recording
from grpo_lightning.composition import compose_config, initialize_hydra, resolve_config
from grpo_lightning.config.settings import normalize_overrides

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
PARTS = {path.name for path in CONF.iterdir() if path.is_dir()}
NOWHERE = Path(tempfile.gettempdir()) / "nonexistent"
"""A run directory that could be made, and is not."""

HEADER = {
    **{"format": "grpo-lightning rollout 1", "step": 1, "seed": 0, "prompts": 1, "group_size": 2, "prompt_tokens": 2},
    **{"completion_tokens": 3, "temperature": 1.0, "rewards": ["right"], "weights": [1.0], "fresh": True},
    **{"complete": True, "reference": False, "policy": "", "num_tokens": 5, "optimizer_steps": 1},
    **{"collected": {}, "updated": {}, "settings": {}},
}
"""The first line of a recorded rollout."""


def settings(*overrides: str) -> DictConfig:
    """conf/train.yaml with overrides; the run directory is one that nobody writes to unless named."""
    return _compose(overrides)


@lru_cache(64)
def _compose(words: tuple[str, ...]) -> DictConfig:
    """What Hydra composes, with its files read once: a third of a second for every choice of files is saved."""
    words = (f"run_dir={NOWHERE}", *normalize_overrides(words, CONF))
    parsed = OverridesParser.create().parse_overrides([*words])
    if any(one.is_force_add() for one in parsed):  # which may set again what another one sets
        return _from_files(words)
    values = [one for one in parsed if _is_value(one)]
    try:
        config = copy.deepcopy(_from_files(tuple(str(one.input_line) for one in parsed if not _is_value(one))))
        OmegaConf.set_struct(config, True)  # an unknown key is an error
        for one in values:
            OmegaConf.update(config, one.key_or_group, one.value(), merge=True)
    except OmegaConfBaseException:
        return _from_files(words)  # whose errors are Hydra's own
    return config


def _is_value(override: Any) -> bool:
    """Whether an override sets a value, and chooses, adds or removes nothing."""
    part = override.key_or_group.partition(".")[0]
    is_plain = not (
        override.is_delete() or override.is_add() or override.is_force_add() or override.is_sweep_override()
    )
    return is_plain and part != "hydra" and override.key_or_group not in PARTS


@lru_cache(256)
def _from_files(words: tuple[str, ...]) -> DictConfig:
    with initialize_hydra(words):
        return compose_config(words)[0]


def composed(*overrides: str) -> dict[str, Any]:
    """The same, resolved, as the package sees it."""
    return resolve_config(settings(*overrides))


def with_directories(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """The same settings; what other commands leave in ``place``, a policy or recorded rollouts, is there."""
    path = config["policy"].get("path", "")
    if path.startswith(("./", "runs/")):
        (place / path).mkdir(parents=True, exist_ok=True)
    if recorded := config["rollout"].get("path"):
        sizes = {"prompts": config["data"]["prompts_per_step"], "group_size": config["rollout"]["group_size"]}
        for step in range(1, config["steps"] + 1):
            recording.write(
                place / recorded / "rollouts" / recording.file_name(step), [HEADER | sizes | {"step": step}]
            )
    return config


def build(*overrides: str) -> Any:
    """Part -> what its settings describe."""
    config = settings(*overrides)

    def built(part: str, **more: Any) -> Any:
        made = instantiate(config[part], _convert_="all", **({"_partial_": True} if more else {}))
        return made(**more) if more else made

    return built
