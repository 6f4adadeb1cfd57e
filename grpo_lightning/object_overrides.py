"""Objects in place of settings: what a program hands to ``compose`` as ``policy=``, ``reward=``, ``data=``, …."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from grpo_lightning.config.rules import LIVE
from grpo_lightning.config.settings import quote_value, translate_key
from grpo_lightning.data import PromptData
from grpo_lightning.data.files import SUFFIXES
from grpo_lightning.environment import Environment
from grpo_lightning.policy import Policy
from grpo_lightning.reference import of_model
from grpo_lightning.reward import RewardSpec
from grpo_lightning.reward.spec import innermost

_REPLACED = ("advantage", "loss", "rollout", "sampler", "validation", "optimizer", "schedule", "correction", "trainer")
"""Parts of which an object is what their settings would build."""
_PARTS = ("reward", "policy", "data", "environment", "reference", "callbacks", "logger", *_REPLACED)
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
        """Let an object stand for a whole part."""
        if isinstance(value, str | int | float | Mapping):
            raise _mistake(name, value, f"an object; settings are texts, such as '{name}=NAME' and '{name}.KEY=VALUE'")
        if name in ("advantage", "optimizer", "schedule") and not callable(value):
            raise _mistake(name, value, "a function, such as functools.partial(torch.optim.AdamW, lr=1e-6)")
        self.replaced.append(name)
        self.objects[name] = value

    def add(self, key: str, value: Any) -> None:
        """Add an object under a new key of a part."""
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
                self.overrides.extend([f"+reward@reward.{name}=live", f"reward.{name}.function.name=reward.{name}"])
                self.objects[f"reward.{name}"] = reward
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
            held_out = named.get("validation", named.get("test"))
            if not named.keys() & {"train", "validation", "test"} or (type(value) is dict and named.keys() - _SPLITS):
                forms = "rows, a data set, a path, a PromptData, or a mapping with train and validation (or test)"
                raise _mistake("data", value, forms)
            self.overrides.append("data=rows")
            self.objects.update({"data.train": _rows(named.get("train")), "data.validation": _rows(held_out)})

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
        loggers = _by_name([] if value is None or value is False else value)
        self.overrides.append(f"logger=[{','.join(name for name in loggers.values() if isinstance(name, str))}]")
        for name, logger in loggers.items():
            if not isinstance(logger, str):
                self.add(f"logger.{name}", logger)


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
    if unknown := sorted(parts.keys() - {*_PARTS}):
        raise ValueError("\n".join(_unknown_part(name, parts[name]) for name in unknown))
    result = ObjectOverrides()
    for name, value in parts.items():
        if name == "reward":
            result.reward(value, "".join(word for word in overrides if word.startswith("reward=")))
        elif name in _REPLACED:
            result.replace(name, value)
        else:
            getattr(result, name)(value)
        taken = tuple(f"{name}{sign}" for sign in ("=.@" if name in result.replaced else "=@"))
        changed = [word for word in overrides if word.lstrip("+~").startswith(taken)]
        if changed and name not in ("reward", "callbacks"):
            raise ValueError(f"{changed[0]}: {name} is given as an object, too; choose one of the two")
    return result


_ELSEWHERE = {
    **dict.fromkeys(("reward_fn", "reward_funcs", "reward_function", "rewards", "reward_model"), "reward=FUNCTION"),
    **dict.fromkeys(("tokenizer", "processing_class"), "policy=(MODEL, TOKENIZER)"),
    **dict.fromkeys(("model", "policy_model", "actor"), "policy=MODEL, or policy=(MODEL, TOKENIZER)"),
    **dict.fromkeys(("ref_model", "ref_policy", "reference_model"), "reference=MODEL"),
    **dict.fromkeys(("dataset", "train_dataset", "prompts"), "data=ROWS"),
    **dict.fromkeys(("eval_dataset", "validation"), "data={'train': ROWS, 'validation': ROWS}"),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "schedule=FUNCTION"),
    **dict.fromkeys(("args", "config"), "texts, one for each setting"),
}
"""What other programs call a part -> what `compose` takes for it."""


def _unknown_part(name: str, value: Any) -> str:
    if name in _ELSEWHERE:
        return f"{name}: no such part; compose({_ELSEWHERE[name]})"
    text = f"{name}={quote_value(str(value))}"
    if ours := translate_key(name, quote_value(str(value))):
        return f"{text}: {ours}, as a text: compose('KEY=VALUE')"
    return f"{name}: no such part; there are {', '.join(_PARTS)}; anything else is a text, such as compose({text!r})"


def _mistake(name: str, value: Any, needed: str) -> ValueError:
    return ValueError(f"{name}={value!r:.80}: needs {needed}")


def _rows(rows: Any) -> Any:
    """Rows by index; those of a table of pandas as mappings."""
    if hasattr(rows, "to_dict") and hasattr(rows, "iloc"):
        return rows.to_dict("records")
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__") and not hasattr(rows, "__iter__"):
        return [rows[index] for index in range(len(rows))]  # such as a torch Dataset
    if rows is None or (hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, str)):
        return rows
    take = "list(data.take(1000))" if hasattr(rows, "take") else "list(itertools.islice(data, 1000))"
    raise _mistake("data", rows, f"rows by index; of a stream, take some: {take}")


def _by_name(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    listed = value if isinstance(value, list | tuple) else [value]
    return {f"{type(item).__name__.lower()}_{number}": item for number, item in enumerate(listed)}


def placeholder(name: str, value: Any, node: Any) -> Any:
    """Settings that stand for an object: those of its part, with the object's own values.

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
