"""From overrides, and objects in place of settings, to a run.

Worker processes of rewards import this file when they import the program that started them, so that nothing heavy is
imported before it is needed.
"""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_lightning.composition import CONF
from grpo_lightning.config import ConfigError
from grpo_lightning.config.redaction import redact_config, redact_overrides
from grpo_lightning.config.suggestions import explain_compose_error, known_keys
from grpo_lightning.config.targets import with_targets
from grpo_lightning.distributed.devices import default_precision
from grpo_lightning.output.files import replace

if TYPE_CHECKING:
    from grpo_lightning.environment import Environment
    from grpo_lightning.policy import Policy
    from grpo_lightning.run import Run

log = logging.getLogger(__name__)

_ONE_AT_A_TIME = threading.RLock()
"""Hydra has one state for the whole process."""
_RESOLVERS = ("hydra", "now", "python_version")
"""What Hydra registers where it begins."""
_OF_RUN = ("hydra.run.dir=", "run_dir=")
_TOOLS = "environment.tools"
"""What the tools of an environment are called among live objects."""
_CHOSEN = "GRPO_LIGHTNING_RUN_DIRECTORIES"
_chosen_here: list[str] = []
_live: ContextVar[Mapping[str, Any]] = ContextVar("live")


def compose(*overrides: str, run_dir: str | Path | None = None, **parts: Any) -> "Run":
    """A run of some settings, in which parts may be live objects.

    Args:
        overrides: Those of the command line, such as ``"algorithm=dr_grpo"`` or ``"steps=20"``.
        run_dir: Where the run writes; None takes a new directory ``runs/DATE/TIME``.
        parts: Objects under the names of the groups of conf/, see `live.choices`: ``policy=`` a model with its
            tokenizer, or a path; ``reward=`` a function, or functions by name; ``data=`` rows, a data set, a path or a
            datamodule; any other part as what its settings would build.

    Returns:
        An object with ``module``, ``data``, ``trainer``, ``fit()``, ``validate()``, ``export()``, ``preflight()`` and
        ``metrics``.

    Raises:
        ConfigError: The settings cannot work; all problems with their keys.
        ValueError: A part cannot be what it was given as.
    """
    from grpo_lightning.composition.live import choices, placeholder, raw

    given = choices(parts, overrides)
    words = [*given.overrides, *overrides]
    named = [word for word in words if word.lstrip("+").startswith(_OF_RUN)]
    words = [word for word in words if word not in named]
    with _ONE_AT_A_TIME, composing(words):
        directory = Path(run_dir or (named[-1].partition("=")[2] if named else _new_directory()))
        cfg = hydra_compose("train", words)
        files = chosen(words)
        for name, file in given.files.items():
            own = hydra_compose("train", [f"{name}={file}"])[name]
            kept = raw(cfg[name])
            cfg[name] = {key: own[key] if OmegaConf.is_dict(own[key]) else kept[key] for key in own}
        OmegaConf.set_struct(cfg, False)
        cfg.run_dir = _literal(str(directory))
        for key, text in given.values.items():
            OmegaConf.update(cfg, key, _literal(text))
        for name in given.whole:
            cfg[name] = placeholder(name, given.objects[name], cfg[name])
        if "reward" in parts:  # an experiment's settings of rewards that are not there
            asked = {word.lstrip("+").split(".")[1] for word in overrides if word.lstrip("+").startswith("reward.")}
            for name in [name for name, node in cfg.reward.items() if "_target_" not in node and name not in asked]:
                del cfg.reward[name]
        if "reference" in parts and "loss" not in parts and not (cfg.loss.kl_coef or cfg.rollout.get("kl_penalty")):
            log.warning("reference is given, and not used: loss.kl_coef and rollout.kl_penalty are 0")
        if "loss" in parts and (cfg.correction or {}).get("_target_") != "grpo_lightning.loss.correction.none":
            log.warning("correction is chosen, and not used: the loss that is given has its own, or none")
        return made(
            cfg,
            live=given.objects,
            explicit=[*words, *(f"{name}=" for name in parts)],
            overrides=list(overrides),
            directory_given=bool(run_dir or named),
            choices={part: name for part, name in files.items() if part not in given.whole}
            | {"reward": [str(name) for name in cfg.reward if name not in ("_target_", "name")]},
            on_start=lambda place: write_settings(cfg, words, place),
        )


def chosen(
    overrides: Sequence[str], config: Mapping[str, Any] | None = None, *, name: str = "train"
) -> dict[str, str | list[str]]:
    """The choices that overrides lead to, those of an algorithm, a policy or an experiment among them.

    Args:
        overrides: As on the command line.
        config: The settings composed of them, which name the rewards also where objects or deletions made them others.
        name: The primary settings file.

    Returns:
        Group of conf/ -> the name of its file, or the names where there are several; of rewards always a list.
    """
    loader = GlobalHydra.instance().config_loader()
    listed = loader.compute_defaults_list(name, list(overrides), RunMode.RUN).defaults
    found: dict[str, list[str]] = {}
    for one in listed:
        group, _, file = (one.config_path or "").rpartition("/")
        is_inherited = (one.parent or "").rpartition("/")[0] == group  # it stands below another one of its group
        if group and group.split("/")[0] != "hydra" and not is_inherited:
            found.setdefault(group, []).append(file)
    if config is not None:
        found["reward"] = [str(reward) for reward in config.get("reward") or ()]
    return {group: files if group == "reward" or len(files) > 1 else files[0] for group, files in found.items()}


