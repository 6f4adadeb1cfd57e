"""What settings may say that a command brings along, by ``--config-dir`` and the like: they may be a stranger's.

They make choices of conf/, and give numbers, switches and some texts to settings that conf/ has. Whoever can say no
more than this names no code, no place and no other machine, however he combines it. ``trusted_settings=true`` on the
command line takes them for the user's own.
"""

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.default_element import ConfigDefault, GroupDefault, InputDefault, ResultDefault
from omegaconf import OmegaConf

from grpo_lightning.composition import CONF
from grpo_lightning.output.shell import typed
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings.allowlist import PLAIN, WATCHING
from grpo_lightning.settings.values import MAY_VARY, VARYING

TRUSTED = "trusted_settings"
_TEXTS = re.compile(
    r"task_name|tags|sweep_metric|(policy|reference)\.(path|dtype)|policy\.(system_prompt|reply_role|quantization)"
    r"|data\.(path|validation_path|name|revision|split|validation_split|task)"
    r"|data\.(prompt|completion)_column|data\.columns\.\w+|rollout\.(outcome|stop)|reward\.\w+\.only_if"
    r"|reward\.keyword\.function\.words|reward\.judge\.function\.(model|rubric)"
    r"|trainer\.precision|logger\.\w+\.(project|experiment_name|run_name|group|job_type|notes|tags)"
)
"""Settings that may be any text: what models and data are read, how they are asked, and names to find a run by."""
_CALLED = re.compile(
    r"task_name|tags|sweep_metric|data\.(name|revision|split|validation_split|task)|logger\.\w+\.(?!notes)\w+"
)
"""Those of them that are names, which may become parts of the names of files."""
_NAMES = re.compile(r"policy\.adapter\.target_modules")
"""Settings that may be texts of letters, digits, '_', '-' and '.': others are patterns, which C code reads."""
_WATCHED = ("metric", "mode", "monitor", "logging_interval")
"""Arguments of callbacks, and of numbers that vary, that may be texts."""
_NUMBERS = re.compile(
    r"(optimizer|data\.task_config|policy\.adapter)\.\w+|policy\.template_kwargs\.enable_thinking"
    r"|trainer\.(gradient_clip_val|deterministic|benchmark|detect_anomaly)"
    r"|logger\.\w+\.(flush_logs_every_n_steps|flush_secs|max_queue)"
)
"""Settings that may be numbers and switches although conf/ does not have them."""
_LEFT_OUT = re.compile(r"(callbacks|reward)\.\w+")
"""Settings that may be null: what is left out."""
_HYDRAS = {
    "hydra/sweeper": ("basic", "optuna"),
    "hydra/launcher": ("basic", "joblib", "submitit_local", "submitit_slurm"),
}
"""Choices of Hydra's own that a file may make."""
_ONLY_OF_CONF = re.compile(
    r"(trainer\.(devices|num_nodes)|trusted.*|checkpoint|requeue|logger\.\w+\.settings\..*"
    r"|(.*\.)?(trust_remote_code|allow_http))"
)
"""Settings of numbers and switches that decide more: who may join a run, whose code runs, where keys go unencrypted."""
_CHOSEN_WHOLE = re.compile(r"logger\.\w+\._target_")
"""What is chosen by its name alone, with all that conf/ says there, such as that W&B is not sent what is printed."""
_REFERENCES = ("${seed}", "${steps}")
_KEY = re.compile(r"[\w-]+", re.ASCII)
_FILE = re.compile(r"\w[\w-]*(/\w[\w-]*)*", re.ASCII)
_REWARD = re.compile(r"reward\.\w+(\.\w+|\.function\._partial_)?")
_SWEPT = re.compile(r"[\d.,+\-eE ]+|(tag\(log, ?)?(interval|range|choice)\([\d.,+\-eE ]*\)+|true|false|null", re.I)
"""What a sweep may give to settings; a dotted name could be one of code."""
_TOLD = (
    "allowed there are choices, numbers, switches and some texts; anything else on the command line, where "
    f"{TRUSTED}=true says that you know"
)
_MOST = 5  # keys of a file that are named


def is_trusted(words: Sequence[str]) -> bool:
    """Whether the user says, by overrides of his own, that the files that he brings along are his."""
    last = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    return last.get(TRUSTED, "").strip().lower() in ("true", "on", "yes", "1")


