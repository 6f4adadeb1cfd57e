"""From overrides, and objects in place of settings, to a run.

Worker processes of rewards import this file when they import the program that started them, so that nothing heavy is
imported before it is needed. It is not called ``compose``: that is the name of the package's function.
"""

import contextlib
import itertools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_lightning.config import TOP, ConfigError, check_config, check_runtime
from grpo_lightning.config.rules import REFERENCE_KEYS, default_precision
from grpo_lightning.config.settings import (
    compose_problems,
    explain_compose_error,
    leaves,
    normalize_overrides,
    value_at,
)
from grpo_lightning.config.targets import with_targets
from grpo_lightning.console import (
    REDACTED,
    is_first_process,
    print_line,
    redact_config,
    redact_overrides,
    wrap,
    write_atomic,
)

if TYPE_CHECKING:
    from grpo_lightning.environment import Environment
    from grpo_lightning.policy import Policy
    from grpo_lightning.run import Run

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parent
CONF = next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())
"""The settings' files: inside the package where it is installed, beside it in a checkout."""
_TOOLS = "environment.tools"
"""Name of the tools of an environment among objects."""
_DIRECTORIES = "GRPO_LIGHTNING_RUN_DIRECTORIES"
_directories: list[str] = []
"""The run directories that `compose` has chosen in this process."""
_objects: ContextVar[Mapping[str, Any]] = ContextVar("objects")


def compose(*overrides: str, run_dir: str | Path | None = None, **parts: Any) -> "Run":
    """Build a run from overrides, and from Python objects for parts of it (``policy=``, ``reward=``, ``data=``, …).

    Args:
        overrides: Those of the command line, such as ``"algorithm=dr_grpo"`` or ``"steps=20"``.
        run_dir: Where the run writes; None takes a new directory ``runs/DATE/TIME``.
        parts: Objects under the names of the groups of conf/, see `object_overrides`: ``policy=`` a model with its
            tokenizer, or a path; ``reward=`` a function, or functions by name; ``data=`` rows, a data set, a path or a
            datamodule; any other part as what its settings would build.

    Returns:
        An object with ``module``, ``data``, ``trainer``, ``fit()``, ``validate()``, ``export()``, ``preflight()`` and
        ``metrics``.

    Raises:
        ConfigError: The settings cannot work; all problems with their keys.
        ValueError: A part cannot be what it was given as.
    """
    from grpo_lightning.object_overrides import object_overrides, placeholder

    given = object_overrides(parts, overrides)
    words = [*given.overrides, *normalize_overrides(overrides, CONF)]
    named = [word for word in words if word.lstrip("+").startswith(("hydra.run.dir=", "run_dir="))]
    words = [word for word in words if word not in named]
    directory = Path(run_dir or (named[-1].partition("=")[2] if named else new_directory()))
    words = continued_overrides(words, directory)
    with initialize_hydra(words):
        cfg, choices = compose_config(words)
        cfg.run_dir = _literal(str(directory))
        for name in given.replaced:
            node = placeholder(name, given.objects[name], OmegaConf.select(cfg, name))
            OmegaConf.update(cfg, name, node, merge=False)
        uses = any(OmegaConf.select(cfg, key) for key in REFERENCE_KEYS)
        if "reference" in parts and "loss" not in given.replaced and not uses:
            log.warning("reference is given, and not used: %s are 0", ", ".join(REFERENCE_KEYS))
        if "loss" in given.replaced and (cfg.correction or {}).get("_target_") != "grpo_lightning.loss.no_correction":
            log.warning("correction is chosen, and not used: the loss that is given has its own, or none")
        return build_run(
            cfg,
            objects=given.objects,
            explicit=[*words, *(f"{name}=" for name in parts)],
            overrides=[word for word in words if word not in given.overrides],
            directory_given=bool(run_dir or named),
            choices={part: name for part, name in choices.items() if part not in given.replaced},
            on_start=lambda place: write_settings(cfg, words, place),
        )


