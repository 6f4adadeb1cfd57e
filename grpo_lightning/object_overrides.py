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
from grpo_lightning.config.shell import quote_value
from grpo_lightning.data import PromptData
from grpo_lightning.environment import Environment
from grpo_lightning.policy import Policy
from grpo_lightning.reference import of_model
from grpo_lightning.reward import RewardSpec

_FUNCTIONS = {
    "advantage": "of some of rewards, scores, weights and steps",
    "optimizer": "of the parameters, such as functools.partial(torch.optim.AdamW, lr=1e-3)",
    "schedule": "schedule(step, total_steps) -> multiplier of the learning rate",
}
"""Parts that are functions -> of what."""
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

    @property
    def rows(self) -> bool:
        """Whether the data are rows, to which settings of files and tasks do not apply."""
        return "data.train" in self.objects

    def replace(self, name: str, value: Any) -> None:
        """Let an object stand for a whole part."""
        if isinstance(value, str):
            raise ValueError(f"{name}={value!r:.80}: needs an object; the text {f'{name}={value}'!r:.80} is a choice")
        if name == "trainer" and not isinstance(value, Trainer):
            raise ValueError(
                f"trainer={value!r:.80}: needs a lightning.Trainer; trainer.KEY=VALUE as a text is a setting"
            )
        if name in _FUNCTIONS and not callable(value):
            raise ValueError(f"{name}={value!r:.80}: needs a function {_FUNCTIONS[name]}")
        self.replaced.append(name)
        self.objects[name] = value

    def add(self, key: str, value: Any) -> None:
        """Add an object under a new key of a part."""
        self.overrides.append(f"+{key}={{_target_: {LIVE}, name: {key}}}")
        self.objects[key] = value

    def add_policy(self, value: Any) -> None:
        """(model, tokenizer), a module whose ``forward(ids)`` gives logits, a path or name, or a Policy."""
        if isinstance(value, Policy):
            return self.replace("policy", value)
        if isinstance(value, str | Path):
            self.overrides.extend(["policy=hf", f"policy.path={quote_value(str(value))}"])
            return None
        model, tokenizer = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"policy={value!r:.80}: needs (model, tokenizer), a module whose forward(ids) gives logits, a path or "
                "name on the hub, or a Policy"
            )
        is_hf = hasattr(model, "generation_config")
        if is_hf and tokenizer is None:
            raise ValueError("policy: a transformers model needs its tokenizer; hand over (model, tokenizer)")
        self.overrides.append(f"policy={'live' if is_hf else 'plain'}")
        self.objects.update({"policy.model": model, "policy.tokenizer": tokenizer})
        return None

    def add_reward(self, value: Any, listed: str) -> None:
        """A function, or functions and RewardSpec by name.

        Args:
            value: The object.
            listed: The user's overrides ``reward=[…]``, which choose further rewards.
        """
        if callable(value):
            name = getattr(value, "__name__", "reward")
            value = {name if name.isidentifier() else "reward": value}
        if not isinstance(value, Mapping) or not value:
            raise ValueError(f"reward={value!r:.80}: needs a function or a mapping from names to functions")
        if not listed:
            self.overrides.append("reward=[]")
        for name, reward in value.items():
            if not str(name).isidentifier() or name in re.findall(r"\w+", listed.removeprefix("reward=")):
                raise ValueError(f"reward[{name!r}]: a name needs to be like that of a variable, and not in {listed!r}")
            if isinstance(reward, RewardSpec):
                self.add(f"reward.{name}", reward)
            elif callable(reward):
                self.overrides.extend([f"+reward@reward.{name}=live", f"reward.{name}.function.name=reward.{name}"])
                self.objects[f"reward.{name}"] = reward
            else:
                raise ValueError(f"reward[{name!r}]={reward!r:.80}: needs a function or a RewardSpec")

    def add_environment(self, value: Any) -> None:
        """A function, a generator function, an Environment, or None."""
        if value is None or isinstance(value, Environment):
            self.replace("environment", value)
        elif callable(value):
            self.overrides.append("environment=live")
            self.objects["environment.function"] = value
        else:
            raise ValueError(
                f"environment={value!r:.80}: needs a function, a generator function, an Environment or None"
            )

    def add_data(self, value: Any) -> None:
        """Rows, a data set, a table of pandas, a path, a PromptData, or a mapping of ``train`` and ``validation``."""
        if isinstance(value, PromptData):
            return self.replace("data", value)
        if isinstance(value, str | Path):
            kind = "jsonl" if Path(value).suffix in _FILES else "hub"
            self.overrides.extend([f"data={kind}", f"data.path={quote_value(str(value))}"])
            return None
        splits = value if isinstance(value, Mapping) else {"train": value}
        splits = {name: _as_rows(rows) for name, rows in splits.items()}
        if "train" not in splits or not splits.keys() <= {"train", "validation"} or None in splits.values():
            raise ValueError(
                f"data={value!r:.80}: needs rows, a data set, a path, a PromptData, or a mapping with train and, if "
                "wanted, validation"
            )
        self.overrides.append("data=rows")
        self.objects.update({f"data.{name}": splits.get(name) for name in ("train", "validation")})
        return None

    def add_callbacks(self, value: Any) -> None:
        """Lightning callbacks: one, several, or by name."""
        for name, callback in _by_name(value).items():
            if not isinstance(callback, Callback):
                raise ValueError(f"callbacks[{name!r}]={callback!r:.80}: needs a Lightning callback")
            self.add(f"callbacks.{name}", callback)

    def add_loggers(self, value: Any) -> None:
        """Loggers, or names of conf/logger: one, several, or by name; None and False for none."""
        loggers = _by_name([] if value is None or value is False else value)
        self.overrides.append(f"logger=[{','.join(name for name in loggers.values() if isinstance(name, str))}]")
        for name, logger in loggers.items():
            if isinstance(logger, Logger):
                self.add(f"logger.{name}", logger)
            elif not isinstance(logger, str):
                raise ValueError(f"logger={logger!r:.80}: needs a Lightning logger, a name such as csv, or False")


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
    result = ObjectOverrides()
    listed = "".join(word for word in overrides if word.startswith("reward="))
    special: dict[str, Callable[[Any], None]] = {
        "policy": result.add_policy,
        "data": result.add_data,
        "reward": lambda value: result.add_reward(value, listed),
        "environment": result.add_environment,
        "callbacks": result.add_callbacks,
        "logger": result.add_loggers,
        "reference": lambda value: result.replace("reference", _reference_factory(value)),
    }
    whole = ("advantage", "loss", "rollout", "sampler", "validation", "optimizer", "schedule", "correction", "trainer")
    if unknown := parts.keys() - {*special, *whole}:
        raise ValueError(
            f"{', '.join(sorted(unknown))}: no such part; there are {', '.join((*special, *whole))}; anything else is "
            "set by a text, as in compose('steps=20')"
        )
    for name, value in parts.items():
        if name in special:
            special[name](value)
        else:
            result.replace(name, value)
        taken = tuple(f"{name}{sign}" for sign in ("=.@" if name in result.replaced else "=@"))
        changed = [word for word in overrides if word.lstrip("+~").startswith(taken)]
        if changed and name not in ("reward", "callbacks"):
            raise ValueError(f"{changed[0]}: {name} is given as an object, too; choose one of the two")
    return result


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


def _as_rows(rows: Any) -> Any:
    """Rows by index; those of a table of pandas as mappings. None for anything else."""
    if hasattr(rows, "to_dict") and hasattr(rows, "iloc"):
        return rows.to_dict("records")
    is_sequence = hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, str | Mapping)
    return rows if is_sequence else None


def _by_name(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    listed = value if isinstance(value, list | tuple) else [value]
    return {f"{type(item).__name__.lower()}_{number}": item for number, item in enumerate(listed)}


def _reference_factory(value: Any) -> Any:
    """What ``reference`` settings build: a function of the policy."""
    if not isinstance(value, nn.Module):
        return value
    return lambda policy: value if isinstance(value, Policy) else of_model(policy, value)
