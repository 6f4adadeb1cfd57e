"""Live objects in place of settings: what a program hands to ``compose``."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf
from torch import nn

from grpo_lightning.config.rules import LIVE
from grpo_lightning.data import PromptData
from grpo_lightning.environment import Environment, Played
from grpo_lightning.environment.played import is_generator
from grpo_lightning.policy import Policy
from grpo_lightning.reference import of_model
from grpo_lightning.reward import RewardSpec

PARTS = (
    *("policy", "data", "reward", "advantage", "loss", "rollout", "sampler", "reference", "validation", "optimizer"),
    *("schedule", "correction", "environment", "trainer", "callbacks", "logger"),
)
_FUNCTIONS = {
    "advantage": "of some of rewards, scores, weights and steps",
    "optimizer": "of the parameters, such as functools.partial(torch.optim.AdamW, lr=1e-3)",
    "schedule": "schedule(step, total_steps) -> multiplier of the learning rate",
}
"""Parts that are functions -> of what."""
_FILES = (".jsonl", ".json-lines", ".ndjson", ".parquet")


@dataclass(frozen=True)
class Choices:
    """What live objects amount to in settings."""

    overrides: list[str] = field(default_factory=list)
    """To be applied before those of the user."""
    values: dict[str, str] = field(default_factory=dict)
    """Key -> text to be set once the settings are composed, whatever characters it has."""
    whole: list[str] = field(default_factory=list)
    """Parts that an object replaces altogether."""
    files: dict[str, str] = field(default_factory=dict)
    """Part -> the file of conf/ that an object takes, whose keys are the only ones of the part that apply: those that
    an experiment has for other files of the part do not."""
    objects: dict[str, Any] = field(default_factory=dict)
    """Name -> object, for `grpo_lightning.composition.part`."""

    def put(self, name: str, value: Any) -> str:
        """Remember an object; returns the settings that stand for it, as an override's value."""
        self.objects[name] = value
        return f"{{_target_: {LIVE}, name: {name}}}"


def choices(parts: Mapping[str, Any], overrides: Sequence[str]) -> Choices:
    """Turn live objects into overrides and placeholders.

    Args:
        parts: Name of a group of conf/ -> object.
        overrides: The user's, which may choose a group's file themselves.

    Raises:
        ValueError: There is no such part, an object cannot be one, or an override changes what an object replaces.
    """
    for word in overrides:
        if not isinstance(word, str):
            raise ValueError(f"{word!r:.80}: allowed are texts, such as 'steps=20'")
    if unknown := parts.keys() - set(PARTS):
        told = f"{', '.join(sorted(unknown))}: allowed parts are {', '.join(PARTS)}"
        raise ValueError(f"{told}; anything else is set by a text, as in compose('steps=20')")
    made = Choices()
    for name, value in parts.items():
        if name == "policy":
            _policy(made, value)
        elif name == "reward":
            _reward(made, value, overrides)
        elif name == "environment":
            _environment(made, value)
        elif name == "data":
            _data(made, value)
        elif name == "reference":
            _whole(made, name, _reference_factory(value))
        elif name == "callbacks":
            _callbacks(made, value)
        elif name == "logger":
            _loggers(made, value)
        else:
            _whole(made, name, value)
    for name in parts:
        taken = tuple(f"{name}{sign}" for sign in ("=.@" if name in made.whole else "=@"))
        changed = [word for word in overrides if word.lstrip("+~").startswith(taken)]
        if changed and name not in ("reward", "callbacks"):
            raise ValueError(f"{changed[0]}: {name} is given as an object; allowed is one of the two")
    return made


def _whole(made: Choices, name: str, value: Any) -> None:
    if isinstance(value, str):
        raise ValueError(
            f"{name}={value!r:.80}: allowed are objects; the text {f'{name}={value}'!r:.80} makes a choice"
        )
    if name == "trainer" and not isinstance(value, Trainer):
        raise ValueError(f"trainer={value!r:.80}: allowed is a lightning.Trainer; trainer.KEY=VALUE changes a setting")
    if name in _FUNCTIONS and not callable(value):
        raise ValueError(f"{name}={value!r:.80}: allowed is a function {_FUNCTIONS[name]}")
    made.whole.append(name)
    made.objects[name] = value


def _policy(made: Choices, value: Any) -> None:
    if isinstance(value, Policy):
        _whole(made, "policy", value)
        return
    if isinstance(value, str | Path):
        made.overrides.append("policy=hf")
        made.values["policy.path"] = str(value)
        return
    model, tokenizer = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"policy={value!r:.80}: allowed are (model, tokenizer), a module whose forward(ids) gives logits, a path "
            "or name on the hub, and a Policy"
        )
    kind = "live" if hasattr(model, "generation_config") else "plain"
    if kind == "live" and tokenizer is None:
        raise ValueError("policy: a transformers model needs its tokenizer; allowed is (model, tokenizer)")
    made.overrides.append(f"policy={kind}")
    for name, one in (("model", model), ("tokenizer", tokenizer)):
        made.objects[f"policy.{name}"] = one


