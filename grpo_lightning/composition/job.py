"""One job of the command line: its settings are checked, then it runs in a process of its own and is accounted for."""

import faulthandler
import gc
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from grpo_lightning.composition import CONF, supervised, sweep
from grpo_lightning.composition.overrides import chosen, made, plain, write_settings
from grpo_lightning.config import ConfigError, check_config, describe_sizes
from grpo_lightning.config.redaction import redact_overrides
from grpo_lightning.distributed import signals
from grpo_lightning.distributed.devices import is_first_process
from grpo_lightning.output import activity, announcement
from grpo_lightning.output.summary import now
from grpo_lightning.output.terminal import last_through_closed_pipes, say, sentence, show

log = logging.getLogger(__name__)
_opened: list[str] = []
"""The directories of the jobs of this process that have said what they are to do."""


class JobFailed(CompactHydraException):
    """A job of a sweep failed; the message is one sentence, which Hydra prints when the others have run, too."""


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def _hydra_job(cfg: DictConfig) -> float:
    last_through_closed_pipes()
    given: Any = HydraConfig.get()
    directory = Path(given.runtime.output_dir)
    is_sweep = given.mode == RunMode.MULTIRUN
    words: Any = OmegaConf.to_container(given.overrides, resolve=False)
    overrides = words["task"]
    try:
        before = sweep.recorded(directory, overrides) if is_sweep and cfg.mode == "fit" else None
        if before and (directory / "checkpoints" / "last.ckpt").exists():
            OmegaConf.update(cfg, "checkpoint", "last")
        config = plain(cfg)
        check_config(config)
    except Exception as error:
        if is_sweep:
            sweep.fail(directory, overrides, sentence(error))
        return _failed(error, directory, is_sweep)
    if before and sweep.is_done(before, config["steps"]):
        return sweep.skip(before, config["sweep_metric"])
    if before and before.status != "running":
        where = "from its last checkpoint" if config["checkpoint"] == "last" else "from its beginning"
        show(f"{directory}: {before.status}, goes on {where}")

    choices = chosen([*words["hydra"], *overrides], config, name=given.job.config_name)  # hydra.searchpath among them
    if is_first_process():
        _open(choices, words, config, given.job.config_name)
        if cfg.trainer.get("precision") is None and config["trainer"]["precision"] == "bf16-mixed":
            say("trainer.precision=bf16-mixed, the default on a GPU; 32-true computes in float32")

    def execute() -> float:
        activity.note(started=now(), choices=choices)
        _load()
        run = made(
            cfg,
            overrides=overrides,
            choices=choices,
            directory_given=any(word.startswith(("hydra.run.dir=", "hydra.sweep.dir=")) for word in words["hydra"])
            or before is not None,
            multirun=is_sweep,
            on_start=lambda place: write_settings(cfg, overrides, place, hydra=given),
        )
        return run.execute()

    if not supervised.is_possible():
        return _accounted(execute, directory, is_sweep)
    if is_sweep:
        _load_once()
    try:
        status, facts = supervised.supervised(lambda: _accounted(execute, directory, is_sweep=False))
    except supervised.Crash as crash:
        if config["mode"] == "fit":
            supervised.write_summary(directory, activity.noted(), crash, overrides=redact_overrides(overrides))
        return _failed(crash, directory, is_sweep)
    if status == 1 and is_sweep:
        raise JobFailed(facts.get("error", "the job failed"))
    if status:
        sys.exit(status)
    return float(facts.get("value", -sys.float_info.max))


def _open(choices: dict[str, str | list[str]], words: dict[str, list[str]], config: dict[str, Any], name: str) -> None:
    """Say what was chosen, before anything takes time; of a sweep's further jobs Hydra says what they differ in."""
    if _opened:
        lines = [f"directory: {config['run_dir']}"]
    else:
        defaults, arithmetic = chosen(words["hydra"], name=name), describe_sizes(config)
        lines = [announcement.greeting(config)]
        lines += announcement.opening(choices, defaults, words["task"], config, arithmetic)
    _opened.append(config["run_dir"])
    for line in lines:
        say(line)


def job() -> None:
    """Compose what the command line says, and run it, or each job of a sweep.

    Raises:
        SystemExit: With 1 after a failure, 130 after Ctrl-C, 143 after SIGTERM.
    """
    status: Any = 1
    try:
        _hydra_job()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        status = sweep.close(status)
    if status:
        sys.exit(status)


def _accounted(execute: Callable[[], float], directory: Path, is_sweep: bool) -> float:
    """Execute in this process, and note the result, or what went wrong; after a crash the log file says where."""
    with suppress(OSError):
        faulthandler.enable((directory / "train.log").open("a", encoding="utf-8"))
    try:
        with signals.listening():
            value = execute()
            activity.note(value=value)
            return value
    except signals.Preempted as error:  # before there is a run
        if os.environ.get("LOCAL_RANK", "0") == "0":
            say(str(error))
        sys.exit(error.exit_status)
    except Exception as error:
        activity.note(error=sentence(error))
        return _failed(error, directory, is_sweep)


def _failed(error: Exception, directory: Path, is_sweep: bool) -> float:
    """Say what went wrong, here in a sentence and in the log file with its traceback, and end the job."""
    file = directory / "train.log"
    where = "" if isinstance(error, ConfigError) or not file.exists() else f" (traceback: {file})"
    log.error("%s%s", sentence(error), where, exc_info=error)
    if is_sweep:
        raise JobFailed(sentence(error)) from None
    sys.exit(1)


def _load() -> None:
    """Import what a run needs; nothing of it is ever garbage, in which Python would look for some meanwhile."""
    gc.disable()
    try:
        with signals.importing():
            from grpo_lightning import run  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def _load_once() -> None:
    """Import what every job of a sweep needs, unless a GPU's library could be set up by it, which no fork survives."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        _load()
