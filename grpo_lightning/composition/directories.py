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
from grpo_lightning.settings.places import entry_problem, unwritable

_PLACES = ("hydra.sweep.dir", "hydra.run.dir")
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
    """Why the directory that Hydra makes for a run or sweep cannot be made, or not be written to."""
    key = _PLACES[composed.hydra.mode != RunMode.MULTIRUN]
    with suppress(OmegaConfBaseException):
        return unwritable(key, str(OmegaConf.select(composed, key)))
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
