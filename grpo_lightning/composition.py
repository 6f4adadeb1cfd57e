"""From overrides, and objects in place of settings, to a run.

Worker processes of rewards import this file when they import the program that started them, so that nothing heavy is
imported before it is needed. It is not called ``compose``: that is the name of the package's function.
"""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_lightning.config import ConfigError, check_config, sandbox_problems
from grpo_lightning.config.settings import each_target, explain_compose_error, leaves, value_at
from grpo_lightning.config.targets import argument_problems, trusted_packages, with_targets
from grpo_lightning.console import REDACTED, redact_config, redact_overrides, write_atomic
from grpo_lightning.distributed.devices import default_precision

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
    """A run of some settings, in which parts may be objects.

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
    words = [*given.overrides, *overrides]
    named = [word for word in words if word.lstrip("+").startswith(("hydra.run.dir=", "run_dir="))]
    words = [word for word in words if word not in named]
    with composing(words):
        cfg = hydra_compose("train", words, return_hydra_config=True)
        choices = cfg.hydra.runtime.choices
        OmegaConf.set_struct(cfg, False)
        del cfg.hydra
        directory = Path(run_dir or (named[-1].partition("=")[2] if named else _new_directory()))
        cfg.run_dir = _literal(str(directory))
        if "data.train" in given.objects:  # an experiment's settings of other data do not apply
            rows, kept = hydra_compose("train", ["data=rows"]).data, raw(cfg.data)
            cfg.data = {key: rows[key] if OmegaConf.is_dict(rows[key]) else kept[key] for key in rows}
        for name in given.replaced:
            cfg[name] = placeholder(name, given.objects[name], cfg[name])
        if "reward" in parts:  # nor do those of rewards that are not there
            asked = {word.lstrip("+").split(".")[1] for word in overrides if word.lstrip("+").startswith("reward.")}
            for name in [name for name, node in cfg.reward.items() if "_target_" not in node and name not in asked]:
                del cfg.reward[name]
        if "reference" in parts and "loss" not in parts and not (cfg.loss.kl_coef or cfg.rollout.get("kl_penalty")):
            log.warning("reference is given, and not used: loss.kl_coef and rollout.kl_penalty are 0")
        if "loss" in parts and (cfg.correction or {}).get("_target_") != "grpo_lightning.loss.no_correction":
            log.warning("correction is chosen, and not used: the loss that is given has its own, or none")
        return build_run(
            cfg,
            objects=given.objects,
            explicit=[*words, *(f"{name}=" for name in parts)],
            overrides=list(overrides),
            directory_given=bool(run_dir or named),
            choices={part: name for part, name in config_choices(choices, cfg).items() if part not in given.replaced},
            on_start=lambda place: write_settings(cfg, words, place),
        )


def config_choices(choices: Mapping[str, Any], cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Group of conf/ -> the name of its file, from those of Hydra; of rewards and loggers the names in the settings."""
    named = {group: name for group, name in choices.items() if name and not group.startswith("hydra/")}
    for group in ("reward", "logger"):
        named[group] = [str(name) for name in cfg.get(group) or () if name not in ("_target_", "name")]
    return named


@contextlib.contextmanager
def composing(words: Sequence[str]) -> Iterator[None]:
    """Inside, Hydra composes this project's settings, also where a program has initialized it for its own.

    Raises:
        ConfigError: The overrides cannot be composed.
    """
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([explain_compose_error(error, CONF, words)]) from error
    finally:
        GlobalHydra.instance().hydra = state


def part(name: str, **_: Any) -> Any:
    """The object of that name; what settings hold in its place, beside settings that others refer to."""
    return _objects.get()[name]


