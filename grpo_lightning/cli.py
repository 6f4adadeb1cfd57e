"""Command line ``train.py KEY=VALUE …``: from its words to an exit status."""

import argparse
import faulthandler
import gc
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import CompactHydraException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_lightning import __version__, sweep
from grpo_lightning.composition import (
    CONF,
    announce_import,
    build_run,
    compose_config,
    continued_overrides,
    experiment_note,
    explain_errors,
    new_directory,
    resolve_config,
    to_dict,
    write_settings,
)
from grpo_lightning.config import ConfigError, check_config, describe_sizes, targets
from grpo_lightning.config.settings import (
    command_name,
    compose_problems,
    format_override,
    normalize_overrides,
    quote_value,
)
from grpo_lightning.console import (
    describe_error,
    is_first_process,
    log_line,
    print_line,
    redact,
    single_line,
    start_banner,
)
from grpo_lightning.distributed import signals

log = logging.getLogger(__name__)

_taken: list[str] = []
"""The word that names the run directory which this process has chosen."""
_LOG_CLASSES = (
    *("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "logging.Formatter", "logging.Filter"),
    *("logging.handlers", "colorlog", "grpo_lightning.console"),
)


_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
"""Variables with which a user says how OpenMP's threads wait for one another, or that there is only one."""
_SPINS_QUIET, _SPINS_BUSY = 1500, 100
"""Rounds that a thread spins before it sleeps, by measurements in benchmarks/README.md; OpenMP's own are 300,000."""


class JobFailed(CompactHydraException):
    """A job of a sweep failed; the message is one sentence, which Hydra prints when the others have run, too."""


def main() -> None:
    """Train, validate, export or preflight, or each job of a sweep, as the command line says.

    Raises:
        SystemExit: With 1 after a failure, 130 after Ctrl-C, 143 after SIGTERM.
    """
    faulthandler.enable()  # a crash in C code prints where it was
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # rewards of one's own lie there, as beside any script
    if "--version" in sys.argv:
        print(f"grpo-lightning {__version__}")
        return
    words = [word if word != "--help-all" else "--cfg=job" for word in sys.argv[1:]]
    sys.argv[1:] = normalize_overrides(words, CONF)
    asked, unread = get_args_parser().parse_known_args()
    if unread:
        sys.exit(f"{single_line(unread[0])}: settings are KEY=VALUE, without dashes; {command_name()} --help")
    if asked.config_dir:
        sys.path.append(str(Path(asked.config_dir).absolute()))  # and beside a recipe
    options = [word for word in sys.argv[1:] if word not in asked.overrides]
    asked.overrides = asked.overrides if asked.multirun else _continued(asked.overrides)
    sys.argv[1:] = [*options, *asked.overrides]  # so that further overrides may follow
    status = 1
    try:
        with signals.exit_on_signal():  # until a run listens itself, a signal has nothing to save
            if asked.help or asked.hydra_help or asked.shell_completion or asked.info or asked.experimental_rerun:
                cfg = None
            else:
                cfg = _check_composition(asked)
            if cfg is not None and asked.cfg == "job" and asked.package is None:
                _print_config(asked)
            else:
                if cfg is not None and asked.cfg is None and is_first_process():
                    _take_directory(cfg)
                hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(_run_job)()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        status = sweep.print_table(status)
    if status:
        sys.exit(status)


def _cpu_seconds() -> tuple[float, float, float]:
    """The time, the CPU seconds that this machine has spent, and those of this process; the machine's 0 if unknown."""
    machine = 0.0
    with suppress(OSError, ValueError):
        ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
        machine = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # but idle ones
    return time.monotonic(), machine, time.process_time()


_BEGAN = _cpu_seconds()


def _limit_spinning() -> None:
    """Let OpenMP's threads sleep soon when they wait, where the user has chosen nothing; before torch is loaded.

    A spinning thread is the fastest to go on, but takes its core from the threads it waits for once other programs
    need it. How busy they are is measured since this process began. No result depends on it.
    """
    if "torch" in sys.modules or any(name in os.environ for name in _WAITING):
        return
    seconds, machine, own = (now - then for now, then in zip(_cpu_seconds(), _BEGAN, strict=True))
    is_busy = machine - own > 0.5 * seconds
    os.environ["GOMP_SPINCOUNT"] = str(_SPINS_BUSY if is_busy else _SPINS_QUIET)
    message = "GOMP_SPINCOUNT=%s, as other programs %s: threads of OpenMP that wait sleep soon"
    state = "keep this machine busy" if is_busy else "leave this machine alone"
    log.info(message, os.environ["GOMP_SPINCOUNT"], state, extra={"printed": True})  # in the file only


def _continued(overrides: list[str]) -> list[str]:
    """The overrides, and with checkpoint=last those of the run in the directory that they name."""
    named = [word for word in overrides if word.startswith("hydra.run.dir=")]
    if not named or "checkpoint=last" not in overrides:
        return overrides
    with suppress(HydraException):  # which Hydra explains
        directory = OverridesParser.create().parse_override(named[-1]).value()
        return continued_overrides(overrides, Path(str(directory)))
    return overrides


def _take_directory(cfg: DictConfig) -> None:
    """Make a directory that no other run or sweep has, where a time names it."""
    kind = "sweep" if cfg.hydra.mode == RunMode.MULTIRUN else "run"
    if "${now:" in to_dict(cfg)["hydra"][kind]["dir"]:
        _taken.append(f"hydra.{kind}.dir={quote_value(str(new_directory(cfg.hydra[kind].dir)))}")
        sys.argv.append(_taken[-1])


def _sources(asked: argparse.Namespace) -> tuple[str, str, list[str]]:
    """The directory and the name of the file that is composed, and --config-dir as an override."""
    paths = []
    if asked.config_dir:
        typed = [word for word in asked.overrides if word.startswith("hydra.searchpath=[")]
        others = typed[-1].partition("=[")[2].removesuffix("]") if typed else ""
        paths = [f"hydra.searchpath=['file://{Path(asked.config_dir).absolute()}'{',' if others else ''}{others}]"]
    return str(Path(asked.config_path or CONF).absolute()), asked.config_name or "train", paths


def _print_config(asked: argparse.Namespace) -> None:
    """Print the settings of a run as YAML: what the command chooses wins over an experiment there."""
    directory, name, paths = _sources(asked)
    with initialize_config_dir(directory, version_base="1.3", job_name="train"):
        cfg, _ = compose_config([*asked.overrides, *paths], name)
    if asked.resolve:
        cfg.run_dir = "???"
    print(OmegaConf.to_yaml(cfg, resolve=asked.resolve), end="")


def _check_composition(asked: argparse.Namespace) -> DictConfig:
    """Compose once before Hydra does, to exit with a sentence about what is wrong, or what Hydra may not build."""
    directory, name, paths = _sources(asked)

    def load(overrides: list[str]) -> DictConfig:
        with initialize_config_dir(directory, version_base="1.3", job_name="train"):
            loader, words = GlobalHydra.instance().config_loader(), [*overrides, *paths]
            return loader.load_configuration(name, words, run_mode=RunMode.MULTIRUN, validate_sweep_overrides=False)

    try:
        cfg = load(asked.overrides)
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(redact("\n".join(compose_problems(error, CONF, asked.overrides, load))))
    if asked.multirun:
        cfg.hydra.mode = RunMode.MULTIRUN
    is_sweep = cfg.hydra.mode == RunMode.MULTIRUN
    used, unused = ("hydra.sweep.dir", "hydra.run.dir") if is_sweep else ("hydra.run.dir", "hydra.sweep.dir")
    wrong = _hydra_target_problems(cfg)
    if is_sweep:
        wrong += sweep.objective_problems(asked.overrides, str(cfg.sweep_metric))
    for key, _, value in (word.lstrip("+").partition("=") for word in asked.overrides):
        if key == unused:
            mode = "with -m" if is_sweep else "without -m"
            wrong.append(f"{key}={value}: it has no effect {mode}; use {format_override(used, value)}")
    if wrong:
        sys.exit(redact("the settings cannot work:\n" + "\n".join(f"  {problem}" for problem in wrong)))
    return cfg


def _hydra_target_problems(cfg: DictConfig) -> list[str]:
    """What is wrong with the code that Hydra's own settings name: it is run before a job's settings are checked."""
    wrong = []
    config: Any = OmegaConf.to_container(cfg, resolve=False)
    parts, trusted = config["hydra"], targets.trusted_packages(config)
    allowed = (*targets.ALLOWED_TARGETS, *targets.HYDRA_TARGETS, *_LOG_CLASSES)
    for part in ("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging"):
        for key, name in targets.find_targets(parts[part], f"hydra.{part}", ("_target_", "()", "class", "factory")):
            try:
                targets.import_target(name, trusted, allowed)
            except ValueError as error:
                wrong.append(f"{key}={name}: {error}")
    if str(parts["sweeper"].get("direction")).lower().endswith("minimize"):
        wrong.append("hydra.sweeper.direction=minimize: use maximize, as sweep_metric is")
    return wrong


def _import_run() -> None:
    """Import what a run needs; nothing of it is ever garbage, which Python would look for all the time."""
    announce_import()
    gc.disable()
    try:
        from grpo_lightning import run  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def _run_job(_: DictConfig) -> float:
    """One job: its settings are checked, and then it runs."""
    hydra_config: Any = HydraConfig.get()
    is_sweep = hydra_config.mode == RunMode.MULTIRUN
    directory = Path(hydra_config.runtime.output_dir)
    words: Any = OmegaConf.to_container(hydra_config.overrides, resolve=False)
    named = [word for word in words["hydra"] if word.startswith(("hydra.run.dir=", "hydra.sweep.dir="))]
    is_named = any(word not in _taken for word in named)
    overrides = words["task"]
    gc.collect()  # what an earlier job of a sweep has left on the device
    try:
        with explain_errors(overrides):
            paths = [word for word in words["hydra"] if word.startswith("hydra.searchpath=")]
            cfg, choices = compose_config([*paths, *overrides], hydra_config.job.config_name)
        before = sweep.find_job(directory, overrides) if is_sweep and cfg.mode == "fit" else None
        if before and (directory / "checkpoints" / "last.ckpt").exists():
            cfg.checkpoint = "last"
        config = resolve_config(cfg)
        check_config(config)
        if before and sweep.is_finished(before, config["steps"]):
            return sweep.skip(before, config["sweep_metric"])
        if before and before.status != "running":
            where = "from its last checkpoint" if config["checkpoint"] == "last" else "from its beginning"
            print_line(f"{directory}: {before.status}, goes on {where}")
        if is_first_process():
            if is_sweep and hydra_config.job.num > 0:  # Hydra says what it differs in from the first one
                log_line(f"directory: {config['run_dir']}")
            else:
                for line in start_banner(config, overrides, choices, describe_sizes(config)):
                    log_line(line)
                for line in experiment_note(choices.get("experiment")):
                    log_line(line)
            if cfg.trainer.get("precision") is None and config["trainer"]["precision"] == "bf16-mixed":
                log_line("trainer.precision=bf16-mixed, the default on a GPU; 32-true computes in float32")
        _limit_spinning()
        _import_run()
        run = build_run(
            cfg,
            overrides=overrides,
            choices=choices,
            directory_given=is_named or before is not None,
            multirun=is_sweep,
            on_start=lambda place: write_settings(cfg, overrides, place),
        )
        return run.execute()
    except Exception as error:
        if is_sweep:
            sweep.write_failure(directory, overrides, describe_error(error))
        file = directory / "train.log"
        where = "" if isinstance(error, ConfigError) or not file.exists() else f" (traceback: {file})"
        log.error("%s%s", describe_error(error), where, exc_info=error)
        if is_sweep:
            raise JobFailed(describe_error(error)) from None
        sys.exit(1)
