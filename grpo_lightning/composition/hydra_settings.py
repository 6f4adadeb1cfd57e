"""What Hydra's own settings must not do: run code other than Hydra's, or write where it should not."""

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import is_dataclass
from typing import Any

from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_lightning.composition.file_rules import leaves_of
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings import trust
from grpo_lightning.settings.given import is_whole
from grpo_lightning.start import place, settings_from

_LOG_CLASSES = (
    *("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "logging.Formatter"),
    *("logging.handlers.RotatingFileHandler", "logging.handlers.TimedRotatingFileHandler"),
    *("colorlog.ColoredFormatter", "grpo_lightning.output.terminal.TerminalFormatter"),
    *("grpo_lightning.output.terminal.FileFormatter", "grpo_lightning.output.terminal.TerminalHandler"),
    "grpo_lightning.output.terminal.unseen",
)
_LOG_OBJECTS = ("ext://sys.stdout", "ext://sys.stderr")
BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_MEMBERS = (
    BASIC_LAUNCHER,
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "grpo_lightning.composition.sweep.Note",
    *("hydra.experimental.callbacks.LogJobReturnCallback", "hydra.experimental.callbacks.PickleJobInfoCallback"),
)
_PLUGINS = {
    re.compile(
        r"hydra_plugins\.hydra_(joblib_launcher\.joblib_launcher\.Joblib|submitit_launcher\.submitit_launcher\.(Local|Slurm))"
        r"Launcher"
    ): re.compile(r"hydra\.launcher\._target_"),
    re.compile(r"hydra_plugins\.hydra_optuna_sweeper\.optuna_sweeper\.OptunaSweeper"): re.compile(
        r"hydra\.sweeper\._target_"
    ),
    re.compile(r"optuna\.samplers\.[A-Z]\w*Sampler"): re.compile(r"hydra\.sweeper\..*\._target_"),
}
"""Class of a plug-in -> the key at which its settings are looked at; elsewhere they could import what they name.

Others start jobs as they like: Ray's processes have the working directory on their path, whatever lies there.
"""
_ENVIRONMENT = re.compile(
    r"(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|GLOO_SOCKET_IFNAME|TZ"
    r"|NCCL_(DEBUG|P2P_DISABLE|IB_DISABLE|SHM_DISABLE|SOCKET_IFNAME|IB_HCA|IB_TIMEOUT|NTHREADS)"
    r"|TOKENIZERS_PARALLELISM|HF_HUB_OFFLINE|WANDB_MODE"
)
_ENDS, _ODD = re.compile(r"[\n\r]"), re.compile(r"[\n\r\"'\\]|packjob", re.IGNORECASE)
_WITHOUT = "without quotes, backslashes and 'packjob'"
"""What is odd in the scripts of jobs: SLURM takes a backslash between single quotes for an escape, as no shell does,
and at its word for several jobs in one it writes beyond its memory."""
_LOGS = ("job_logging", "hydra_logging")
_MADE = ("callbacks", "launcher", "sweeper", *_LOGS)
"""What Hydra makes objects of."""
_TEXTS = r"runtime\.(output_dir|cwd)|job\.(name|num|id)|run\.dir|sweep\.(dir|subdir)"
"""Keys of Hydra's that can hold nothing but texts and numbers."""
_TIME = r"now:(?:%[A-Za-mo-su-z]|[\w.:-])*"
_TEXTS_OF_LOGS = r"runtime\.(output_dir|cwd)|job\.(name|num)"
_PLAIN, _PLAIN_OF_LOGS = (
    re.compile(rf"(?<!\\)\$\{{\s*(?:hydra\.(?:{texts})|{_TIME}{variables})\}}")
    for texts, variables in ((_TEXTS, r"|oc\.env:\w+"), (_TEXTS_OF_LOGS, ""))
)
_LOG_FILE = re.compile(r"\$\{hydra\.runtime\.output_dir\}/(\$\{hydra\.job\.name\}|[\w-]+)\.log")
_JOB_NAME = re.compile(r"[\w.-]+")
_SBATCH = (
    *("account", "clusters", "comment", "constraint", "exclude"),
    *("gres", "licenses", "nodelist", "qos", "reservation"),
)
"""Options of sbatch that change where a job runs, not what."""
only_composes: ContextVar[bool] = ContextVar("only_composes", default=False)
"""Whether settings are composed and Hydra runs nothing of its own: they may be those of a stranger's run."""


_OF_JOB = {f"hydra.job.{name}" for name in ("name", "num", "id", "config_name")}
"""What the directories of a run may be named by; ``override_dirname`` is told without ``${``."""


def problems(hydra: Any) -> list[str]:
    """What is wrong with Hydra's own settings.

    Args:
        hydra: The settings below ``hydra.``, not resolved.
    """
    found = []
    for key, name in trust.targets(hydra, "hydra"):
        is_own = isinstance(name, str) and trust.is_of_user(name.partition(".")[0])
        if not _may_run(key, name):
            found.append(
                trust.beside_brought(key, name)
                if is_own and settings_from()
                else f"{key}={name}: allowed are Hydra's own, the launchers joblib, submitit_local and submitit_slurm, "
                f"the sweeper optuna, a sampler of Optuna's in it, and what is defined in {trust.OWN_FILES}"
            )
    for key, value in leaves_of(hydra, "hydra"):
        part = key.partition(".")[2].partition(".")[0]
        if part in _LOGS:
            found += _log_problems(key, value)
        elif str(value).startswith(("ext://", "cfg://")) and str(value) not in _LOG_OBJECTS:
            found.append(f"{key}={value}: allowed are {', '.join(_LOG_OBJECTS)}")
        plain = _PLAIN_OF_LOGS if part in _LOGS else _PLAIN
        if part in _MADE and len(plain.findall(str(value))) < str(value).count("${"):
            variables = "" if part in _LOGS else ", oc.env:NAME"  # which every line of a log would show
            found.append(f"{key}={value}: allowed are now:{variables} and plain texts of hydra. in ${{…}}")
        elif (part in ("run", "sweep") or key in _OF_JOB) and settings_from() and not is_whole(str(value)):
            found.append(
                f"{key}={value}: allowed in ${{…}} are now:, oc.env:NAME, hydra.job.override_dirname and the like, as "
                f"settings come from {', '.join(settings_from())}"
            )
        elif part in _LOGS and _may_become_module(key, str(value)):
            found.append(
                f"{key}={value}: allowed with ${{…}} are texts that begin with another sign than a small letter"
            )
    for part in _LOGS:
        for name, handler in _mapping(_mapping(hydra.get(part)).get("handlers")).items():
            if "filename" in _mapping(handler) and "delay" not in handler:
                found.append(f"hydra.{part}.handlers.{name}.delay: allowed is true")
    found += _plugin_problems(_mapping(hydra.get("sweeper")), _mapping(hydra.get("launcher")))
    found += _job_problems(_mapping(hydra.get("job")))
    if hydra.get("output_subdir") is not None:
        found.append(
            f"hydra.output_subdir={hydra['output_subdir']}: allowed is null; the settings are written to .hydra, "
            "without secrets"
        )
    return found


def foreign_parts(composed: DictConfig) -> list[str]:
    """What stands in the place of a part of Hydra's own settings, where `problems` would look for its keys in vain.

    Args:
        composed: The settings as a whole, not resolved.
    """
    return list(_foreign(composed, OmegaConf.create({"hydra": HydraConf}), ""))


def _foreign(given: DictConfig, known: DictConfig, prefix: str) -> Iterator[str]:
    """The parts that are a ``${…}``, or no longer of Hydra's types, by which numbers and texts are no mappings."""
    texts: Any = OmegaConf.to_container(given, resolve=False)
    for name in [str(name) for name in given if name in list(known)]:
        key, kind = prefix + name, OmegaConf.get_type(known, name)
        if not OmegaConf.is_config(known._get_node(name)):
            continue
        if OmegaConf.is_interpolation(given, name):
            yield f"{key}={texts[name]}: allowed are values of its own, and ${{…}} in them"
        elif is_dataclass(kind):
            if OmegaConf.get_type(given, name) is kind:
                yield from _foreign(given[name], known[name], f"{key}.")
            else:
                yield f"{key}: allowed are values for keys in it; it cannot be taken away or replaced as a whole"


def _may_become_module(key: str, text: str) -> bool:
    """Whether what a text is put together to could begin with ext://, which logging would import a module for."""
    is_file = key.endswith(".filename")  # has a rule of its own
    return "${" in text and re.match(r"[a-z$\\]", text) is not None and not is_file


def _log_problems(key: str, value: Any) -> Iterator[str]:
    """What is wrong with one value of what Python's logging is set up by."""
    text, name = str(value), key.rpartition(".")[2]
    if name in ("()", "class", "factory"):
        if text not in _LOG_CLASSES:
            yield f"{key}={value}: allowed are {', '.join(_LOG_CLASSES)}"
    elif text.startswith(("ext://", "cfg://")) and text not in _LOG_OBJECTS:
        yield f"{key}={value}: allowed are {', '.join(_LOG_OBJECTS)}"
    is_file = name == "filename" and key.startswith("hydra.job_logging.")  # others are set up before there is a place
    if name == "filename" and not (is_file and _LOG_FILE.fullmatch(text)):
        yield f"{key}={value}: allowed is ${{hydra.runtime.output_dir}}/NAME.log, in hydra.job_logging"
    if name == "mode" and text != "a":
        yield f"{key}={value}: allowed is a"
    if name == "delay" and value is not True:
        yield f"{key}={value}: allowed is true: a file is opened once it is known not to be a link"
    if ".." in key:
        yield f"{key}: allowed are keys without dots, which would set attributes of handlers"


def _job_problems(job: Mapping[str, Any]) -> Iterator[str]:
    """What would make processes load code, or files be taken for modules or lines of a script."""
    for part in ("env_set", "env_copy"):
        for name in job.get(part) or ():
            if not _ENVIRONMENT.fullmatch(str(name)):
                yield f"hydra.job.{part}: {name} is not allowed: it may make programs load code; set it outside"
    if job.get("chdir"):
        yield "hydra.job.chdir: allowed is false: files of the run directory would be taken for modules"
    if not _JOB_NAME.fullmatch(str(job.get("name", "train"))):
        yield f"hydra.job.name={job['name']}: allowed are letters, digits, '-', '_' and '.'"


def _plugin_problems(sweeper: Mapping[str, Any], launcher: Mapping[str, Any]) -> Iterator[str]:
    """What plug-ins would run that is no ``_target_``, and a search in the wrong direction."""
    if (space := sweeper.get("custom_search_space")) is not None and not _may_run("custom_search_space", space):
        yield (f"hydra.sweeper.custom_search_space={space}: allowed is a function in {trust.OWN_FILES}")
    if "direction" in sweeper and getattr(direction := sweeper["direction"], "name", direction) != "maximize":
        yield (
            f"hydra.sweeper.direction={getattr(direction, 'name', direction)}: allowed is maximize, as sweep_metric "
            "is; sweep=optuna sets it"
        )
    if sweeper.get("storage") is not None:
        yield "hydra.sweeper.storage: allowed is null: samplers read objects from a study, which may run code"
    for name in launcher.get("additional_parameters") or ():
        if name not in _SBATCH:
            yield f"hydra.launcher.additional_parameters.{name}: allowed are {', '.join(_SBATCH)}"
    if launcher.get("setup"):
        yield "hydra.launcher.setup: allowed is null: its commands would be run by a shell; run them before the sweep"
    for part, node in (("launcher", launcher), ("sweeper", sweeper)):
        if "_args_" in node:
            yield f"hydra.{part}._args_: allowed are arguments by name, as rules look for them"
        known = _keys_of(part, node.get("_target_"))
        for name in node if known else ():
            if name not in known:
                yield f"hydra.{part}.{name}: allowed are {', '.join(sorted(known - {'_target_'}))}"
    yield from _line_problems(launcher)


def script_problems(launcher: DictConfig) -> list[str]:
    """What would add lines and options to the script of a job, whatever the texts are put together of.

    Args:
        launcher: The settings below ``hydra.launcher``.
    """
    is_slurm = "setup" in launcher
    if is_slurm and _ODD.search(here := str(place())):  # plug-ins name files from the root
        return [
            f"{one_line(here)}: SLURM's scripts hold this name; allowed is a start where it has one line, {_WITHOUT}"
        ]
    try:
        return list(_line_problems(OmegaConf.to_container(launcher, resolve=True), _ODD if is_slurm else _ENDS))
    except OmegaConfBaseException:  # Hydra, which reads them in the same way, makes no launcher of them
        return []


def _line_problems(launcher: Any, odd: re.Pattern[str] = _ENDS) -> Iterator[str]:
    for key, value in leaves_of(launcher, "hydra.launcher"):
        if isinstance(value, str) and odd.search(value):
            also = "" if odd == _ENDS else f", {_WITHOUT}"
            yield f"{key}: allowed are texts of one line{also}, which cannot add to a script"


def _keys_of(part: str, target: Any) -> set[str]:
    """The settings that a plug-in has of its own; others it hands on, as what starts processes in other ways."""
    found: set[str] = set()
    Plugins.instance()  # each says what its settings are when it is found
    for name in ConfigStore.instance().list(f"hydra/{part}"):
        if name.endswith(".yaml"):
            node = ConfigStore.instance().load(f"hydra/{part}/{name}").node
            found |= {str(key) for key in node} if node.get("_target_") == target else set()
    return found - {"defaults"}


def _may_run(key: str, name: Any) -> bool:
    """Whether Hydra may make an object of what a path leads to.

    Args:
        key: Where the path stands.
        name: The path.
    """
    if not isinstance(name, str) or name in _MEMBERS:
        return isinstance(name, str)
    if trust.is_of_user(name.partition(".")[0]):
        if only_composes.get():
            return True
        with suppress(Exception):  # importing a user's file may raise anything
            return callable(trust.resolved(name))
        return False
    if not any(known.fullmatch(name) and place.fullmatch(key) for known, place in _PLUGINS.items()):
        return False
    with suppress(ImportError):
        module, _, member = name.rpartition(".")
        found = getattr(importlib.import_module(module), member, None)
        return inspect.isclass(found) and found.__module__.startswith(("hydra_plugins.", "optuna."))
    return False


def _mapping(value: Any) -> Mapping[str, Any]:
    """The value, if it is a mapping; what stands in the place of one is refused as a text."""
    return value if isinstance(value, Mapping) else {}
