"""The settings of a run that has ended, with changes, to compute something else from what it left."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_lightning import settings, start
from grpo_lightning.composition import CONF
from grpo_lightning.composition.brought_files import is_trusted, word_problems
from grpo_lightning.composition.environment import drawn, remember_secrets, remember_words
from grpo_lightning.composition.loader import overrides_of_others
from grpo_lightning.composition.overrides import _cause, _composing, check_trust
from grpo_lightning.composition.resolvers import known_only
from grpo_lightning.composition.selected import selected
from grpo_lightning.output import redaction
from grpo_lightning.settings import ConfigError, trust
from grpo_lightning.settings.built import sandbox_problems
from grpo_lightning.settings.suggestions import explain, known_keys

_NOT_NEEDED = re.compile(r"[+~]*(callbacks|logger|trainer|requeue|sweep|mode|checkpoint|trusted|trusted_settings)\b")

_CHOSEN_WITH = {"algorithm": ("loss", "advantage")}

Build = Callable[[str, Any], Any]
"""(dotted key, settings) -> the object that they describe."""


def recalled(directory: Path, overrides: Sequence[str], parts: Sequence[str]) -> tuple[dict[str, Any], Build]:
    """Some parts of the settings of the run in a directory, with overrides, and what builds objects from them.

    The run may be a stranger's: what its settings trusted is not trusted here, and they may say what those may that a
    command brings along, unless ``trusted_settings=true`` is among ``overrides``.

    Args:
        directory: A run directory, of which ``.hydra/overrides.yaml`` is read.
        overrides: As on the command line.
        parts: Names of groups of conf/.

    Raises:
        ConfigError: The settings cannot work.
        ValueError: The directory does not say how its run was set, or its name would be read as a setting.
    """
    if "${" in str(directory):
        raise ValueError(f"{directory}: allowed is a directory without ${{ in its name, which settings give a meaning")
    remember_words(overrides)
    is_known = is_trusted(overrides)
    then = [
        word
        for word in _overrides(directory)
        if _still_holds(word, overrides) or (is_known and word.startswith("trusted="))
    ]
    try:
        parser = OverridesParser.create()
        parsed = parser.parse_overrides(then)
        if not is_known and (wrong := word_problems(parsed, parser.parse_overrides([*overrides]))):
            raise ConfigError(wrong)
        with _composing(), overrides_of_others(then):
            cfg = hydra_compose("train", [*then, *overrides])
        OmegaConf.set_struct(cfg, False)
        cfg.run_dir = str(directory)
        with known_only():
            remember_secrets(cfg)
            config = {name: selected(cfg, name, throw_on_missing=True) for name in (*parts, "trusted")}
            from_environment = drawn(cfg, config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([explain(error, CONF, known_keys(CONF))]) from error
    if not is_known:
        start.note_settings_from([str(directory)])  # as those that a command brings along
    check_trust(
        config | {"run_dir": str(directory)}, [*then, *overrides] if is_known else overrides, drawn=from_environment
    )
    _, trusted = trust.packages(config)
    if untrusted := [name for _, name in trust.targets(config) if not trust.may_name(str(name), trusted)]:
        config["trusted"] = [*trusted, *{name.partition(".")[0] for name in untrusted}]  # they may not be needed
    settings.check(config)

    def build(key: str, node: Any) -> Any:
        for place, target in trust.targets(node, key):
            trust.resolved(target, trusted, key=place)
        if problems := list(sandbox_problems({key: node})):
            raise ConfigError(problems)
        try:
            return instantiate(OmegaConf.create({"built": node}), _convert_="all")["built"]
        except InstantiationException as error:
            raise _cause(error, key) from error

    return config, build


def _still_holds(word: str, overrides: Sequence[str]) -> bool:
    """Whether an override of the run is one of what is computed now: a part that is chosen anew begins afresh."""
    if _NOT_NEEDED.match(word) or redaction.HIDDEN in word:
        return False
    key = word.lstrip("+~").partition("=")[0].split(".")
    for part, _, choice in (override.partition("=") for override in overrides):
        if len(key) > 1 and key[0] in _CHOSEN_WITH.get(part, (part,)):
            return part == "reward" and key[1] in re.findall(r"\w+", choice)
    return True


def _overrides(directory: Path) -> list[str]:
    file = directory / ".hydra" / "overrides.yaml"
    try:
        with known_only():
            words: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except FileNotFoundError:
        raise ValueError(f"{directory} has no .hydra/overrides.yaml, which says how its run was set") from None
    except Exception as error:  # a parser of YAML raises many kinds
        raise ValueError(f"{file} is damaged ({type(error).__name__})") from error
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{file} is no list of overrides")
    return words