_SIZES = {
    "data": ("prompts_per_step", "validation_size", "max_prompt_length"),
    "optimizer": ("lr", "betas", "weight_decay"),
    "rollout": ("group_size", "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop", "outcome"),
    "schedule": ("warmup_steps",),
}
"""Part -> numbers of an experiment that stay, since they mean the same whichever of the part's files is chosen."""
_CHOSEN_PARTS = ("policy", "advantage", "loss", "correction", "reference", "environment", *_SIZES)
"""Groups of conf/ whose choice on the command line wins over what an experiment sets."""
_TEXTS = ("data.path", "data.validation_path", "policy.path", "reference.path", "rollout.path", "task_name")
"""Keys whose values are texts, also where they are written as numbers: data.path=2024."""
_OF_ALGORITHM = ("advantage", "loss", "reference", "rollout")


def compose_config(words: Sequence[str], name: str = "train") -> tuple[DictConfig, dict[str, Any]]:
    """Compose settings: overrides win over the parts that they choose, and those over an experiment.

    Args:
        words: Overrides, also of groups.
        name: Of the file that is composed.

    Returns:
        The settings, and group of conf/ -> name of its chosen file, or names.
    """
    typed, words = {word.partition("=")[0] for word in words}, [*words]
    chosen = [part for part in _CHOSEN_PARTS if part in typed or ("algorithm" in typed and part in _OF_ALGORITHM)]
    if "experiment" not in typed or not chosen:
        cfg = hydra_compose(name, words, return_hydra_config=True)
    else:
        choices = tuple(f"{group}=" for group in (*_CHOSEN_PARTS, "algorithm", "reward", "module"))
        below = tuple(f"{part}." for part in chosen)
        sizes = tuple(f"{part}.{key}" for part in chosen for key in _SIZES.get(part, ()))  # they are the experiment's
        kept = [word for word in words if word.startswith(("hydra.", *choices)) or word.lstrip("+~").startswith(below)]
        kept = [word for word in kept if not word.lstrip("+~").startswith(sizes)]
        base = hydra_compose(name, kept, return_hydra_config=True)
        words += [f"{part}={base.hydra.runtime.choices[part]}" for part in chosen if part not in typed]
        cfg = hydra_compose(name, words, return_hydra_config=True)
        for part in chosen:
            OmegaConf.update(cfg, part, _chosen_over_preset(to_dict(base)[part], to_dict(cfg)[part], part), merge=False)
    groups = cfg.hydra.runtime.choices
    OmegaConf.set_struct(cfg, False)
    for part in ("reward", "callbacks", "logger") if "experiment" in typed else ():
        asked = {word.split(".")[1] for word in words if word.lstrip("+").startswith(f"{part}.")}
        settings = cfg[part].items() if part in typed else ()  # of those that are not chosen do not apply
        for key in [key for key, node in settings if OmegaConf.is_dict(node) and "_target_" not in node]:
            if key not in asked:
                del cfg[part][key]
    del cfg.hydra
    for key in _TEXTS:
        if isinstance(number := OmegaConf.select(cfg, key, throw_on_resolution_failure=False), int | float):
            OmegaConf.update(cfg, key, str(number))
    named = {group: name for group, name in groups.items() if name and not group.startswith("hydra/")}
    for group in ("reward", "logger"):
        named[group] = [str(name) for name in cfg.get(group) or () if name not in ("_target_", "name")]
    return cfg, named


def _chosen_over_preset(chosen: Any, preset: Any, part: str) -> Any:
    """The settings of a chosen part, with an experiment's values of what the choice leaves open, and its sizes."""
    if not isinstance(chosen, dict) or not isinstance(preset, dict):
        return chosen
    result = dict(chosen)
    for key in chosen.keys() & preset.keys():
        if chosen[key] in (None, "???") or key in _SIZES.get(part, ()):
            result[key] = preset[key]
        elif isinstance(chosen[key], dict):
            result[key] = _chosen_over_preset(chosen[key], preset[key], "")
    return result