def resolve_config(cfg: DictConfig) -> dict[str, Any]:
    """The settings, resolved, as plain values, with a precision where they leave it open.

    Raises:
        ConfigError: A setting has no value, or refers to one that is not there.
    """
    try:
        config: Any = with_targets(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ConfigError([explain_compose_error(error, CONF)]) from error
    trainer = config.get("trainer")
    if isinstance(trainer, dict) and trainer.get("precision", "") is None:
        trainer["precision"] = default_precision(trainer)
    return config  # type: ignore[no-any-return]


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
    if cfg.mode != "fit" and cfg.checkpoint is not None:  # policy and reference are those of the checkpoint
        from grpo_lightning.checkpoint.policy import policy_settings

        named = {"mode": cfg.mode, "checkpoint": str(cfg.checkpoint), "run_dir": cfg.run_dir}
        chosen = options["overrides"] if explicit is None else explicit
        for key, value in policy_settings(named, chosen, lambda key: _select(cfg, key)).items():
            OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    config = resolve_config(cfg)
    from grpo_lightning.run import Run

    def build(name: str, **more: Any) -> Any:
        node, available, environment = config[name], dict(objects or {}), None
        if name == "module" and config.get("environment") is not None:
            environment = build("environment")
            node, available[_TOOLS] = _with_environment(node, environment), environment.tools
        token = _objects.set(available)
        try:
            if name == "trainer" and "callbacks" in node:
                node, more = _with_callbacks(node)
            result = instantiate(node, _partial_=True)(**more) if more else instantiate(node)
        except InstantiationException as error:
            raise _cause(error, name) from error
        finally:
            _objects.reset(token)
        if environment is not None:
            _check_environment(result.policy, environment)
        return result

    return Run(config, build, written=_with_env_references(raw(cfg), config), **options)


def _with_environment(module: Mapping[str, Any], environment: "Environment") -> dict[str, Any]:
    """Settings of a module whose policy's chat template shows the replies and tools of an environment."""
    policy = dict(module["policy"])
    if "reply_role" in policy:
        policy["reply_role"] = environment.reply_role or policy["reply_role"] or "user"
    if environment.tools and "template_kwargs" in policy:
        kwargs = policy["template_kwargs"] or {}
        if kwargs.get("tools") is not None:
            raise ValueError(
                f"policy.template_kwargs.tools: environment {environment.name} has tools; leave them out here"
            )
        policy["template_kwargs"] = {**kwargs, "tools": {"_target_": f"{__name__}.part", "name": _TOOLS}}
    return {**module, "policy": policy}


def _check_environment(policy: "Policy", environment: "Environment") -> None:
    """Raise ValueError if a policy cannot read what an environment replies, or is not told of its tools."""
    if environment.tools and policy.chat.template_kwargs.get("tools") is None:
        raise ValueError(
            f"policy: environment {environment.name} has tools, which the policy that was given as an object does not "
            "show; give it template_kwargs={'tools': environment.tools}"
        )
    policy.chat.check_replies(environment.reply_role or policy.chat.reply_role)


def _with_callbacks(trainer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A trainer's settings without its callbacks, and arguments with these, built.

    Where none of them keeps checkpoints, Lightning is told to keep none: else it would add a ``ModelCheckpoint`` of its
    own, which writes where the first logger's texts lead.
    """
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

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item) for item in value]
        return texts.get(value, value) if isinstance(value, str) else value

    return replaced(config) if texts else config


def instantiate(node: Any, **options: Any) -> Any:
    """What resolved settings describe: a text with ``${`` in it is read as it stands."""

    def escaped(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: escaped(value) for key, value in node.items()}
        if isinstance(node, list):
            return [escaped(value) for value in node]
        return _literal(_literal(node)) if isinstance(node, str) else node  # Hydra resolves what it has resolved

    return hydra_instantiate(escaped(node), _convert_="all", **options)


def _literal(text: str) -> str:
    """A text in which OmegaConf reads ``${`` as it stands."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def raw(node: DictConfig) -> dict[str, Any]:
    """Settings as they stand, unresolved."""
    found: Any = OmegaConf.to_container(node, resolve=False)
    return found  # type: ignore[no-any-return]


def _select(cfg: DictConfig, key: str, *, throw_on_missing: bool = False) -> Any:
    """What stands at a dotted key, resolved, as plain values; None where nothing does."""
    node = OmegaConf.select(cfg, key)
    if not OmegaConf.is_config(node):
        return node
    return OmegaConf.to_container(node, resolve=True, throw_on_missing=throw_on_missing)


def _cause(error: InstantiationException, name: str) -> Exception:
    """What went wrong inside of what settings build, in its own words, or with the key if it is a bug."""
    cause = error.__cause__
    if isinstance(cause, ValueError | OSError):
        return cause
    return ValueError(f"{name}: {type(cause).__name__}: {cause}") if cause is not None else error


def _new_directory() -> Path:
    """``runs/DATE/TIME``, as on the command line; with a number where it is taken.

    A process that Lightning starts runs the program again, and takes the directories that the first one has chosen.
    """
    chosen = os.environ.get(_DIRECTORIES, "").split(os.pathsep)
    if os.environ.get("LOCAL_RANK", "0") != "0" and len(_directories) < len(chosen) and chosen[0]:
        _directories.append(chosen[len(_directories)])
        return Path(_directories[-1])
    time = datetime.now().strftime("runs/%Y-%m-%d/%H-%M-%S")
    names = (f"{time}-{number}" if number else time for number in range(1000))
    _directories.append(next(name for name in names if not Path(name).exists() and name not in _directories))
    os.environ[_DIRECTORIES] = os.pathsep.join(_directories)
    return Path(_directories[-1])


def write_settings(
    cfg: DictConfig, overrides: Sequence[str], directory: Path, *, hydra: DictConfig | None = None
) -> None:
    """Write the settings as composed, the overrides, and Hydra's own settings where Hydra does, without secrets."""
    place = directory / ".hydra"
    place.mkdir(parents=True, exist_ok=True)
    pages: dict[str, Any] = {"config": redact_config(raw(cfg)), "overrides": redact_overrides(overrides)}
    if hydra is not None:
        own = raw(hydra)
        own["overrides"].update({name: redact_overrides(own["overrides"][name]) for name in ("hydra", "task")})
        pages["hydra"] = redact_config({"hydra": own})
    for name, page in pages.items():
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
    words = [*(word for word in _run_overrides(directory) if _still_holds(word, overrides)), *overrides]
    with composing(words):
        cfg = hydra_compose("train", words)
        config = {name: _select(cfg, name, throw_on_missing=True) for name in (*parts, "trusted")}
    check_config(config)
    trusted = trusted_packages(config)
    problems = [problem for key, node in each_target(config) for problem in argument_problems(node, key, trusted)]
    if problems := [*problems, *sandbox_problems(config)]:
        raise ConfigError(problems)

    def build(key: str, node: Any) -> Any:
        try:
            return instantiate({"built": node})["built"]
        except InstantiationException as error:
            raise _cause(error, key) from error

    return config, build


def _still_holds(word: str, overrides: Sequence[str]) -> bool:
    """Whether an override of the run applies beside new ones: a part that is chosen anew begins afresh."""
    if REDACTED in word or word.startswith(("callbacks", "logger", "trainer", "sweep", "mode=", "checkpoint=")):
        return False
    key = word.lstrip("+~").partition("=")[0].split(".")
    for part, _, choice in (override.partition("=") for override in overrides):
        if len(key) > 1 and key[0] in (("loss", "advantage") if part == "algorithm" else (part,)):
            return part == "reward" and key[1] in re.findall(r"\w+", choice)
    return True


def _run_overrides(directory: Path) -> list[str]:
    file = directory / ".hydra" / "overrides.yaml"
    if not file.exists():
        raise ValueError(f"{directory} has no .hydra/overrides.yaml, which says how its run was set")
    return [str(word) for word in OmegaConf.load(file)]