@contextlib.contextmanager
def composing(words: Sequence[str]) -> Iterator[None]:
    """Inside, Hydra composes this project's settings, also where a program has initialized it for its own.

    Args:
        words: The overrides, for the message.

    Raises:
        ConfigError: They cannot be composed.
    """
    state, had = GlobalHydra.instance().hydra, [name for name in _RESOLVERS if OmegaConf.has_resolver(name)]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([explain_compose_error(error, CONF, known_keys(CONF), words)]) from error
    finally:
        GlobalHydra.instance().hydra = state
        for name in set(_RESOLVERS) - set(had):
            OmegaConf.clear_resolver(name)


def _literal(text: str) -> str:
    """A text in which OmegaConf reads ``${`` as it stands."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def part(name: str, **_: Any) -> Any:
    """The live object of that name; what settings hold in its place, beside settings that others refer to."""
    return _live.get()[name]


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The settings, resolved, as plain values, with a precision where they leave it open.

    Args:
        cfg: As composed.

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


def made(
    cfg: DictConfig, *, live: Mapping[str, Any] | None = None, explicit: Sequence[str] | None = None, **options: Any
) -> "Run":
    """The run of composed settings.

    Args:
        cfg: As composed.
        live: Name -> object, for `part`.
        explicit: What the user has chosen, as overrides; None: the overrides of ``options``.
        options: Those of `grpo_lightning.run.Run`.
    """
    _recall_policy(cfg, options["overrides"] if explicit is None else explicit)
    config = plain(cfg)
    from grpo_lightning.run import Run

    def build(name: str, **more: Any) -> Any:
        node, objects = config[name], dict(live or {})
        talks = name == "module" and config.get("environment") is not None
        if talks:
            environment = build("environment")
            node, objects[_TOOLS] = _with_replies(node, environment), environment.tools
        with _using(objects):
            try:
                node, more = _with_callbacks(node) if name == "trainer" else (node, more)
                result = instantiated(node, **({"_partial_": True} if more else {}))
                result = result(**more) if more else result
            except InstantiationException as error:
                raise cause_of(error, name) from error
        if talks:
            _check_replies(result.policy, environment)
        return result

    return Run(config, build, written=_as_written(cfg, config), **options)


def _with_replies(module: Mapping[str, Any], environment: "Environment") -> dict[str, Any]:
    """Settings of a module whose policy looks, before weights are read, whether its template shows replies and tools.

    Args:
        module: Its settings, the policy's among them.
        environment: Who replies. Its tools are referred to as the live object ``_TOOLS``.

    Raises:
        ValueError: The settings have tools of their own.
    """
    policy = dict(module["policy"])
    if "reply_role" in policy:
        policy["reply_role"] = environment.reply_role or policy["reply_role"] or "user"
    if environment.tools and "template_kwargs" in policy:
        own = policy["template_kwargs"] or {}
        if own.get("tools") is not None:
            raise ValueError(
                f"policy.template_kwargs.tools: allowed is null with environment {environment.name}, which has tools"
            )
        policy["template_kwargs"] = {**own, "tools": {"_target_": f"{__package__}.part", "name": _TOOLS}}
    return {**module, "policy": policy}


def _check_replies(policy: "Policy", environment: "Environment") -> None:
    """Look whether a policy can be told what an environment replies.

    Raises:
        ValueError: It has no replies, was not told of the tools, or its chat template cannot show them.
    """
    replies: Any = getattr(policy, "replies", None)
    if replies is None:
        raise ValueError(f"policy={type(policy).__name__}: allowed with an environment is one that can be replied to")
    if environment.tools and getattr(policy, "template_kwargs", {}).get("tools") is None:
        raise ValueError(
            f"policy: environment {environment.name} has tools, which the policy that was given as an object does not "
            "show; allowed is one with template_kwargs={'tools': environment.tools}"
        )
    replies.check(environment.reply_role or getattr(policy, "reply_role", None) or "user")


def _as_written(cfg: DictConfig, config: Any) -> Any:
    """The settings as they are written: what comes from the environment stays ``${oc.env:NAME}``."""
    texts: dict[str, str] = {}

    def collect(node: Any) -> None:
        for key in node if OmegaConf.is_dict(node) else range(len(node)):
            raw = node._get_node(key)
            if OmegaConf.is_interpolation(node, key):
                text = str(raw._value())
                if "oc.env" in text and isinstance(value := OmegaConf.select(node, str(key)), str) and value:
                    texts[value] = text
            elif OmegaConf.is_config(raw):
                collect(raw)

    def written(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: written(value) for key, value in node.items()}
        if isinstance(node, list):
            return [written(value) for value in node]
        return texts.get(node, node) if isinstance(node, str) else node

    collect(cfg)
    return written(config)


def instantiated(node: Any, **options: Any) -> Any:
    """What resolved settings describe: a text with ``${`` in it is read as it stands."""
    return instantiate(_escaped(node), _convert_="all", **options)


def _escaped(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _escaped(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_escaped(value) for value in node]
    return _literal(_literal(node)) if isinstance(node, str) else node  # Hydra resolves what it has resolved


def _with_callbacks(trainer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A trainer's settings without its callbacks, and arguments with these, made.

    Where none of them keeps checkpoints, Lightning is told to keep none: else it would add a ``ModelCheckpoint`` of its
    own, which writes where the first logger's texts lead.

    Args:
        trainer: The settings; without ``callbacks`` they stand for a live trainer.
    """
    from lightning.pytorch.callbacks import Checkpoint

    if "callbacks" not in trainer:
        return trainer, {}
    rest = dict(trainer)
    result = instantiated(rest.pop("callbacks"))
    every = [one for one in (result if isinstance(result, list) else [result]) if one is not None]  # NAME=null
    return rest, {"callbacks": every, "enable_checkpointing": any(isinstance(one, Checkpoint) for one in every)}


def select(cfg: DictConfig, key: str, *, throw_on_missing: bool = False) -> Any:
    """What stands at a dotted key, resolved, as plain values; None where nothing does.

    Args:
        cfg: Settings as composed.
        key: Of a value, a list or a mapping.
        throw_on_missing: Whether ``???`` is an error.

    Raises:
        OmegaConfBaseException: It refers to what is not there.
    """
    found = OmegaConf.select(cfg, key)
    if not OmegaConf.is_config(found):
        return found
    return OmegaConf.to_container(found, resolve=True, throw_on_missing=throw_on_missing)


def cause_of(error: InstantiationException, name: str) -> Exception:
    """What went wrong inside of what settings build, which says it in its own words, or with the key if it is a bug."""
    cause = error.__cause__
    if isinstance(cause, ValueError | OSError):
        return cause
    return ValueError(f"{name}: {type(cause).__name__}: {cause}") if cause is not None else error


def _recall_policy(cfg: DictConfig, explicit: Sequence[str]) -> None:
    """To export or validate a checkpoint, policy and reference are its own where the user has not named them."""
    if cfg.mode == "fit" or cfg.checkpoint is None:
        return
    from grpo_lightning.checkpoint.policy import policy_settings

    named = {"mode": cfg.mode, "checkpoint": str(cfg.checkpoint), "run_dir": cfg.run_dir}
    for key, value in policy_settings(named, explicit, lambda key: select(cfg, key)).items():
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)