def brought_problems(file: str, said: Mapping[str, Any], listed: Sequence[InputDefault] = ()) -> list[str]:
    """What a file must not say that the command brings along.

    Args:
        file: Its name, for messages.
        said: What stands in it, not resolved, with the keys that it has among all settings.
        listed: Its list of defaults.
    """
    own = {key: value for key, value in said.items() if key != "hydra"}
    found = [*_below(own, "", is_plain=False), *_swept(said.get("hydra"))]
    found += [("defaults", one) for default in listed if (one := _refused_choice(default)) is not None]
    told = "; ".join(typed(key, value) for key, value in found[:_MOST])
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    along = f"{told}{more} stands in a file that the command brings along; {_TOLD} the file"
    return [f"{one_line(file)}: {along}"] if found else []


def misplaced(default: ResultDefault, header: Mapping[str, Any]) -> bool:
    """Whether a file of conf/ is placed where a file that the command brings along may not place it.

    Args:
        default: The file, as another one has listed it.
        header: Of the file: its own package.
    """
    path = default.config_path or ""
    group, _, name = path.rpartition("/")
    meant = group.replace("/", ".") if header.get("package") in (None, "") else str(header["package"])
    meant = "" if meant == "_global_" else meant
    package = default.package or ""
    return package != meant and not (name == "base" and re.fullmatch(rf"{re.escape(meant)}\.\w+", package))


def word_problems(words: Sequence[Any], own: Sequence[Any] = ()) -> list[str]:
    """What overrides must not say that may be a stranger's.

    Args:
        words: As Hydra has parsed them.
        own: Those of the user, which come last: of a setting that they give anew nothing else is left.
    """
    found, anew = [], {one.key_or_group for one in own if _is_value(one)}
    for word in words:
        key = word.key_or_group
        if key in anew and _is_value(word) and not _is_part(key):
            continue
        if word.is_sweep_override() or word.package is not None:
            found.append(str(word.input_line))
            continue
        value = word.value()
        is_choice = _is_part(key) and not isinstance(value, dict)
        if is_choice and all(one is None or _FILE.fullmatch(str(one)) for one in _as_list(value)):
            continue
        if is_choice or any(_below(_nested(key, value), "", is_plain=False)):
            found.append(str(word.input_line))
    return [f"{one_line(word)} stands in the run's settings; {_TOLD} the run" for word in found]


def _below(node: Mapping[str, Any], prefix: str, *, is_plain: bool) -> Iterator[tuple[str, Any]]:
    """What may not stand in a mapping.

    Args:
        node: The mapping.
        prefix: Its dotted key.
        is_plain: Whether it is what a function of plain arithmetic is given.
    """
    for name, value in node.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if not isinstance(name, str) or not _KEY.fullmatch(name):  # a dot would make it what stands at another place
            yield key, value
        elif isinstance(value, Mapping) and value:
            yield from _below(value, key, is_plain=_may_be_plain_code(key, str(value.get("_target_"))))
        elif not _may_say(key, name, value, is_plain=is_plain):
            yield key, value


def _may_say(key: str, name: str, value: Any, *, is_plain: bool) -> bool:
    """Whether a plain value, or a list of them, may stand at a key."""
    if _CHOSEN_WHOLE.fullmatch(key):
        return False
    of_conf = _of_conf().get(_generalized(key), ())
    if any(value == one and type(value) is type(one) for one in of_conf):
        return True
    if name == "_target_":
        return is_plain
    if name == "_partial_" and is_plain:
        return isinstance(value, bool)
    if name.startswith("_") or _ONLY_OF_CONF.fullmatch(key):
        return False
    if value is None and _LEFT_OUT.fullmatch(key):
        return True
    values = _as_list(value)
    if not all(type(one) in (str, int, float, bool, type(None)) for one in values):
        return False
    texts = [one for one in values if isinstance(one, str)]
    if _NAMES.fullmatch(key) and all(re.fullmatch(r"[\w.-]+", one) for one in texts):
        return True
    is_name = _CALLED.fullmatch(key) or (is_plain and name in _WATCHED)
    if is_name and any(one.startswith(("/", "~", ".")) or "/." in one for one in texts):
        return False
    if texts and all("$" not in one for one in texts) and (_TEXTS.fullmatch(key) or (is_plain and name in _WATCHED)):
        return True
    is_of_numbers = any(not isinstance(one, str) for one in of_conf)
    is_known = is_plain or is_of_numbers or bool(_NUMBERS.fullmatch(key)) or bool(_TEXTS.fullmatch(key))
    return is_known and all(one in _REFERENCES for one in texts)


