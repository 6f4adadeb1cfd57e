"""Objects in place of settings: what a program hands to ``compose`` as ``policy=``, ``reward=``, ``data=``, …."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger
from omegaconf import OmegaConf
from torch import nn

from grpo_lightning.config.rules import LIVE
from grpo_lightning.config.settings import quote_value
from grpo_lightning.data import PromptData
from grpo_lightning.environment import Environment
from grpo_lightning.policy import Policy
from grpo_lightning.reference import of_model
from grpo_lightning.reward import RewardSpec

_WHOLE = ("advantage", "loss", "rollout", "sampler", "validation", "optimizer", "schedule", "correction", "trainer")
"""Parts of which an object is what their settings would build."""
_FILES = (".jsonl", ".json-lines", ".ndjson", ".parquet")


@dataclass(frozen=True)
class ObjectOverrides:
    """What objects amount to in settings."""

    overrides: list[str] = field(default_factory=list)
    """To be applied before those of the user."""
    replaced: list[str] = field(default_factory=list)
    """Parts that an object replaces altogether."""
    objects: dict[str, Any] = field(default_factory=dict)
    """Name -> object, for `grpo_lightning.composition.part`."""

    def replace(self, name: str, value: Any) -> None:
        """Let an object stand for a whole part."""
        if isinstance(value, str):
            raise ValueError(f"{name}={value!r:.80}: needs an object; the text {f'{name}={value}'!r:.80} is a choice")
        if name == "trainer" and not isinstance(value, Trainer):
            raise _unfit(name, value, "a lightning.Trainer; trainer.KEY=VALUE as a text is a setting")
        if name in ("advantage", "optimizer", "schedule") and not callable(value):
            raise _unfit(name, value, "a function, as the _target_ of its settings is")
        self.replaced.append(name)
        self.objects[name] = value

    def add(self, key: str, value: Any) -> None:
        """Add an object under a new key of a part."""
        self.overrides.append(f"+{key}={{_target_: {LIVE}, name: {key}}}")
        self.objects[key] = value


def object_overrides(parts: Mapping[str, Any], overrides: Sequence[str]) -> ObjectOverrides:
    """Turn objects into overrides and placeholders.

    Args:
        parts: Name of a group of conf/ -> object.
        overrides: The user's, which may choose a group's file themselves.

    Raises:
        ValueError: There is no such part, an object cannot be one, or an override changes what an object replaces.
    """
    for word in overrides:
        if not isinstance(word, str):
            raise ValueError(f"{word!r:.80}: an override needs to be a text, such as 'steps=20'")
    if unknown := parts.keys() - {*_ADD, *_WHOLE, "reward"}:
        raise ValueError(
            f"{', '.join(sorted(unknown))}: no such part; there are {', '.join(('reward', *_ADD, *_WHOLE))}; anything "
            "else is set by a text, as in compose('steps=20')"
        )
    result = ObjectOverrides()
    for name, value in parts.items():
        if name == "reward":
            _reward(result, value, "".join(word for word in overrides if word.startswith("reward=")))
        elif name in _ADD:
            _ADD[name](result, value)
        else:
            result.replace(name, value)
        taken = tuple(f"{name}{sign}" for sign in ("=.@" if name in result.replaced else "=@"))
        changed = [word for word in overrides if word.lstrip("+~").startswith(taken)]
        if changed and name not in ("reward", "callbacks"):
            raise ValueError(f"{changed[0]}: {name} is given as an object, too; choose one of the two")
    return result


def _unfit(name: str, value: Any, needed: str) -> ValueError:
    return ValueError(f"{name}={value!r:.80}: needs {needed}")


def _policy(result: ObjectOverrides, value: Any) -> None:
    if isinstance(value, Policy):
        result.replace("policy", value)
    elif isinstance(value, str | Path):
        result.overrides.extend(["policy=hf", f"policy.path={quote_value(str(value))}"])
    else:
        model, tokenizer = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if not isinstance(model, nn.Module):
            forms = "a module whose forward(ids) gives logits, a path or name on the hub, or a Policy"
            raise _unfit("policy", value, f"(model, tokenizer), {forms}")
        is_hf = hasattr(model, "generation_config")
        if is_hf and tokenizer is None:
            raise ValueError("policy: a transformers model needs its tokenizer; hand over (model, tokenizer)")
        result.overrides.append(f"policy={'live' if is_hf else 'plain'}")
        result.objects.update({"policy.model": model, "policy.tokenizer": tokenizer})


def _reward(result: ObjectOverrides, value: Any, listed: str) -> None:
    """Functions and `RewardSpec` by name, beside those that the user's ``reward=[…]`` lists."""
    if callable(value):
        name = getattr(value, "__name__", "reward")
        value = {name if name.isidentifier() else "reward": value}
    if not isinstance(value, Mapping) or not value:
        raise _unfit("reward", value, "a function or a mapping from names to functions")
    if not listed:
        result.overrides.append("reward=[]")
    for name, reward in value.items():
        if not str(name).isidentifier() or name in re.findall(r"\w+", listed.removeprefix("reward=")):
            raise ValueError(f"reward[{name!r}]: a name needs to be like that of a variable, and not in {listed!r}")
        if isinstance(reward, RewardSpec):
            result.add(f"reward.{name}", reward)
        elif callable(reward):
            result.overrides.extend([f"+reward@reward.{name}=live", f"reward.{name}.function.name=reward.{name}"])
            result.objects[f"reward.{name}"] = reward
        else:
            raise _unfit(f"reward[{name!r}]", reward, "a function or a RewardSpec")