@contextlib.contextmanager
def _using(objects: Mapping[str, Any]) -> Iterator[None]:
    token = _live.set(objects)
    try:
        yield
    finally:
        _live.reset(token)


def _new_directory() -> Path:
    """``runs/DATE/TIME``, as on the command line; with a number where it is taken.

    A process that Lightning starts runs the program again, and takes the directories that the first one has chosen.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    known = [] if is_first else [name for name in os.environ.get(_CHOSEN, "").split(os.pathsep) if name]
    first = Path("runs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    names = (first if not number else first.with_name(f"{first.name}-{number}") for number in range(1000))
    free = (path for path in names if not path.exists() and str(path) not in _chosen_here)
    directory = Path(known[len(_chosen_here)]) if len(_chosen_here) < len(known) else next(free)
    _chosen_here.append(str(directory))
    if not known:
        os.environ[_CHOSEN] = os.pathsep.join(_chosen_here)
    return directory


def write_settings(
    cfg: DictConfig, overrides: Sequence[str], directory: Path, *, hydra: DictConfig | None = None
) -> None:
    """Write the settings as composed, and what was overridden, where Hydra writes them, without secrets.

    Args:
        cfg: The settings.
        overrides: What the user changed.
        directory: The run's.
        hydra: Hydra's own settings, on the command line.
    """
    place = directory / ".hydra"
    place.mkdir(parents=True, exist_ok=True)
    pages: dict[str, Any] = {"config": cfg, "overrides": redact_overrides(overrides)}
    if hydra is not None:
        pages["hydra"] = {"hydra": OmegaConf.to_container(hydra, resolve=False)}
        own = pages["hydra"]["hydra"]["overrides"]
        own.update({name: redact_overrides(own[name]) for name in ("hydra", "task")})
    for name, page in pages.items():
        kept: Any = OmegaConf.to_container(page, resolve=False) if isinstance(page, DictConfig) else page
        hidden = redact_config(kept) if isinstance(kept, dict) else kept
        replace(place / f"{name}.yaml", OmegaConf.to_yaml(OmegaConf.create(hidden)), by=f".{name}.yaml")
