"""What files of settings may not say, which decides what runs and where it writes: that is for the command line.

Every value is checked once more where it ends up, whoever has given it. These rules are there since a stranger who
writes a file has more means than one thinks of: names that are put together, places that are links of his.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_lightning.allowed import is_written
from grpo_lightning.output.shell import typed
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings.allowlist import WATCHING
from grpo_lightning.settings.trust import is_of_library
from grpo_lightning.settings.walk import PARTS, every_target

_PARAMETER = r"(?!.*\$\\*\{)[^\x00-\x1f\x7f-\x9f]*"  # what is resolved in a sweeper is no longer known to be a secret
_HYDRA = {
    r"hydra\.mode": "RUN|MULTIRUN",
    r"hydra\.sweeper\.params\.(?!\W*(hydra|run_dir|callbacks|logger|trainer)\b)[\w.+~]+": _PARAMETER,
    r"hydra\.sweeper\.(n_trials|n_jobs|max_batch_size|max_failure_rate|sampler\.seed)": r"[\d.]+|None",
    r"hydra\.sweeper\.direction": "maximize",
    r"hydra\.launcher\.(n_jobs|timeout_min|nodes|array_parallelism|(cpus|gpus|tasks)_per_(task|node)|mem_gb)": r"-?\d+",
    r"hydra\.launcher\.(partition|account|qos)": r"[\w.-]+",
}
"""Key -> value, both as patterns, of what any file may say of Hydra."""
_PRESETS = ("algorithm", "debug", "experiment", "sweep")
"""Folders of conf/ whose files set parts, and are none."""
_PARTS = ("hydra", "hydra.sweeper", "hydra.sweeper.params", "hydra.launcher")
"""What may be empty in it."""
_PROMISED = {
    *("trusted", "trust_remote_code", "path", "_target_", "_args_", "base_url", "api_key_env", "url", "entity"),
    *("tracking_uri", "artifact_location", "verifier", "tools", "settings"),
}
_SWEPT = r"(?!.*[^\W\d]\w*\.[^\W\d])[\w.,+\-()\[\] ]*"  # no dotted name, which could be one of code
"""What a sweep of a file that the command brings along may not vary, and the values that it may give.

They stand in the command that continues a job, where they would count as the user's own word.
"""
_TEXTS = (
    *("accelerator", "devices", "experiment_name", "group", "job_type", "logging_interval", "mode", "monitor", "notes"),
    *("precision", "project", "run_name", "strategy", "tags"),
)
"""What may be a text in a file that the command brings along, below callbacks, logger and trainer: none is a place."""
_OF_SERVICE = re.compile(r"logger\.[^.]+\.settings")
"""Settings of W&B's own, such as whether it runs git, which runs what a repository names."""
_REFERENCES = ("${run_dir}", "${seed}", "${steps}")
"""What may stand for something else there, being plain values wherever they are said."""
_OF_CONF = (
    *((f"trainer.{part}", f"${{oc.dict.values:{part}}}") for part in ("callbacks", "logger")),
    *((f"callbacks.{name}", "${sweep_metric}") for name in ("checkpoint.monitor", "hparams.outcome")),
)
"""What this project's own files say: key and value, of parts that are checked where they stand, and a metric's name."""


def hydra_problems(file: str, said: Any) -> list[str]:
    """What a file must not say of Hydra.

    Args:
        file: Its name, for messages.
        said: What stands in it below ``hydra``, not resolved.
    """
    return [
        f"{one_line(file)}: {typed(key, value)} stands in a file; allowed there are hydra.mode, "
        "hydra.sweeper.params, and numbers of trials, jobs and their resources; anything else on the command line"
        for key, value in leaves_of(said, "hydra")
        if not (value == {} and key in _PARTS)
        and not any(re.fullmatch(name, key) and re.fullmatch(text, str(value)) for name, text in _HYDRA.items())
    ]


def shape_problems(file: str, said: Mapping[str, Any]) -> list[str]:
    """What in a file has no effect: ``loss: dapo`` chooses nothing, and nobody reads settings below ``experiment``.

    Args:
        file: Its name, for messages.
        said: What stands in it, not resolved.
    """
    found = []
    for name in (*PARTS, *_PRESETS):
        is_settings = name in PARTS and isinstance(said.get(name), Mapping)
        if name not in said or is_settings or (name == "environment" and said[name] is None):
            continue
        if isinstance(said[name], Mapping):
            told = (
                f"nothing reads the settings below {name}; allowed is a file whose first line is '# @package _global_'"
            )
        else:
            or_settings = f", or settings below {name}" * (name in PARTS)
            told = f"{typed(name, said[name])} chooses nothing in a file; allowed is a line "
            told += f"'- override /{name}: NAME' among its defaults{or_settings}"
        found.append(f"{one_line(file)}: {told}")
    return found