def _may_be_plain_code(key: str, target: str) -> bool:
    """Whether a path may be named at a key: plain code in place of what conf/ has of its kind, and of new rewards.

    What it makes would elsewhere be a true value, whatever it is, for code that takes a switch there.
    """
    if not _is_plain_code(target) or _ONLY_OF_CONF.fullmatch(key):
        return False
    if target.startswith(VARYING):
        return key.startswith(MAY_VARY) and any(_is_number(one) for one in _of_conf().get(_generalized(key), ()))
    if _is_watching(target):
        return re.fullmatch(r"callbacks\.\w+", key) is not None
    is_of_its_kind = any(_is_plain_code(str(one)) for one in _of_conf().get(f"{key}._target_", ()))
    return is_of_its_kind or re.fullmatch(r"reward\.\w+\.function", key) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_watching(target: str) -> bool:
    """Whether a path is one of a callback that watches a run and writes nothing."""
    return "." in target and target.removeprefix("lightning.pytorch.callbacks.") in WATCHING


def _is_plain_code(target: str) -> bool:
    """Whether a path is one of plain arithmetic, or of what watches a run and writes nothing."""
    return _is_watching(target) or f"{target}.".startswith((VARYING, *(f"{name}." for name in PLAIN)))


def _swept(hydra: Any) -> Iterator[tuple[str, Any]]:
    """What a sweep must not vary in a file's settings of Hydra, of which other rules know the rest."""
    for key, value in _parameters(hydra).items():
        place = str(key).lstrip("+")
        is_choice = _is_part(place) and re.fullmatch(r"[\w\-,\[\] ]*", str(value))
        is_number = _SWEPT.fullmatch(str(value)) and _may_say(place, place.rpartition(".")[2], 0, is_plain=False)
        if not is_choice and not is_number:
            yield f"hydra.sweeper.params.{key}", value


def _parameters(hydra: Any) -> Mapping[str, Any]:
    """What a file's settings of Hydra's have a sweep vary: override without its value -> values."""
    sweeper = hydra.get("sweeper") if isinstance(hydra, Mapping) else None
    params = sweeper.get("params") if isinstance(sweeper, Mapping) else None
    return params if isinstance(params, Mapping) else {}


def _refused_choice(default: InputDefault) -> str | None:
    """An entry of a list of defaults in words; None if a file may have it."""
    if default.is_self():
        return None
    if isinstance(default, GroupDefault):
        group, names = str(default.group).removeprefix("/"), _as_list(default.value)
        told = f"{group}@{default.package}: {default.value}"
    elif isinstance(default, ConfigDefault):
        group, names = str(default.path).removeprefix("/"), []
        told = f"{group}@{default.package}"
    else:
        return str(default)
    if group.split("/")[0] == "hydra":
        is_named = default.package is None and {*names} <= {*_HYDRAS.get(group, ())} and names != []
    else:
        is_named = all(one is None or _FILE.fullmatch(str(one)) for one in [group, *names])
    is_near = default.package is None or re.fullmatch(r"\w+", default.package)
    return None if is_named and is_near else told


def _is_part(key: str) -> bool:
    """Whether a key is the name of a folder of conf/, of which a file is chosen."""
    return _FILE.fullmatch(key) is not None and (CONF / key).is_dir()


def _is_value(word: Any) -> bool:
    """Whether an override gives a setting a value, which takes the place of another one; mappings are joined."""
    is_one = not word.is_delete() and not word.is_sweep_override() and word.package is None
    return is_one and not isinstance(word.value(), dict)


def _as_list(value: Any) -> Sequence[Any]:
    """A list as it is, and of anything else a list."""
    return value if isinstance(value, list) else [value]


def _nested(key: str, value: Any) -> dict[str, Any]:
    """The settings in which a dotted key has a value."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def _generalized(key: str) -> str:
    """A key, which is the same for rewards of all names where it is one that all of them have."""
    return re.sub(r"^reward\.\w+", "reward.*", key) if _REWARD.fullmatch(key) else key


@functools.cache
def _of_conf() -> Mapping[str, Collection[Any]]:
    """Dotted key -> the values that files of conf/ have there."""
    found: dict[str, list[Any]] = {}
    for path in CONF.rglob("*.yaml"):
        group = ".".join(path.relative_to(CONF).parent.parts)
        package = "" if "@package _global_" in path.read_text(encoding="utf-8") else group
        package = "reward.*" if path.relative_to(CONF) == Path("reward/base.yaml") else package
        said: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        for key, value in _values_of(
            {key: one for key, one in said.items() if key not in ("defaults", "hydra")}, package
        ):
            found.setdefault(_generalized(key), []).append(value)
    return found


def _values_of(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value below a mapping, and lists and empty mappings as a whole, as pairs of dotted key and value."""
    if not isinstance(node, Mapping) or not node:  # an empty one takes the place of a value
        yield prefix, node
        return
    for key, value in node.items():
        yield from _values_of(value, f"{prefix}.{key}" if prefix else str(key))