def _reward(made: Choices, value: Any, overrides: Sequence[str]) -> None:
    if callable(value):
        name = getattr(value, "__name__", "reward")
        value = {name if name.isidentifier() else "reward": value}
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"reward={value!r:.80}: allowed are a function and a mapping from names to functions")
    listed = [word for word in overrides if word.startswith("reward=")]
    if not listed:
        made.overrides.append("reward=[]")
    for name, one in value.items():
        if not str(name).isidentifier() or name in re.findall(r"\w+", "".join(listed).removeprefix("reward=")):
            raise ValueError(
                f"reward[{name!r}]: allowed are names like those of variables that {listed} does not choose"
            )
        if isinstance(one, RewardSpec):
            made.overrides.append(f"+reward.{name}={made.put(f'reward.{name}', one)}")
        elif callable(one):
            made.overrides.extend([f"+reward@reward.{name}=live", f"reward.{name}.function.name=reward.{name}"])
            made.objects[f"reward.{name}"] = one
        else:
            raise ValueError(f"reward[{name!r}]={one!r:.80}: allowed are functions and RewardSpec objects")


def _environment(made: Choices, value: Any) -> None:
    if value is None or isinstance(value, Environment):
        _whole(made, "environment", value)
    elif callable(value):
        made.overrides.append("environment=live")
        made.objects["environment.function"] = Played(value) if is_generator(value) else value
    else:
        raise ValueError(
            f"environment={value!r:.80}: allowed are a function, a generator function, an Environment and None"
        )


def _data(made: Choices, value: Any) -> None:
    if isinstance(value, PromptData):
        _whole(made, "data", value)
        return
    if isinstance(value, str | Path):
        kind = "jsonl" if Path(value).suffix in _FILES else "hub"
        made.overrides.append(f"data={kind}")
        made.values["data.path"] = str(value)
        return
    both = value if isinstance(value, Mapping) else {"train": value}
    splits = {name: _records(rows) for name, rows in both.items()}
    if "train" not in splits or not splits.keys() <= {"train", "validation"} or None in splits.values():
        raise ValueError(
            f"data={value!r:.80}: allowed are rows, a data set, a path, a PromptData, and a mapping with train and, if "
            "wanted, validation"
        )
    made.overrides.append("data=rows")
    made.files["data"] = "rows"
    for name in ("train", "validation"):
        made.objects[f"data.{name}"] = splits.get(name)


def _records(rows: Any) -> Any:
    """Rows by index; those of a table of pandas as mappings. None for anything else."""
    if hasattr(rows, "to_dict") and hasattr(rows, "iloc"):
        return rows.to_dict("records")
    is_listed = hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, str | Mapping)
    return rows if is_listed else None


def _callbacks(made: Choices, value: Any) -> None:
    if not isinstance(value, Mapping):
        listed = value if isinstance(value, Sequence) else [value]
        value = {f"{type(one).__name__.lower()}_{number}": one for number, one in enumerate(listed)}
    for name, callback in value.items():
        if not isinstance(callback, Callback):
            raise ValueError(f"callbacks[{name!r}]={callback!r:.80}: allowed are Lightning callbacks")
        made.overrides.append(f"+callbacks.{name}={made.put(f'callbacks.{name}', callback)}")


def _loggers(made: Choices, value: Any) -> None:
    """Loggers, or names of conf/logger, one or several, or loggers by name; None and False for none."""
    listed = [] if value is None or value is False else value
    if not isinstance(listed, Mapping):
        listed = listed if isinstance(listed, list | tuple) else [listed]
        listed = {f"{type(one).__name__.lower()}_{number}": one for number, one in enumerate(listed)}
    made.overrides.append(f"logger=[{','.join(one for one in listed.values() if isinstance(one, str))}]")
    for name, one in listed.items():
        if isinstance(one, Logger):
            made.overrides.append(f"+logger.{name}={made.put(f'logger.{name}', one)}")
        elif not isinstance(one, str):
            raise ValueError(f"logger={one!r:.80}: allowed are Lightning's loggers, names such as csv, and False")


def _reference_factory(value: Any) -> Any:
    """What ``reference`` settings build: a function of the policy."""
    if not isinstance(value, nn.Module):
        return value
    return lambda policy: value if isinstance(value, Policy) else of_model(policy, value)


def placeholder(name: str, value: Any, node: Any) -> Any:
    """What stands for an object in settings: those that its part would have, with the object's own values of them.

    Args:
        name: Of the part.
        value: The object.
        node: The part's settings as composed.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kept = raw(node) if OmegaConf.is_dict(node) else {}
    own = {key: getattr(value, key, None) for key in kept if not key.startswith("_")}
    known = {key: one for key, one in own.items() if _is_plain(one)}
    return {**kept, **known, "_target_": LIVE, "_partial_": False, "_recursive_": False, "name": name}


def raw(node: DictConfig) -> dict[str, Any]:
    """Settings as they stand: texts that were resolved would be read once more."""
    found: Any = OmegaConf.to_container(node, resolve=False)
    return found  # type: ignore[no-any-return]


def _is_plain(value: Any) -> bool:
    """Whether a value means the same as a setting: a text with ${ would be resolved."""
    if isinstance(value, str):
        return "${" not in value
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
