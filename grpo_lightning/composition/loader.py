"""What Hydra itself would run is checked as soon as it has read it, before it logs, calls back or sweeps."""

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from secrets import token_hex
from typing import Any

from hydra._internal import hydra as hydra_internal
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from grpo_lightning.composition import CONF
from grpo_lightning.composition.environment import remember_secrets
from grpo_lightning.composition.job_name import job_name
from grpo_lightning.distributed import fresh
from grpo_lightning.output import redaction
from grpo_lightning.output.files import replace
from grpo_lightning.settings import trust
from grpo_lightning.settings.places import link_problem
from grpo_lightning.settings.suggestions import explain, known_keys

_LOG_CLASSES = (
    *("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "logging.Formatter"),
    *("logging.handlers.RotatingFileHandler", "logging.handlers.TimedRotatingFileHandler"),
    *("colorlog.ColoredFormatter", "grpo_lightning.output.terminal.TerminalFormatter"),
    *("grpo_lightning.output.terminal.FileFormatter", "grpo_lightning.output.terminal.TerminalHandler"),
    "grpo_lightning.output.terminal.unseen",
)
_LOG_OBJECTS = ("ext://sys.stdout", "ext://sys.stderr")
_MEMBERS = (
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "grpo_lightning.composition.sweep.Note",
    *("hydra.experimental.callbacks.LogJobReturnCallback", "hydra.experimental.callbacks.PickleJobInfoCallback"),
)
_PLUGIN = re.compile(r"hydra_plugins\.[a-z][\w.]*\.[A-Z]\w*|optuna\.samplers\.[A-Z]\w*Sampler")
_ENVIRONMENT = re.compile(
    r"(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|GLOO_SOCKET_IFNAME|TZ"
    r"|NCCL_(DEBUG|P2P_DISABLE|IB_DISABLE|SHM_DISABLE|SOCKET_IFNAME|IB_HCA|IB_TIMEOUT|NTHREADS)"
    r"|TOKENIZERS_PARALLELISM|HF_HUB_OFFLINE|WANDB_MODE"
)
_MADE = ("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging")
"""What Hydra makes objects of."""
_TEXTS = r"runtime\.(output_dir|cwd)|job\.(name|num|id)|run\.dir|sweep\.(dir|subdir)|verbose"
_TIME = r"now:(?:%[A-Za-mo-su-z]|[\w.:-])*"  # no line ends, no ext://
_TEXTS_OF_LOGS = r"runtime\.(output_dir|cwd)|job\.(name|num)"
"""Texts that a file cannot make begin with ext://, which logging would import a module for."""
_PLAIN, _PLAIN_OF_LOGS = (
    re.compile(rf"(?<!\\)\$\{{\s*(?:hydra\.(?:{texts})|{_TIME}|oc\.env:\w+)\}}") for texts in (_TEXTS, _TEXTS_OF_LOGS)
)
_LOG_FILE = re.compile(r"\$\{hydra\.runtime\.output_dir\}/(\$\{hydra\.job\.name\}|[\w-]+)\.log")
_PLACE = re.compile(r"(file://)?[^:]*")
_BEFORE_NUMBERS = re.compile(r"(?:\$\{[^{}]*\}|[^%])*")
"""What of submitit's folder is the same for all jobs, before what stands for a job's number, such as %j."""
_JOB_NAME = re.compile(r"[\w.-]+")
_SBATCH = (
    *("account", "clusters", "comment", "constraint", "exclude"),
    *("gres", "licenses", "nodelist", "qos", "reservation"),
)
"""Options of sbatch that change where a job runs, not what."""
_only_composes: ContextVar[bool] = ContextVar("only_composes", default=False)
"""Whether settings are composed and Hydra runs nothing of its own: they may be those of a stranger's run."""


class CheckedLoader(ConfigLoaderImpl):
    """Composes settings as Hydra does, and refuses those of its own that would run code."""

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """The composed settings.

        Raises:
            ConfigCompositionException: They cannot be composed, or Hydra's own part of them is refused; one text
                without a traceback.
        """
        redaction.remember_words(overrides)
        try:
            composed = super().load_configuration(
                config_name, overrides, run_mode, from_shell, validate_sweep_overrides
            )
        except HydraException as error:
            raise ConfigCompositionException(redaction.hide(explain(error, CONF, known_keys(CONF)))) from None
        if wrong := problems(OmegaConf.to_container(composed.hydra, resolve=False)):
            raise ConfigCompositionException(_listed(wrong))
        if linked := _link_of_sweep(composed):
            raise ConfigCompositionException(linked)
        if from_shell and composed.hydra.launcher.get("_target_") != _MEMBERS[0]:  # else no job is launched
            fresh.protect_jobs()
            _use_new_folder(composed)
        remember_secrets(composed)
        return composed

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """The settings of one job, whose ``hydra.job.override_dirname`` says what it differs in from the others."""
        _hide_in(Path(master_config.hydra.sweep.dir) / "multirun.yaml")  # before a job can be refused
        composed = super().load_sweep_config(master_config, sweep_overrides)
        job, words = composed.hydra.job, composed.hydra.overrides.task
        named = job.config.override_dirname
        asked = {word.partition("=")[0]: word for word in master_config.hydra.overrides.task}  # the last one counts
        common = [key for word in words if asked.get(key := word.partition("=")[0]) == word]
        with open_dict(composed):
            if len(common) < len(words):
                named.exclude_keys = [*named.exclude_keys, *common]
            job.override_dirname = job_name(words, hidden=named.exclude_keys)
        return composed

    def _process_config_searchpath(self, config_name: str | None, parsed_overrides: Any, repo: Any) -> None:
        """Refuse places of settings other than directories before they are looked into: packages would be imported."""
        primary = repo.load_config(config_path=config_name) if config_name else None
        listed = [OmegaConf.select(primary.config, "hydra.searchpath")] if primary else []
        listed += [word.value() for word in parsed_overrides if word.get_key_element() == "hydra.searchpath"]
        for place in (place for places in listed for place in places or ()):
            if not _PLACE.fullmatch(str(place)):
                raise ConfigCompositionException(
                    f"hydra.searchpath={place}: allowed are directories, file:///home/me/conf"
                )
        super()._process_config_searchpath(config_name, parsed_overrides, repo)


def install() -> None:
    """Let Hydra compose by `CheckedLoader`."""
    hydra_internal.ConfigLoaderImpl = CheckedLoader  # type: ignore[attr-defined]


@contextmanager
def installed() -> Iterator[None]:
    """Inside, Hydra composes by `CheckedLoader`; afterwards, in a program that has settings of its own, as before.

    Nothing of what Hydra's own settings name is run by composing, so nothing is imported for them either.
    """
    before, told = hydra_internal.ConfigLoaderImpl, _only_composes.set(True)  # type: ignore[attr-defined]
    install()
    try:
        yield
    finally:
        _only_composes.reset(told)
        hydra_internal.ConfigLoaderImpl = before  # type: ignore[attr-defined]


def _listed(wrong: Sequence[str]) -> str:
    return "the settings cannot work:\n" + "\n".join(f"  {one}" for one in wrong)


def problems(hydra: Any) -> list[str]:
    """What Hydra's own settings must not do: run code other than Hydra's."""
    found = []
    for key, name in trust.targets(hydra, "hydra"):
        if not _may_run(name):
            found.append(
                f"{key}={name}: allowed are Hydra's own, classes of hydra_plugins, Optuna's samplers, and what is "
                "defined in Python files below the directory where the program was started"
            )
    for key, value in _leaves(hydra, "hydra"):
        text = str(value)
        part, name = key.split(".")[1], key.rpartition(".")[2]
        if name == "()" or (part.endswith("_logging") and name in ("class", "factory")):
            if text not in _LOG_CLASSES:
                found.append(f"{key}={value}: allowed are {', '.join(_LOG_CLASSES)}")
        elif text.startswith(("ext://", "cfg://")) and text not in _LOG_OBJECTS:
            found.append(f"{key}={value}: allowed are {', '.join(_LOG_OBJECTS)}")
        if part.endswith("_logging") and name == "filename" and not _LOG_FILE.fullmatch(text):
            found.append(f"{key}={value}: allowed is ${{hydra.runtime.output_dir}}/NAME.log")
        if part.endswith("_logging") and name == "mode" and text != "a":
            found.append(f"{key}={value}: allowed is a")
        if part.endswith("_logging") and name == "delay" and value is not True:
            found.append(f"{key}={value}: allowed is true: a file is opened once it is known not to be a link")
        if part.endswith("_logging") and ".." in key:
            found.append(f"{key}: allowed are keys without dots, which would set attributes of handlers")
        plain = _PLAIN_OF_LOGS if part.endswith("_logging") else _PLAIN
        if part in _MADE and len(plain.findall(text)) < text.count("${"):
            found.append(f"{key}={value}: allowed are now:, oc.env:NAME and plain texts of hydra. in ${{…}}")
    for part in ("job_logging", "hydra_logging"):
        for name, handler in ((hydra.get(part) or {}).get("handlers") or {}).items():
            if isinstance(handler, Mapping) and "filename" in handler and "delay" not in handler:
                found.append(f"hydra.{part}.handlers.{name}.delay: allowed is true")
    found += _plugin_problems(hydra.get("sweeper") or {}, hydra.get("launcher") or {})
    for part in ("env_set", "env_copy"):
        for name in (hydra.get("job") or {}).get(part) or ():
            if not _ENVIRONMENT.fullmatch(str(name)):
                found.append(f"hydra.job.{part}: {name} is not allowed: it may make programs load code; set it outside")
    job = hydra.get("job") or {}
    if job.get("chdir"):
        found.append("hydra.job.chdir: allowed is false: files of the run directory would be taken for modules")
    if not _JOB_NAME.fullmatch(str(job.get("name", "train"))):
        found.append(f"hydra.job.name={job['name']}: allowed are letters, digits, '-', '_' and '.'")
    if hydra.get("output_subdir") is not None:
        found.append(
            f"hydra.output_subdir={hydra['output_subdir']}: allowed is null; the settings are written to .hydra, "
            "without secrets"
        )
    return found


def _plugin_problems(sweeper: Mapping[str, Any], launcher: Mapping[str, Any]) -> Iterator[str]:
    """What plug-ins would run that is no ``_target_``, and a search in the wrong direction."""
    if (space := sweeper.get("custom_search_space")) is not None and not _may_run(space):
        yield (
            f"hydra.sweeper.custom_search_space={space}: allowed is a function in Python files below the directory "
            "where the program was started"
        )
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
        known = _keys_of(part, node.get("_target_"))
        for name in node if known else ():
            if name not in known:
                yield f"hydra.{part}.{name}: allowed are {', '.join(sorted(known - {'_target_'}))}"
    for key, value in _leaves(launcher, "hydra.launcher"):
        if isinstance(value, str) and "\n" in value:
            yield f"{key}: allowed are texts of one line, which cannot add lines to a script"


def _link_of_sweep(composed: DictConfig) -> str | None:
    """What is wrong with a sweep's directory, in which Hydra and its plug-ins write through links."""
    with suppress(OmegaConfBaseException):  # such as ${hydra.job.num}, which no sweep as a whole has
        problem = link_problem(Path(composed.hydra.sweep.dir), "optimization_results.yaml", ".submitit")
        return problem and problem.replace("hydra.run.dir=", "hydra.sweep.dir=", 1)
    return None


def _hide_in(file: Path) -> None:
    """Take the secrets out of what Hydra has written of a sweep."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if (hidden := redaction.hide(text)) != text:
        replace(file, hidden, by=f".{file.name}")


def _use_new_folder(composed: DictConfig) -> None:
    """Let submitit exchange its pickles in a folder that nobody can have put others into before."""
    launcher: Any = OmegaConf.to_container(composed.hydra.launcher, resolve=False)
    if (folder := launcher.get("submitit_folder")) is not None and (begins := _BEFORE_NUMBERS.match(str(folder))):
        between = "/" if begins[0] == str(folder) else ""
        composed.hydra.launcher.submitit_folder = f"{begins[0]}{between}{token_hex(8)}/%j"


def _keys_of(part: str, target: Any) -> set[str]:
    """The settings that a plug-in has of its own; others it hands on, as what starts processes in other ways."""
    found: set[str] = set()
    Plugins.instance()  # each says what its settings are when it is found
    for name in ConfigStore.instance().list(f"hydra/{part}"):
        if name.endswith(".yaml"):
            node = ConfigStore.instance().load(f"hydra/{part}/{name}").node
            found |= {str(key) for key in node} if node.get("_target_") == target else set()
    return found - {"defaults"}


def _may_run(name: Any) -> bool:
    """Whether Hydra may make an object of what a path leads to."""
    if not isinstance(name, str) or name in _MEMBERS:
        return isinstance(name, str)
    if trust.is_of_user(name.partition(".")[0]):
        if _only_composes.get():
            return True
        with suppress(Exception):  # importing a user's file may raise anything
            return callable(trust.resolved(name))
        return False
    if not _PLUGIN.fullmatch(name):
        return False
    with suppress(ImportError):
        module, _, member = name.rpartition(".")
        found = getattr(importlib.import_module(module), member, None)
        return inspect.isclass(found) and found.__module__.startswith(("hydra_plugins.", "optuna."))
    return False


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    pairs: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else None
    if pairs is None:
        yield prefix, node
        return
    for key, value in pairs:
        yield from _leaves(value, f"{prefix}.{key}")