def writing_problems(file: str, said: Mapping[str, Any], of_user: dict[str, str]) -> list[str]:
    """What a file that the command brings along must not say of what writes files.

    Args:
        file: Its name, for messages.
        said: What stands in it, not resolved.
        of_user: Key -> file, to which the nodes are added that may say anything, being of the user's own code.
    """
    found = [("run_dir", said["run_dir"])] if "run_dir" in said else []
    swept = said.get("hydra")
    for part in ("sweeper", "params"):
        swept = swept.get(part) if isinstance(swept, Mapping) else None
    for key, value in leaves_of(swept, "hydra.sweeper.params") if isinstance(swept, Mapping) else ():
        names = re.split(r"[.+~]", key)
        if not _PROMISED.isdisjoint(names) or any(map(is_written, names)) or not re.fullmatch(_SWEPT, str(value)):
            found.append((key, value))
    for part in ("callbacks", "logger", "trainer"):
        found += _places(said.get(part), part, own := list[str]())
        of_user |= dict.fromkeys(own, file)
    return [_told(file, key, value) for key, value in found]


def changed_problems(
    composed: Mapping[str, Any], of_user: Mapping[str, str], overrides: Sequence[str] = ()
) -> list[str]:
    """What other files have made of nodes of the user's own code: parts of libraries, with what else stands there.

    Args:
        composed: All settings, not resolved.
        of_user: As `writing_problems` has filled it.
        overrides: Of the command line, which may say anything.
    """
    given = [(key.lstrip("+~"), value) for key, _, value in (word.partition("=") for word in overrides)]
    words = [key for key, value in given if "." in key or value.startswith("{")]  # not the choice of a part
    targets = [(key, node["_target_"]) for key, node in every_target(composed)]
    wrong = [
        (of_user[key], f"{key}._target_", target)
        for key, target in targets
        if key in of_user and not _is_of_user(target)
    ]
    for key, value in leaves_of(composed, ""):
        is_said = (key, value) in _OF_CONF or any(_is_below(key, word) for word in words)
        if _may_be_a_part(value) and not is_said:
            wrong += [(file, key, value) for own, file in of_user.items() if _is_below(key, own)][:1]
    return [_told(*one) for one in wrong]


def _is_below(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.")


def _told(file: str, key: str, value: Any) -> str:
    return (
        f"{one_line(file)}: {typed(key, value)} stands in a file that the command brings along; allowed "
        f"there below callbacks, logger and trainer are numbers, texts of {', '.join(_TEXTS)}, your own functions (no "
        f"${{…}} but {', '.join(_REFERENCES)}) and {', '.join(WATCHING)}, and below hydra.sweeper.params numbers and "
        "names that say no place, server or code; anything else on the command line"
    )


def _places(node: Any, key: str, of_user: list[str]) -> Iterator[tuple[str, Any]]:
    """What might name a place, or a part that writes, as pairs of key and value; of the user's own code the keys."""
    if isinstance(node, Mapping) and _is_of_user(node.get("_target_")):
        of_user += _mappings(node, key)
        for inner, value in leaves_of({one: part for one, part in node.items() if one != "_target_"}, key):
            is_target = inner.endswith("._target_")
            if not _is_of_user(value) if is_target else _may_be_a_part(value):  # it would be handed on, built
                yield inner, value
        return
    if _OF_SERVICE.fullmatch(key):
        yield from leaves_of(node, key)
    elif isinstance(node, Mapping | list):
        for name, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _places(value, f"{key}.{name}", of_user)
        return
    name = re.sub(r"(\.\d+)+$", "", key).rpartition(".")[2]
    is_part = name == "_target_" and str(node).removeprefix("lightning.pytorch.callbacks.") in WATCHING
    is_text = name in _TEXTS and "$" not in str(node)
    if isinstance(node, str) and not is_part and not is_text:
        yield key, node


def _mappings(node: Any, key: str) -> Iterator[str]:
    """The keys of a mapping and of those in it."""
    if isinstance(node, Mapping):
        yield key
        for name, value in node.items():
            yield from _mappings(value, f"{key}.{name}")


def _may_be_a_part(value: Any) -> bool:
    """Whether a value stands for something else as a whole, which may be a mapping with a ``_target_``."""
    return isinstance(value, str) and value.startswith("${") and value.endswith("}") and value not in _REFERENCES


def _is_of_user(target: Any) -> bool:
    """Whether what a node builds is the user's own, or refused."""
    return isinstance(target, str) and "$" not in target and not is_of_library(target)


def leaves_of(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every plain value below a node, and every empty mapping and list, as pairs of its dotted key and itself."""
    pairs: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else None
    if not node or pairs is None:
        yield prefix, node
        return
    for key, value in pairs:
        yield from leaves_of(value, f"{prefix}.{key}" if prefix else str(key))