def continued_overrides(words: Sequence[str], directory: Path) -> list[str]:
    """Overrides that continue the run in a directory: with checkpoint=last its own, where ``words`` leave them.

    ``~KEY`` takes back what the run has added by ``+KEY=``.
    """
    if "checkpoint=last" not in words or not (directory / ".hydra" / "overrides.yaml").exists():
        return [*words]

    def key(word: str) -> str:
        return word.lstrip("+~").partition("=")[0]

    typed = {key(word) for word in words}
    recorded = _run_overrides(directory, words)
    added = {key(word) for word in recorded if word.startswith("+")}
    words = [word for word in words if not (word.startswith("~") and key(word) in added)]
    return [*(word for word in recorded if key(word) not in typed), *words]


@contextlib.contextmanager
def initialize_hydra(words: Sequence[str]) -> Iterator[None]:
    """Context in which Hydra composes this project's settings, also in a program that uses Hydra itself.

    Raises:
        ConfigError: The overrides cannot be composed.
    """
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"), explain_errors(words):
            yield
    finally:
        GlobalHydra.instance().hydra = state


@contextlib.contextmanager
def explain_errors(words: Sequence[str], name: str = "train") -> Iterator[None]:
    """Context that raises `ConfigError` where overrides cannot be composed."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        again = lambda left: hydra_compose(name, left)  # noqa: E731
        raise ConfigError(compose_problems(error, CONF, words, again)) from error


def live_object(name: str, **settings: Any) -> Any:
    """Return the object that a program passed to `compose` under this dotted name, a function with its settings."""
    if name not in (objects := _objects.get({})):
        raise ValueError(f"{name} is an object of the program that began this run: compose({name.partition('.')[0]}=…)")
    return partial(objects[name], **settings) if settings and name.endswith(".function") else objects[name]


def resolve_config(cfg: DictConfig) -> dict[str, Any]:
    """The settings, resolved, as plain values, with a precision where they leave it open.

    Raises:
        ConfigError: A setting has no value, or refers to one that is not there.
    """
    try:
        config: Any = with_targets(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ConfigError([explain_compose_error(error, CONF)]) from error
    references = {name for _, text in leaves(to_dict(cfg)) for name in re.findall(r"\$\{(\w+)", str(text))}
    config = {key: value for key, value in config.items() if key in TOP or key not in references}
    trainer = config.get("trainer")
    if isinstance(trainer, dict) and trainer.get("precision", "") is None:
        trainer["precision"] = default_precision(trainer)
    return config  # type: ignore[no-any-return]


def announce_import() -> None:
    """Say that PyTorch and Lightning are loading, which takes seconds, unless they are loaded."""
    if "grpo_lightning.run" not in sys.modules and is_first_process():
        print_line("loading PyTorch and Lightning")


def build_run(
    cfg: DictConfig, *, objects: Mapping[str, Any] | None = None, explicit: Sequence[str] | None = None, **options: Any
) -> "Run":
    """The run of composed settings.

    Args:
        cfg: As composed.
        objects: Name -> object, for `part`.
        explicit: What the user has chosen, as overrides; None: the overrides of ``options``.
        options: Those of `grpo_lightning.run.Run`.
    """
    if cfg.checkpoint is not None:  # policy and reference are those of the checkpoint
        from grpo_lightning.checkpoint.resume import policy_settings

        named = {"mode": cfg.mode, "checkpoint": str(cfg.checkpoint), "run_dir": cfg.run_dir}
        chosen = options["overrides"] if explicit is None else explicit
        for key, value in policy_settings(named, chosen, lambda key: _select(cfg, key)).items():
            OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    config = resolve_config(cfg)
    announce_import()
    from grpo_lightning.run import Run

    def build(name: str, **more: Any) -> Any:
        if name == "module" and "policy" in config[name] and "policy" not in more:
            more["policy"] = build("policy")
        node, available, environment = config[name], dict(objects or {}), None
        if name == "policy" and config.get("environment") is not None:
            environment = build("environment")
            node, available[_TOOLS] = _with_environment(node, environment), environment.tools
        token = _objects.set(available)
        try:
            if name == "trainer" and "callbacks" in node:
                node, more = _with_callbacks(node)
            if more:
                settings = {key: value for key, value in node.items() if key not in more}
                result = instantiate(settings, _partial_=True)(**more)
            else:
                result = instantiate(node)
        except InstantiationException as error:
            raise _cause(error, name) from error
        finally:
            _objects.reset(token)
        if environment is not None:
            _check_environment(result, environment)
        return result

    def change(key: str, value: Any) -> None:
        OmegaConf.update(cfg, key, value, merge=False)
        config.update(resolve_config(cfg))

    return Run(config, build, written=_with_env_references(to_dict(cfg), config), change=change, **options)


def _with_environment(policy: Mapping[str, Any], environment: "Environment") -> dict[str, Any]:
    """Settings of a policy whose chat template shows the replies and tools of an environment."""
    policy = dict(policy)
    if "reply_role" in policy:
        policy["reply_role"] = environment.reply_role or policy["reply_role"] or "user"
    if environment.tools and "template_kwargs" in policy:
        tools = {"_target_": f"{__name__}.live_object", "name": _TOOLS}
        policy["template_kwargs"] = {**(policy["template_kwargs"] or {}), "tools": tools}
    return policy


def _check_environment(policy: "Policy", environment: "Environment") -> None:
    """Raise ValueError if a policy cannot read what an environment replies, or is not told of its tools."""
    if environment.tools and policy.chat.template_kwargs.get("tools") is None:
        raise ValueError(
            f"policy: environment {environment.name} has tools, which the policy that was given as an object does not "
            "show; give it template_kwargs={'tools': environment.tools}"
        )
    policy.chat.check_replies(environment.reply_role or policy.chat.reply_role)


def _with_callbacks(trainer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A trainer's settings without its callbacks, and these, built: Lightning keeps no checkpoints where none does."""
    from lightning.pytorch.callbacks import Checkpoint

    rest = dict(trainer)
    built = instantiate(rest.pop("callbacks"))
    callbacks = [callback for callback in (built if isinstance(built, list) else [built]) if callback is not None]
    keeps = any(isinstance(callback, Checkpoint) for callback in callbacks)
    return rest, {"callbacks": callbacks, "enable_checkpointing": keeps}


