"""Objects in place of settings: what a program hands to ``compose`` as ``policy=``, ``reward=``, ``data=``, …."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, loggers
from omegaconf import OmegaConf
from torch import nn

from grpo_lightning.config.rules import LIVE
from grpo_lightning.config.settings import aliases, quote_value, translate_key
from grpo_lightning.data import PromptData
from grpo_lightning.data.files import SUFFIXES, indexed_rows
from grpo_lightning.environment import Environment
from grpo_lightning.policy import Policy
from grpo_lightning.reference import of_model
from grpo_lightning.reward import RewardSpec
from grpo_lightning.reward.spec import arguments, innermost

_METHODS = {
    **dict.fromkeys(("advantage", "loss", "correction", "reference", "optimizer", "schedule"), "__call__"),
    **{"rollout": "collect", "sampler": "generate", "validation": "step", "trainer": "fit"},
}
"""Part of which an object is what its settings would build -> a method of such an object."""
_PARTS = ("reward", "policy", "data", "environment", "callbacks", "logger", *_METHODS)
_SPLITS = {"train", "validation", "test"}


@dataclass(frozen=True)
class ObjectOverrides:
    """Converts Python objects to overrides; each method is named after the part of the settings that it sets."""

    overrides: list[str] = field(default_factory=list)
    """To be applied before those of the user."""
    replaced: list[str] = field(default_factory=list)
    """Parts that an object replaces altogether."""
    objects: dict[str, Any] = field(default_factory=dict)
    """Name -> object, for `grpo_lightning.composition.live_object`."""

    def replace(self, name: str, value: Any) -> None:
        """Let an object stand for a whole part, or for what its settings have at a dotted key."""
        part = name.partition(".")[0]
        method = _METHODS.get(part, "__class__")
        if not hasattr(value, method) or (isinstance(value, type) and method != "__call__"):
            kind = "a function or functools.partial" if method == "__call__" else f"an object with the method {method}"
            raise _mistake(part, value, f"{kind}, as in conf/{part}; settings are texts, such as '{part}=NAME'")
        self.replaced.append(name)
        self.objects[name] = value

    def add(self, key: str, value: Any) -> None:
        """Add an object under a new key of a part."""
        if not isinstance(value, RewardSpec | Callback | loggers.Logger):
            raise _mistake(key, value, "an object of one of Lightning's callbacks or loggers")
        self.overrides.append(f"+{key}={{_target_: {LIVE}, name: {key}}}")
        self.objects[key] = value

    def policy(self, value: Any) -> None:
        """A `Policy`, a path, a module, or a model with its tokenizer."""
        if isinstance(value, Policy):
            return self.replace("policy", value)
        if isinstance(value, str | Path):
            self.overrides.extend(["policy=hf", f"policy.path={quote_value(str(value))}"])
            return None
        model, tokenizer = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if not isinstance(model, nn.Module):
            raise _mistake("policy", value, "(model, tokenizer), a module whose forward(ids) gives logits, or a path")
        is_hf = hasattr(model, "generation_config")
        if is_hf and tokenizer is None:
            raise ValueError("policy: a transformers model needs its tokenizer; hand over (model, tokenizer)")
        self.overrides.append(f"policy={'live' if is_hf else 'plain'}")
        self.objects.update({"policy.model": model, "policy.tokenizer": tokenizer})
        return None

    def reward(self, value: Any, listed: str) -> None:
        """Functions and `RewardSpec` by name, beside those that the user's ``reward=[…]`` lists."""
        if callable(value):
            name = getattr(value, "__name__", "reward")
            value = {name if name.isidentifier() else "reward": value}
        elif isinstance(value, list | tuple) and value and all(map(callable, value)):
            names = [getattr(called := innermost(one), "__name__", type(called).__name__) for one in value]
            if len(set(names)) < len(names):
                raise ValueError(f"reward: several functions are called alike ({', '.join(names)}); give them by name")
            value = dict(zip(names, value, strict=True))
        if not isinstance(value, Mapping) or not value:
            raise _mistake("reward", value, "a function, a list of functions, or a mapping from names to functions")
        if not listed:
            self.overrides.append("reward=[]")
        for name, reward in value.items():
            if not str(name).isidentifier() or name in re.findall(r"\w+", listed.removeprefix("reward=")):
                raise ValueError(f"reward[{name!r}]: a name needs to be like that of a variable, and not in {listed!r}")
            if isinstance(reward, RewardSpec):
                self.add(f"reward.{name}", reward)
            elif callable(reward):
                place = f"reward.{name}.function"
                self.overrides.extend((f"+reward@reward.{name}=live", f"{place}.name={place}"))
                self.objects[place] = reward
            else:
                raise _mistake(f"reward[{name!r}]", reward, "a function or a RewardSpec")

    def environment(self, value: Any) -> None:
        """An `Environment`, its function, or None."""
        if callable(value) and not isinstance(value, Environment):
            self.overrides.append("environment=live")
            self.objects["environment.function"] = value
        elif value is None or isinstance(value, Environment):
            self.replace("environment", value)
        else:
            raise _mistake("environment", value, "a function, a generator function, an Environment or None")

    def data(self, value: Any) -> None:
        """A `PromptData`, a path, or rows: of training, or by split."""
        if isinstance(value, PromptData):
            self.replace("data", value)
        elif isinstance(value, str | Path):
            kind = "jsonl" if str(value).removesuffix(".gz").endswith(SUFFIXES) else "hub"
            self.overrides.extend([f"data={kind}", f"data.path={quote_value(str(value))}"])
        else:
            named = dict(value) if isinstance(value, Mapping) else {"train": value}
            if not named.keys() & _SPLITS or (type(value) is dict and named.keys() - _SPLITS):
                raise _mistake(
                    "data", value, "rows, a data set, a path, a PromptData, or {'train': ROWS, 'test': ROWS}"
                )
            self.overrides.append("data=rows")
            self.objects["data.train"] = indexed_rows(named.get("train"))
            self.objects["data.validation"] = indexed_rows(named.get("validation", named.get("test")))

    def loss(self, value: Any) -> None:
        """A `PolicyLoss`, or a function in place of the surrogate that the settings have."""
        self.replace("loss.surrogate" if callable(value) and not hasattr(value, "kl_coef") else "loss", value)

    def reference(self, value: Any) -> None:
        """A model becomes what ``reference`` settings build: a function of the policy."""
        if isinstance(value, nn.Module):
            self.replace("reference", lambda policy: value if isinstance(value, Policy) else of_model(policy, value))
        else:
            self.replace("reference", value)

    def callbacks(self, value: Any) -> None:
        """Lightning's callbacks, beside those of the settings."""
        for name, callback in _by_name(value).items():
            self.add(f"callbacks.{name}", callback)

    def logger(self, value: Any) -> None:
        """Lightning's loggers and names of conf/logger, in place of those of the settings; False: none."""
        named = _by_name(value)
        self.overrides.append(f"logger=[{','.join(name for name in named.values() if isinstance(name, str))}]")
        for name in (name for name, logger in named.items() if not isinstance(logger, str)):
            self.add(f"logger.{name}", named[name])


