"""The command line: from words to an exit status."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_lightning.output.redaction import hide
from grpo_lightning.output.shell import program, shell_word, typed
from grpo_lightning.output.terminal import last_through_closed_pipes, one_line, show

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + 2, as a shell reports it."""


def main() -> None:
    """Train, validate or export, as the command line says."""
    last_through_closed_pipes()
    signal.signal(signal.SIGINT, _end)  # what is imported now has nothing to lose, and shows no traceback
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # rewards of one's own lie there, as beside any script
    try:
        from hydra._internal.utils import get_args_parser
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is not installed for {sys.executable}: activate an environment with requirements.txt")

    asked, others = get_args_parser().parse_known_args()
    if others:
        sys.exit(hide(_not_read(sys.argv[1:], others)))
    if asked.config_dir:
        sys.path.append(str(Path(asked.config_dir).absolute()))  # and beside a recipe
    if not (asked.help or asked.hydra_help or asked.shell_completion or asked.info or asked.experimental_rerun):
        _check(asked)
    from grpo_lightning.composition.job import job

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        job()
    except KeyboardInterrupt:
        _end()


def _check(asked: argparse.Namespace) -> None:
    """Compose once before Hydra does, to say in a sentence what is wrong, and to check what Hydra itself would make.

    Args:
        asked: The command line as Hydra reads it.

    Raises:
        SystemExit: The settings cannot be composed, or Hydra would import what settings may not name.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from grpo_lightning.composition import CONF
    from grpo_lightning.settings import place_problems
    from grpo_lightning.settings.suggestions import explain, known_keys

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
        sys.exit(hide(explain(error, CONF, known_keys(CONF), asked.overrides)))
    is_sweep = asked.multirun or composed.hydra.mode == RunMode.MULTIRUN
    settings: Any = OmegaConf.to_container(composed, resolve=False)
    place = "hydra.sweep.dir" if is_sweep else "hydra.run.dir"
    if wrong := [
        *_of_hydra(settings),
        *_without_effect(asked.overrides, is_sweep),
        *place_problems({place: OmegaConf.select(composed, place)}),
    ]:
        sys.exit(hide("the settings cannot work:\n" + "\n".join(f"  {one}" for one in wrong)))


def _search_path(asked: argparse.Namespace) -> list[str]:
    """The override by which ``compose`` finds the files of ``--config-dir``."""
    if not asked.config_dir:
        return []
    given = [word for word in asked.overrides if word.startswith("hydra.searchpath=[")]
    others = given[-1].partition("=[")[2].removesuffix("]") if given else ""
    directory = f"file://{Path(asked.config_dir).absolute()}"
    return [f"hydra.searchpath=['{directory}'{',' if others else ''}{others}]"]


def _of_hydra(settings: dict[str, Any]) -> list[str]:
    """What is wrong with the code that Hydra's own settings name: it is run before a job's settings are checked."""
    from grpo_lightning.settings.targets import (
        LIBRARIES,
        OF_HYDRA,
        find_targets,
        name_problems,
        resolve,
        trusted_packages,
    )

    allowed = (*LIBRARIES, *OF_HYDRA)
    own = {"hydra": settings["hydra"], "trusted": settings.get("trusted")}
    if wrong := list(name_problems(own, allowed)):
        return wrong
    if getattr(direction := settings["hydra"]["sweeper"].get("direction"), "name", direction) == "minimize":
        wrong = ["hydra.sweeper.direction=minimize: allowed is maximize, as sweep_metric is"]
    trusted = trusted_packages(own)
    for key, name in find_targets(own):
        try:
            resolve(name, trusted, allowed)
        except ValueError as error:
            wrong.append(f"{key}={name}: {error}")
    return wrong


def _without_effect(overrides: Sequence[str], is_sweep: bool) -> list[str]:
    """What is wrong where the directory of a run is named for a sweep, or the other way around."""
    own, other = ("hydra.sweep.dir", "hydra.run.dir") if is_sweep else ("hydra.run.dir", "hydra.sweep.dir")
    named = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith(f"{other}=")]
    told = f"has no effect {'with' if is_sweep else 'without'} -m; allowed is"
    return [f"{other}={value}: {told} {typed(own, value)}" for value in named]


def _not_read(words: Sequence[str], others: Sequence[str]) -> str:
    """What is said of words that are no option of Hydra's, and of overrides after one, which are not read as such.

    Args:
        words: All words of the command line.
        others: Those that are not read.
    """
    from grpo_lightning.composition import CONF
    from grpo_lightning.settings.suggestions import known_keys, unknown_option

    if options := [word for word in others if word.startswith("-")]:
        following = words[words.index(options[0]) + 1 :]
        return unknown_option(options[0], next(iter(following), None), known_keys(CONF))
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    first = [word for word in words if word not in overrides]
    told = " ".join(map(shell_word, [*first, *overrides]))
    return f"{one_line(others[0])}: options stand before overrides; allowed is {program()} {told}"


def _end(*_: object) -> None:
    """End this process before it has done anything; of several processes the first one says so."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        show("interrupted")
    os._exit(INTERRUPTED)
