"""The settings of a run that has ended, with changes, to compute something else from what it left."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from grpo_lightning.composition.overrides import cause_of, composing, instantiated, select
from grpo_lightning.config import ConfigError, check_config, sandbox_problems
from grpo_lightning.config.redaction import REDACTED
from grpo_lightning.config.targets import find_targets, import_target, trusted_packages

_NOT_NEEDED = re.compile(r"[+~]*(callbacks|logger|trainer|sweep|mode|checkpoint)\b")

_CHOSEN_WITH = {"algorithm": ("loss", "advantage")}

Build = Callable[[str, Any], Any]
"""(dotted key, settings) -> the object that they describe."""


def recalled(directory: Path, overrides: Sequence[str], parts: Sequence[str]) -> tuple[dict[str, Any], Build]:
    """Some parts of the settings of the run in a directory, with overrides, and what builds objects from them.

    Args:
        directory: A run directory, of which ``.hydra/overrides.yaml`` is read.
        overrides: As on the command line.
        parts: Names of groups of conf/.

    Raises:
        ConfigError: The settings cannot work.
        ValueError: The directory does not say how its run was set.
    """
    words = [*(word for word in _overrides(directory) if _still_holds(word, overrides)), *overrides]
    with composing(words):
        cfg = hydra_compose("train", words)
        config = {name: select(cfg, name, throw_on_missing=True) for name in (*parts, "trusted")}
    check_config(config)
    trusted = trusted_packages(config)

    def build(key: str, node: Any) -> Any:
        for place, name in find_targets(node, key):
            try:
                import_target(name, trusted)
            except ValueError as error:
                raise ConfigError([f"{place}={name}: {error}"]) from error
        if problems := list(sandbox_problems({key: node})):
            raise ConfigError(problems)
        try:
            return instantiated({"built": node})["built"]
        except InstantiationException as error:
            raise cause_of(error, key) from error

    return config, build


def _still_holds(word: str, overrides: Sequence[str]) -> bool:
    """Whether an override of the run is one of what is computed now: a part that is chosen anew begins afresh."""
    if _NOT_NEEDED.match(word) or REDACTED in word:
        return False
    key = word.lstrip("+~").partition("=")[0].split(".")
    for part, _, choice in (override.partition("=") for override in overrides):
        if len(key) > 1 and key[0] in _CHOSEN_WITH.get(part, (part,)):
            return part == "reward" and key[1] in re.findall(r"\w+", choice)
    return True


def _overrides(directory: Path) -> list[str]:
    file = directory / ".hydra" / "overrides.yaml"
    try:
        words: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except FileNotFoundError:
        raise ValueError(f"{directory} has no .hydra/overrides.yaml, which says how its run was set") from None
    except Exception as error:  # a parser of YAML raises many kinds
        raise ValueError(f"{file} is damaged ({type(error).__name__})") from error
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{file} is no list of overrides")
    return words
