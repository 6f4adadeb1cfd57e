"""A look at the settings before Hydra runs: what cannot be composed, and what Hydra itself would make."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_lightning.composition import CONF
from grpo_lightning.config import directory_problems, targets
from grpo_lightning.config.redaction import redact
from grpo_lightning.config.shell import format_override
from grpo_lightning.config.suggestions import explain_compose_error, known_keys

_LOGGING = (
    *("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "logging.Formatter", "logging.Filter"),
    *("logging.handlers.", "colorlog.", "grpo_lightning.output.terminal."),
)


def check(asked: argparse.Namespace) -> None:
    """Compose once before Hydra does, to say in a sentence what is wrong, and to check what Hydra itself would make.

    Args:
        asked: The command line as Hydra reads it.

    Raises:
        SystemExit: The settings cannot be composed, or Hydra would import what settings may not name.
    """
    name = asked.config_name or "train"
    directory = str(Path(asked.config_path).absolute()) if asked.config_path else str(CONF)
    words = [*asked.overrides, *_search_path(asked)]
    try:
        with initialize_config_dir(directory, version_base="1.3", job_name="train"):
            loader = GlobalHydra.instance().config_loader()
            composed = loader.load_configuration(
                name, words, run_mode=RunMode.MULTIRUN, from_shell=True, validate_sweep_overrides=False
            )
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(redact(explain_compose_error(error, CONF, known_keys(CONF), asked.overrides)))
    is_sweep = asked.multirun or composed.hydra.mode == RunMode.MULTIRUN
    place = "hydra.sweep.dir" if is_sweep else "hydra.run.dir"
    if wrong := [
        *_of_hydra(composed),
        *_without_effect(asked.overrides, is_sweep),
        *directory_problems({place: OmegaConf.select(composed, place)}),
    ]:
        sys.exit(redact("the settings cannot work:\n" + "\n".join(f"  {one}" for one in wrong)))


def _search_path(asked: argparse.Namespace) -> list[str]:
    """The override by which ``compose`` finds the files of ``--config-dir``."""
    if not asked.config_dir:
        return []
    given = [word for word in asked.overrides if word.startswith("hydra.searchpath=[")]
    others = given[-1].partition("=[")[2].removesuffix("]") if given else ""
    directory = f"file://{Path(asked.config_dir).absolute()}"
    return [f"hydra.searchpath=['{directory}'{',' if others else ''}{others}]"]


def _of_hydra(composed: DictConfig) -> list[str]:
    """What is wrong with the code that Hydra's own settings name: it is run before a job's settings are checked."""
    trusted = targets.trusted_packages({"trusted": _plain(composed.get("trusted"))})
    own = {part: _plain(composed.hydra[part]) for part in ("callbacks", "launcher", "sweeper")}
    allowed = (*targets.ALLOWED_TARGETS, *targets.HYDRA_TARGETS)
    wrong = list(targets.target_problems({"hydra": own, "trusted": list(trusted)}, allowed))
    for key, name in () if wrong else targets.find_targets(own, "hydra"):
        try:
            targets.import_target(name, trusted, allowed)
        except ValueError as error:
            wrong.append(f"{key}={name}: {error}")
    for part in ("job_logging", "hydra_logging"):
        for key, name in targets.find_targets(
            _plain(composed.hydra[part]), f"hydra.{part}", ("()", "class", "factory")
        ):
            if not str(name).startswith(_LOGGING):
                wrong.append(f"{key}={name}: allowed are classes of logging, colorlog and this package")
    if getattr(direction := own["sweeper"].get("direction"), "name", direction) == "minimize":
        wrong.append("hydra.sweeper.direction=minimize: allowed is maximize, as sweep_metric is")
    return wrong


def _plain(node: Any) -> Any:
    """Settings as plain values, resolved where they can be before a job begins."""
    if OmegaConf.is_dict(node):
        return {str(key): _plain(_value(node, key)) for key in node}
    if OmegaConf.is_list(node):
        return [_plain(_value(node, number)) for number in range(len(node))]
    return node


def _value(node: Any, key: Any) -> Any:
    try:
        return node[key]
    except OmegaConfBaseException:  # such as a job's number
        return None


def _without_effect(overrides: Sequence[str], is_sweep: bool) -> list[str]:
    """What is wrong where the directory of a run is named for a sweep, or the other way around."""
    own, other = ("hydra.sweep.dir", "hydra.run.dir") if is_sweep else ("hydra.run.dir", "hydra.sweep.dir")
    named = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith(f"{other}=")]
    told = f"has no effect {'with' if is_sweep else 'without'} -m; allowed is"
    return [f"{other}={value}: {told} {format_override(own, value)}" for value in named]