def object_overrides(parts: Mapping[str, Any], overrides: Sequence[str]) -> ObjectOverrides:
    """Turn objects into overrides and placeholders.

    Args:
        parts: Name of a group of conf/ -> object.
        overrides: The user's, which may choose a group's file themselves.

    Raises:
        ValueError: There is no such part, an object cannot be one, or an override changes what an object replaces.
    """
    if wrong := [word for word in overrides if not isinstance(word, str)]:
        raise ValueError(f"{wrong[0]!r:.80}: an override needs to be a text, such as 'steps=20'")
    if unknown := sorted(parts.keys() - {*_PARTS}):
        raise ValueError("\n".join(_unknown_part(name, parts[name]) for name in unknown))
    result = ObjectOverrides()
    for name, value in parts.items():
        if name == "reward":
            result.reward(value, "".join(word for word in overrides if word.startswith("reward=")))
        elif hasattr(result, name):
            getattr(result, name)(value)
        else:
            result.replace(name, value)
    keys = {word.lstrip("+").partition("=")[0] for word in result.overrides}
    for word in overrides:
        key = re.split("[=@]", word.lstrip("+~"))[0]
        place = next((name for name in result.objects if f"{key}.".startswith(f"{name}.")), "")
        argument = key.removeprefix(f"{place}.").partition(".")[0] if place.endswith(".function") else "_"
        if key in keys or (place and (key == place or argument.startswith("_"))):
            raise ValueError(f"{word}: {place or key} is given as an object, too; choose one of the two")
        if place and argument not in arguments(result.objects[place], {argument: None})[1]:
            raise ValueError(f"{word}: the function takes no {argument}, or has it bound")
    return result


def _unknown_part(name: str, value: Any) -> str:
    if argument := aliases()["python"].get(name):
        return f"{name}: no such part; compose({argument})"
    text = f"{name}={quote_value(str(value))}"
    if ours := translate_key(name, quote_value(str(value))):
        return f"{text}: {ours}, as a text: compose('KEY=VALUE')"
    return f"{name}: no such part; there are {', '.join(_PARTS)}; anything else is a text, such as compose({text!r})"


def _mistake(name: str, value: Any, needed: str) -> ValueError:
    return ValueError(f"{name}={value!r:.80}: needs {needed}")


def _by_name(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    listed = [] if value is None or value is False else value if isinstance(value, list | tuple) else [value]
    return {f"{type(item).__name__.lower()}_{number}": item for number, item in enumerate(listed)}


def placeholder(name: str, value: Any, node: Any) -> Any:
    """Settings that stand for an object: those of its part, with the object's own values.

    Args:
        name: Of the part.
        value: The object.
        node: The part's settings as composed.
    """
    if value is None:
        return None
    kept: Any = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_dict(node) else {}
    values = {key: getattr(value, key, None) for key in kept if not key.startswith("_")}
    unfit = re.compile(r"\$\{|^(nan|-?inf)$")  # what settings would resolve, or refuse
    plain = {k: v for k, v in values.items() if isinstance(v, bool | int | float | str) and not unfit.search(str(v))}
    return {**kept, **plain, "_target_": LIVE, "_partial_": False, "_recursive_": False, "name": name}
