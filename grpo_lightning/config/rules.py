"""What the value of each setting may be."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lightning.config.settings import leaves, value_at
from grpo_lightning.console import single_line

LIVE = "grpo_lightning.composition.part"
"""The ``_target_`` that stands for an object that a program has given to compose, by its name."""
REPLY_ROLES = ("user", "tool")
"""Chat roles of an environment."""
_SCHEDULE = "grpo_lightning.schedule."
_SCHEDULED = ("loss.", "correction.", "rollout.", "reward.")
"""Keys below which a number may be a schedule; every value that it takes is checked."""
_MISSING = object()


@dataclass(frozen=True)
class Rule:
    """What a value must be: ``test`` accepts it, ``allowed`` says so in words."""

    test: Callable[[Any], bool]
    allowed: str
    null: bool = False

    def problem(self, key: str, value: Any) -> str | None:
        """What is wrong with ``key=value``, and what it must be; None if nothing is wrong."""
        if self.null if value is None else self.test(value):
            return None
        return f"{key}={'null' if value is None else value}: must be {self.allowed}{' or null' * self.null}"


def integer(low: int, high: int | None = None, *, null: bool = False) -> Rule:
    """A whole number, at least ``low`` and, unless it is None, at most ``high``."""
    return Rule(
        lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low and (high is None or v <= high),
        f"an integer >= {low}" if high is None else f"an integer from {low} to {high}",
        null,
    )


def number(test: Callable[[float], bool], allowed: str, *, null: bool = False) -> Rule:
    """A finite number that passes ``test``."""
    return Rule(
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and test(v), allowed, null
    )


def choice(*values: Any, null: bool = False) -> Rule:
    """One of ``values``."""
    return Rule(lambda v: v in values and not isinstance(v, bool), "one of " + ", ".join(map(str, values)), null)


def flag() -> Rule:
    """True or false."""
    return Rule(lambda v: isinstance(v, bool), "true or false")


def is_pair(value: Any) -> bool:
    """Whether a value is a list of two finite numbers."""
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_FINITE.test, value))


def problems(rules: Mapping[str, Rule], values: Mapping[str, Any], *, prefix: str = "") -> list[str]:
    """What is wrong with ``values``, each named by its key behind ``prefix``."""
    found = (rules[name].problem(f"{prefix}{name}", value) for name, value in values.items() if name in rules)
    return [problem for problem in found if problem]


def model_path() -> Rule:
    """A directory that exists, or what can be a name of the hub, see `local_or_hub`."""

    def exists(value: Any) -> bool:
        try:
            return isinstance(value, str) and (value.startswith("pkg://") or bool(local_or_hub(value, "")))
        except ValueError:
            return False

    return Rule(exists, "a directory that exists, or NAME or ORG/NAME of the hub")


def local_or_hub(path: str, key: str) -> str:
    """``path`` with ``~`` as the home directory; one that can only be of this machine has to exist.

    A name of the hub is NAME or ORG/NAME. What begins with ``/``, ``.`` or ``~``, ends with a slash, has two slashes or
    more, or whose first part is a directory here, is a path: the hub is not asked for it.

    Args:
        path: A directory or a file, or a name of the hub.
        key: Of the setting, for the message.

    Raises:
        ValueError: There is no such path.
    """
    expanded = Path(path).expanduser() if path.startswith("~") else Path(path)
    first = expanded.parts[0] if expanded.parts else ""
    is_local = path.startswith(("/", ".", "~", "\\")) or path.endswith("/") or path.count("/") > 1
    if not (is_local or ("/" in path and Path(first).is_dir())) or expanded.exists():
        return str(expanded) if path.startswith("~") else path
    raise ValueError(f"{key}={path!r}: no such file or directory; give one that exists, or NAME or ORG/NAME of the hub")


def messages_problem(messages: Sequence[Mapping[str, str]]) -> str | None:
    """Why chat messages do not alternate between the model and one reply, from the model to the model; None if so."""
    for index, message in enumerate(messages):
        roles = REPLY_ROLES if index % 2 else ("assistant",)
        if message["role"] not in roles:
            return f"message {index + 1} is the {message['role']}'s and should be the {' or '.join(roles)}'s"
        if not index % 2 and not message["content"]:
            return f"message {index + 1} is empty"
    return None if len(messages) % 2 else "it does not end with a message of the assistant"


_FINITE = number(lambda _: True, "a finite number")
_NOT_NEGATIVE = number(lambda v: v >= 0, "a number >= 0")
_POSITIVE = number(lambda v: v > 0, "a number > 0")
_BELOW_ONE = number(lambda v: 0 <= v < 1, "a number in [0, 1)")
_ABOVE_ONE = number(lambda v: v > 1, "a number > 1", null=True)
_SHARE = number(lambda v: 0 < v <= 1, "a number in (0, 1]")
_SECONDS = number(lambda v: v > 0, "seconds > 0", null=True)
_GIB = number(lambda v: v > 0, "GiB > 0", null=True)
_DTYPES = ("float32", "bfloat16", "float16")
_ATTENTION = choice("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")


DATA = {
    "prompts_per_step": integer(1),
    "tries": integer(1),
    "steps": integer(0),
    "validate_every": integer(0, null=True),
    "validation_size": integer(1),
    "validation_batch_size": integer(1),
    "max_prompt_length": integer(1, null=True),
    "num_workers": integer(0),
}
REWARD = {
    "weight": _FINITE,
    "timeout": _SECONDS,
    "max_failed": number(lambda v: 0 <= v <= 1, "a fraction from 0 to 1"),
    "failed_score": number(math.isfinite, "a finite number", null=True),
    "retries": integer(0),
    "concurrency": integer(1),
    "clip": Rule(lambda v: is_pair(v) and v[0] <= v[1], "[lowest, highest]", null=True),
    "messages": flag(),
}
ENVIRONMENT = {
    **{name: REWARD[name] for name in ("timeout", "max_failed", "failed_score")},
    "max_turns": integer(1),
    "max_reply": integer(100),
    "role": choice(*REPLY_ROLES, null=True),
}
_SAMPLER = {
    "dtype": choice(*_DTYPES, null=True),
    "max_model_len": integer(2, null=True),
    "gpu_memory_utilization": _SHARE,
    "kv_cache_gib": _GIB,
    "enforce_eager": flag(),
    "sleep": flag(),
    "timeout": number(lambda v: v > 0, "seconds > 0"),
}
_GENERATION = {
    "top_p": _SHARE,
    "top_k": integer(0),
    "min_p": _BELOW_ONE,
    "max_new_tokens": integer(1),
    "kv_cache_gib": _GIB,
    "threshold": _FINITE,
    "stop": Rule(
        lambda v: isinstance(v, list) and all(isinstance(text, str) and text for text in v),
        'a list of texts that are not empty, quoted if they are numbers: rollout.stop=["7"]',
    ),
}
_MODEL = {"path": model_path(), "attn_implementation": _ATTENTION}
_EVERY = integer(1)

RULES: dict[str, Rule] = {
    "steps": integer(0),
    "seed": integer(0, 2**32 - 1),  # the range of numpy's generator, which Lightning seeds
    "mode": choice("fit", "validate", "export", "preflight"),
    "preflight.prompts": integer(1),
    "task_name": Rule(lambda v: isinstance(v, str) and bool(v), "a text that is not empty"),
    "tags": Rule(lambda v: isinstance(v, list) and all(isinstance(t, str) for t in v), "a list of texts, as in [a,b]"),
    **{f"data.{name}": DATA[name] for name in DATA if name not in ("steps", "tries", "validate_every")},  # are copies
    "data.train_size": integer(1),
    **{f"{part}.{name}": rule for part in ("policy", "reference") for name, rule in _MODEL.items()},
    "policy.dtype": choice(*_DTYPES),
    "policy.quantization": choice("8bit", "4bit", null=True),
    "policy.activation_offload": flag(),
    "policy.chat_template": Rule(lambda v: isinstance(v, str), "a file with a Jinja template", null=True),
    "policy.system_prompt": Rule(lambda v: isinstance(v, str), "a text", null=True),
    "policy.reply_role": choice(*REPLY_ROLES, null=True),
    "reference.dtype": choice(*_DTYPES, null=True),
    **{f"{part}.{name}": rule for part in ("rollout", "validation") for name, rule in _GENERATION.items()},
    "rollout.group_size": integer(2),
    "rollout.temperature": _POSITIVE,
    "rollout.kl_penalty": _NOT_NEGATIVE,
    "rollout.max_tries": integer(1),
    "rollout.rescore": flag(),
    "rollout.downsample.size": integer(2),
    "rollout.top_entropy": _SHARE,
    "validation.every": integer(1),
    "validation.samples_per_prompt": integer(1),
    "validation.temperature": _NOT_NEGATIVE,
    "validation.ks": Rule(
        lambda v: isinstance(v, list | tuple) and all(map(integer(1).test, v)),
        "a list of integers >= 1, such as [1, 4]",
    ),
    **{f"sampler.{name}": rule for name, rule in _SAMPLER.items()},
    **{f"environment.{name}": rule for name, rule in ENVIRONMENT.items()},
    "module.ppo_epochs": integer(1),
    "module.minibatch_size": integer(1, null=True),
    "module.microbatch_tokens": integer(1),
    "module.max_grad_norm": _POSITIVE,
    "module.max_skipped": integer(0),
    "loss.kl_coef": _NOT_NEGATIVE,
    "loss.entropy_coef": _NOT_NEGATIVE,
    "loss.surrogate.epsilon_low": number(lambda v: 0 < v < 1, "a number in (0, 1)"),
    "loss.surrogate.epsilon_high": _POSITIVE,
    "loss.surrogate.dual_clip": _ABOVE_ONE,
    "loss.surrogate.delta": _ABOVE_ONE,
    "loss.surrogate.ratio_max": number(lambda v: v > 1, "a ratio > 1, not a distance from 1"),
    "loss.surrogate.tau_positive": _POSITIVE,
    "loss.surrogate.tau_negative": _POSITIVE,
    "loss.weights.length": integer(1),
    "correction.cap": number(lambda v: v >= 1, "a ratio >= 1"),
    "correction.low": number(lambda v: 0 <= v < 1, "a ratio in [0, 1)"),
    "correction.high": number(lambda v: v > 1, "a ratio > 1"),
    "advantage.eps": _NOT_NEGATIVE,
    "advantage.correction": choice(0, 1),
    "optimizer.lr": _NOT_NEGATIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "schedule.warmup_steps": integer(0),
    "callbacks.samples.max_rows": integer(1),
    "callbacks.samples.max_characters": integer(1),
    "callbacks.doctor.stop": flag(),
    "trainer.accelerator": choice("auto", "cpu", "gpu", "cuda", "mps"),
    "trainer.devices": Rule(
        lambda v: isinstance(v, int | list) or bool(re.fullmatch(r"auto|-1|\d+(,\d+)*,?", str(v))),
        "a number, auto or -1 for all, or a list of the GPUs' numbers such as [0, 2]",
    ),
    "trainer.num_nodes": integer(1),
    "trainer.strategy.timeout": number(lambda v: v > 0, "minutes > 0"),
    "trainer.precision": Rule(
        lambda v: v in ("32-true", "32", 32, "bf16-mixed"),
        "32-true or bf16-mixed (16-mixed would clip gradients before they are unscaled)",
        null=True,
    ),
}
"""Dotted key -> what its value must be."""


def value_problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every value that breaks its rule or is not finite, as pairs of its key and what is wrong."""
    rules = RULES | {
        f"reward.{name}.{key}": rule for name in config.get("reward") or {} for key, rule in REWARD.items()
    }
    for name, callback in (config.get("callbacks") or {}).items():
        if str(value_at(callback, "_target_")).startswith("grpo_lightning.callbacks."):
            rules[f"callbacks.{name}.every"] = _EVERY
    for key, rule in rules.items():
        for name, value in scheduled_values(key, value_at(config, key, _MISSING)):
            if value is not _MISSING and (problem := rule.problem(name, value)):
                yield key, single_line(problem)
    for key, value in leaves(config):
        if isinstance(value, float) and not math.isfinite(value) and not {key, key.rpartition(".")[0]} & rules.keys():
            yield key, f"{key}={value}: must be a finite number"


def scheduled_values(key: str, value: Any) -> list[tuple[str, Any]]:
    """Every value that a number takes during a run, several if it is a schedule, as pairs of key and value."""
    if not (key.startswith(_SCHEDULED) and str(value_at(value, "_target_")).startswith(_SCHEDULE)):
        return [(key, value)]
    named = [(f"{key}.{name}", value[name]) for name in ("start", "end", "lowest", "highest") if name in value]
    listed = value.get("values")
    return named + [(f"{key}.values.{i}", item) for i, item in enumerate(listed if isinstance(listed, list) else ())]
