"""The directories that Hydra and its plug-ins make for a run, for a sweep, and for the exchange with their jobs."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_lightning.output.shell import shell_word
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings import ConfigError
from grpo_lightning.settings.given import is_whole
from grpo_lightning.settings.places import entry_problem, is_of_programs, unwritable
from grpo_lightning.start import settings_from

_PLACES = ("hydra.sweep.dir", "hydra.run.dir")
_OF_RUN = ("hydra.run.dir=", "run_dir=")
_BEFORE_NUMBERS = re.compile(r"(?:\$\{[^{}]*\}|[^%])*")
"""What of submitit's folder is the same for all jobs, before what stands for a job's number, such as %j."""


def without_effect(composed: DictConfig, overrides: Sequence[str]) -> str | None:
    """What is wrong where the directory of a run is named for a sweep, or the other way around: Hydra passes it by."""
    is_sweep = composed.hydra.mode == RunMode.MULTIRUN
    other, own = _PLACES[::-1] if is_sweep else _PLACES
    for key, _, value in (word.partition("=") for word in overrides):
        if key.lstrip("+") == other:
            word = shell_word(f"{own}={value}")
            return f"{key}={value}: has no effect {'with' if is_sweep else 'without'} -m; allowed is {word}"
    return None


def no_place(composed: DictConfig) -> str | None:
    """Why the directory that Hydra makes for a run or sweep cannot be made, or must not be written to."""
    key = _PLACES[composed.hydra.mode != RunMode.MULTIRUN]
    with suppress(OmegaConfBaseException):
        place = str(OmegaConf.select(composed, key))
        return unwritable(key, place) or (entry_problem(Path(place)) if key == "hydra.run.dir" else None)
    return None


def no_place_of_job(composed: DictConfig) -> str | None:
    """Why the directory that Hydra makes for a job of a sweep must not be written to."""
    with suppress(OmegaConfBaseException):
        place = Path(str(composed.hydra.sweep.dir), str(composed.hydra.sweep.subdir))
        if is_of_programs(place):
            return one_line(f"hydra.sweep.subdir={place}: programs may run what is put there; allowed is another")
    return None


def link_of_sweep(composed: DictConfig) -> str | None:
    """What is wrong with a sweep's directory, in which Hydra and its plug-ins write through links."""
    if composed.hydra.mode != RunMode.MULTIRUN:
        return None
    with suppress(OmegaConfBaseException):  # such as ${hydra.job.num}, which no sweep as a whole has
        problem = entry_problem(Path(composed.hydra.sweep.dir), "optimization_results.yaml", ".submitit")
        return problem and problem.replace("hydra.run.dir=", "hydra.sweep.dir=", 1)
    return None


def use_new_folder(composed: DictConfig) -> None:
    """Let submitit exchange its pickles in a folder that nobody can have put others into before."""
    launcher: Any = OmegaConf.to_container(composed.hydra.launcher, resolve=False)
    if (folder := launcher.get("submitit_folder")) is not None and (begins := _BEFORE_NUMBERS.match(str(folder))):
        between = "/" if begins[0] == str(folder) else ""
        composed.hydra.launcher.submitit_folder = f"{begins[0]}{between}{token_hex(8)}/%j"


def without_directory(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Overrides without those of the run directory, and what the last of these says; None without one."""
    named = [word for word in words if word.lstrip("+").startswith(_OF_RUN)]
    return [word for word in words if word not in named], named[-1].partition("=")[2] if named else None


def check_directory(place: str) -> None:
    """Refuse a run directory of which settings that are brought along would say a part.

    Raises:
        ConfigError: It is one.
    """
    if settings_from() and not is_whole(place):
        places = ", ".join(settings_from())
        raise ConfigError(
            [f"run_dir={place}: allowed in ${{…}} are now:, oc.env:NAME and the like, as settings come from {places}"]
        )