def _environment(result: ObjectOverrides, value: Any) -> None:
    if value is None or isinstance(value, Environment):
        result.replace("environment", value)
    elif callable(value):
        result.overrides.append("environment=live")
        result.objects["environment.function"] = value
    else:
        raise _unfit("environment", value, "a function, a generator function, an Environment or None")


def _data(result: ObjectOverrides, value: Any) -> None:
    if isinstance(value, PromptData):
        result.replace("data", value)
    elif isinstance(value, str | Path):
        kind = "jsonl" if Path(value).suffix in _FILES else "hub"
        result.overrides.extend([f"data={kind}", f"data.path={quote_value(str(value))}"])
    else:
        named = value if isinstance(value, Mapping) else {"train": value}
        splits = {name: _rows(rows) for name, rows in named.items()}
        if "train" not in splits or not splits.keys() <= {"train", "validation"} or None in splits.values():
            forms = "a path, a PromptData, or a mapping with train and, if wanted, validation"
            raise _unfit("data", value, f"rows, a data set, {forms}")
        result.overrides.append("data=rows")
        result.objects.update({f"data.{name}": splits.get(name) for name in ("train", "validation")})


def _rows(rows: Any) -> Any:
    """Rows by index; those of a table of pandas as mappings. None for anything else."""
    if hasattr(rows, "to_dict") and hasattr(rows, "iloc"):
        return rows.to_dict("records")
    is_sequence = hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, str | Mapping)
    return rows if is_sequence else None


def _callbacks(result: ObjectOverrides, value: Any) -> None:
    for name, callback in _by_name(value).items():
        if not isinstance(callback, Callback):
            raise _unfit(f"callbacks[{name!r}]", callback, "a Lightning callback")
        result.add(f"callbacks.{name}", callback)


def _loggers(result: ObjectOverrides, value: Any) -> None:
    loggers = _by_name([] if value is None or value is False else value)
    result.overrides.append(f"logger=[{','.join(name for name in loggers.values() if isinstance(name, str))}]")
    for name, logger in loggers.items():
        if isinstance(logger, Logger):
            result.add(f"logger.{name}", logger)
        elif not isinstance(logger, str):
            raise _unfit("logger", logger, "a Lightning logger, a name such as csv, or False")


def _by_name(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    listed = value if isinstance(value, list | tuple) else [value]
    return {f"{type(item).__name__.lower()}_{number}": item for number, item in enumerate(listed)}


def _reference(result: ObjectOverrides, value: Any) -> None:
    """A model becomes what ``reference`` settings build: a function of the policy."""
    is_model = isinstance(value, nn.Module)
    function = (lambda policy: value if isinstance(value, Policy) else of_model(policy, value)) if is_model else value
    result.replace("reference", function)


_ADD: dict[str, Callable[[ObjectOverrides, Any], None]] = {
    "policy": _policy,
    "data": _data,
    "environment": _environment,
    "reference": _reference,
    "callbacks": _callbacks,
    "logger": _loggers,
}
"""Part -> what takes an object for it."""


def placeholder(name: str, value: Any, node: Any) -> Any:
    """What stands for an object in settings: those that its part would have, with the object's own values of them.

    Args:
        name: Of the part.
        value: The object.
        node: The part's settings as composed.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kept: Any = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_dict(node) else {}
    values = {key: getattr(value, key, None) for key in kept if not key.startswith("_")}
    plain = {key: one for key, one in values.items() if _is_setting(one)}
    return {**kept, **plain, "_target_": LIVE, "_partial_": False, "_recursive_": False, "name": name}


def _is_setting(value: Any) -> bool:
    """Whether a value means the same as a setting: a text with ${ would be resolved."""
    if isinstance(value, str):
        return "${" not in value
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