def _with_env_references(node: Any, config: Any) -> Any:
    """Resolved settings, in which texts that are ``${oc.env:NAME}`` in ``node`` stay so, also in copies of them."""
    references = [(key, text) for key, text in leaves(node) if isinstance(text, str) and "oc.env" in text]
    texts = {value: text for key, text in references if isinstance(value := value_at(config, key), str) and value}
    return _map_texts(config, lambda text: texts.get(text, text)) if texts else config


def _map_texts(node: Any, change: Callable[[str], str]) -> Any:
    """Nested settings with every text changed."""
    if isinstance(node, dict):
        return {key: _map_texts(value, change) for key, value in node.items()}
    if isinstance(node, list):
        return [_map_texts(value, change) for value in node]
    return change(node) if isinstance(node, str) else node


def instantiate(node: Any, **options: Any) -> Any:
    """Build what resolved settings describe; a text with ``${`` in it is read as it stands."""
    escaped = _map_texts(node, lambda text: _literal(_literal(text)))  # Hydra resolves what it has resolved
    return hydra_instantiate(escaped, _convert_="all", **options)


def _literal(text: str) -> str:
    """A text in which OmegaConf reads ``${`` as it stands."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def to_dict(node: DictConfig) -> dict[str, Any]:
    """Settings as a mapping, unresolved."""
    return OmegaConf.to_container(node, resolve=False)  # type: ignore[return-value]


def _select(cfg: DictConfig, key: str, *, throw_on_missing: bool = False) -> Any:
    """What stands at a dotted key, resolved, as plain values; None where nothing does."""
    node = OmegaConf.select(cfg, key)
    if not OmegaConf.is_config(node):
        return node
    return OmegaConf.to_container(node, resolve=True, throw_on_missing=throw_on_missing)


def _cause(error: InstantiationException, name: str) -> Exception:
    """The error that was raised while settings were built; a bug becomes a ValueError with the key."""
    cause = error.__cause__
    if isinstance(cause, ValueError | OSError):
        return cause
    return ValueError(f"{name}: {type(cause).__name__}: {cause}") if cause is not None else error


def new_directory(name: str | None = None) -> Path:
    """Make a new directory, with a number where the name is taken.

    A process that Lightning starts runs the program again, and takes the directories that the first one has chosen.

    Args:
        name: Of the directory; None: ``runs/DATE/TIME``.
    """
    chosen = os.environ.get(_DIRECTORIES, "").split(os.pathsep)
    if os.environ.get("LOCAL_RANK", "0") != "0" and len(_directories) < len(chosen) and chosen[0]:
        _directories.append(chosen[len(_directories)])
        return Path(_directories[-1])
    name = name or datetime.now().strftime("runs/%Y-%m-%d/%H-%M-%S")
    for number in range(1000):
        directory = Path(f"{name}-{number}" if number else name)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(parents=True)
            break
    _directories.append(str(directory))
    os.environ[_DIRECTORIES] = os.pathsep.join(_directories)
    return directory


def experiment_note(name: str | None) -> list[str]:
    """What an experiment is, by the first sentence of its file, in lines."""
    file = CONF / "experiment" / f"{name}.yaml"
    lines = file.read_text("utf-8").splitlines()[1:] if file.exists() else []
    text = " ".join(line[2:] for line in itertools.takewhile(lambda line: line.strip("# "), lines))
    return wrap(f"experiment: {text}") if text else []


def write_settings(cfg: DictConfig, overrides: Sequence[str], directory: Path) -> None:
    """Write the settings as composed, and the overrides, where Hydra does, without secrets."""
    place = directory / ".hydra"
    place.mkdir(parents=True, exist_ok=True)
    for name, page in (("config", redact_config(to_dict(cfg))), ("overrides", redact_overrides(overrides))):
        write_atomic(place / f"{name}.yaml", OmegaConf.to_yaml(OmegaConf.create(page)))


def load_run_config(
    directory: Path, overrides: Sequence[str], parts: Sequence[str]
) -> tuple[dict[str, Any], Callable[[str, Any], Any]]:
    """Some parts of the settings of the run in a directory, with overrides, and what builds objects from them.

    Args:
        directory: A run directory, of which ``.hydra/overrides.yaml`` is read.
        overrides: As on the command line.
        parts: Names of groups of conf/.

    Returns:
        The settings, and a function (dotted key, settings) -> object.

    Raises:
        ConfigError: The settings cannot work.
        ValueError: The directory does not say how its run was set.
    """
    recorded = [w for w in _run_overrides(directory, overrides) if not w.startswith(("callbacks", "logger", "trainer"))]
    words = [*recorded, *overrides]
    with initialize_hydra(words):
        cfg, _ = compose_config(words)
        config = {name: _select(cfg, name, throw_on_missing=True) for name in (*parts, "trusted")}
    check_config(config)
    check_runtime(config)

    def build(key: str, node: Any) -> Any:
        try:
            return instantiate({"built": node})["built"]
        except InstantiationException as error:
            raise _cause(error, key) from error

    return config, build


def _run_overrides(directory: Path, words: Sequence[str]) -> list[str]:
    """The overrides of the run in a directory that apply beside new ones: a part that is chosen anew begins afresh."""
    file = directory / ".hydra" / "overrides.yaml"
    if not file.exists():
        raise ValueError(f"{directory} has no .hydra/overrides.yaml, which says how its run was set")

    recorded = [str(word) for word in OmegaConf.load(file)]
    for key in (word.partition("=")[0] for word in recorded if REDACTED in word):
        if is_first_process() and not any(word.startswith(f"{key}=") for word in words):
            print_line(f"{key}: its value is secret and was not recorded; give it again")

    def still_holds(word: str) -> bool:
        if REDACTED in word or word.startswith(("sweep", "mode=", "checkpoint=")):
            return False
        key = word.lstrip("+~").partition("=")[0].split(".")
        for part, _, choice in (override.partition("=") for override in words if override not in recorded):
            if len(key) > 1 and key[0] in (("loss", "advantage") if part == "algorithm" else (part,)):
                return part == "reward" and key[1] in re.findall(r"\w+", choice)
        return True

    return [word for word in recorded if still_holds(word)]
