"""What the value of each setting may be."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from grpo_lightning.config.shell import format_override

LIVE = "grpo_lightning.composition.part"
"""Stands in settings for an object that a program has given to compose, by its name."""
REPLY_ROLES = ("user", "tool")
"""Who may reply to a model."""


@dataclass(frozen=True)
class Rule:
    """What a value must be: ``test`` accepts it, ``allowed`` says so in words."""

    test: Callable[[Any], bool]
    allowed: str
    null: bool = False

    def problem(self, key: str, value: Any) -> str | None:
        """What is wrong with ``key=value``, and what is allowed instead; None if nothing is wrong."""
        if value is None and self.null:
            return None
        if value is not None and self.test(value):
            return None
        null = " or null" if self.null else ""
        return f"{key}={'null' if value is None else value}: allowed is {self.allowed}{null}"


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


def is_pair(value: Any) -> bool:
    """Whether a value is a list of two finite numbers."""
    is_finite = number(lambda _: True, "").test
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_finite, value))


def choice(*values: Any, null: bool = False) -> Rule:
    """One of ``values``."""
    return Rule(lambda v: v in values and not isinstance(v, bool), "one of " + ", ".join(map(str, values)), null)


def flag() -> Rule:
    """True or false."""
    return Rule(lambda v: isinstance(v, bool), "true or false")


def problems(rules: Mapping[str, Rule], values: Mapping[str, Any], *, prefix: str = "") -> list[str]:
    """What is wrong with ``values``, each named by its key behind ``prefix``."""
    reported = (rules[name].problem(f"{prefix}{name}", value) for name, value in values.items() if name in rules)
    return [problem for problem in reported if problem]


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
"""Number of the data -> what it may be."""


def model_path() -> Rule:
    """A directory that exists, or what can be a name of the hub, see `local_or_hub`."""

    def is_found(value: Any) -> bool:
        if isinstance(value, Mapping):  # a text of a program
            return True
        try:
            return isinstance(value, str) and bool(value.startswith("pkg://") or local_or_hub(value, ""))
        except ValueError:
            return False

    return Rule(is_found, "text: a directory that exists, or NAME or ORG/NAME of the hub")


def local_or_hub(path: str, key: str) -> str:
    """``path`` with ``~`` as the home directory; one that can only be of this machine has to exist.

    A name of the hub is NAME or ORG/NAME. What begins with ``/``, ``.`` or ``~``, ends with a slash, has two slashes or
    more, or whose first part is a directory here, is a path: the hub is not asked for it.

    Args:
        path: A directory or a file, or a name of the hub.
        key: Of the setting, for the message.

    Raises:
        ValueError: There is no such path; names the nearest that there is.
    """
    expanded = Path(path).expanduser() if path.startswith("~") else Path(path)
    first = expanded.parts[0] if expanded.parts else ""
    is_local = path.startswith(("/", ".", "~", "\\")) or path.endswith("/") or path.count("/") > 1
    if not (is_local or ("/" in path and Path(first).is_dir())) or expanded.exists():
        return str(expanded) if path.startswith("~") else path
    there = [one.name for one in expanded.parent.iterdir()] if expanded.parent.is_dir() else []
    near = get_close_matches(expanded.name, there, n=1)
    hint = f" (there is {format_override(key, expanded.parent / near[0])})" if near else ""
    raise ValueError(
        f"{key}={path!r}: no such file or directory{hint}; allowed is one that exists, or NAME or ORG/NAME of the hub"
    )


def messages_problem(messages: Sequence[Mapping[str, str]]) -> str | None:
    """Why chat messages are not turns of a model, each but the last with one reply; None where they are."""
    for number, message in enumerate(messages):
        allowed = REPLY_ROLES if number % 2 else ("assistant",)
        if message["role"] not in allowed:
            return f"message {number + 1} is the {message['role']}'s and should be the {' or '.join(allowed)}'s"
        if not number % 2 and not message["content"]:
            return f"message {number + 1} is empty"
    return None if len(messages) % 2 else "it does not end with a message of the assistant"


REWARD = {
    "weight": number(math.isfinite, "a finite number"),
    "timeout": number(lambda v: v > 0, "seconds > 0", null=True),
    "max_failed": number(lambda v: 0 <= v <= 1, "a fraction from 0 to 1"),
    "failed_score": number(math.isfinite, "a finite number", null=True),
    "retries": integer(0),
    "concurrency": integer(1),
    "clip": Rule(lambda v: is_pair(v) and v[0] <= v[1], "[lowest, highest]", null=True),
    "messages": flag(),
}
"""What each setting of a reward may be."""
ENVIRONMENT = {
    "max_turns": integer(1),
    "timeout": number(lambda v: v > 0, "seconds > 0", null=True),
    "max_failed": number(lambda v: 0 <= v <= 1, "a fraction from 0 to 1"),
    "failed_score": number(math.isfinite, "a finite number", null=True),
    "max_reply": integer(100),
    "role": Rule(lambda v: v in REPLY_ROLES, f"one of {', '.join(REPLY_ROLES)}", null=True),
}
"""What each setting of an environment may be."""
SAMPLER: Mapping[str, Rule] = {
    "dtype": Rule(choice("float32", "bfloat16", "float16").test, "float32, bfloat16 or float16", null=True),
    "max_model_len": integer(2, null=True),
    "gpu_memory_utilization": number(lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "kv_cache_gib": number(lambda v: v > 0, "GiB > 0", null=True),
    "tensor_parallel_size": integer(1),
    "enforce_eager": flag(),
    "sleep": flag(),
    "timeout": number(lambda v: v > 0, "seconds > 0"),
}
"""What each setting of ``sampler`` may be."""

_SAMPLING = {
    "top_p": number(lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "top_k": integer(0),
    "min_p": number(lambda v: 0 <= v < 1, "a number in [0, 1)"),
    "max_new_tokens": integer(1),
    "stop": Rule(
        lambda v: isinstance(v, list) and all(isinstance(text, str) and text for text in v),
        'a list of texts that are not empty, quoted if they are numbers: rollout.stop=["7"]',
    ),
    "threshold": number(math.isfinite, "a finite number"),
}
_NOT_NEGATIVE = number(lambda v: v >= 0, "a number >= 0")
_POSITIVE = number(lambda v: v > 0, "a number > 0")

_LARGEST_SEED = 2**32 - 1
"""What numpy's generator takes, which Lightning seeds as well."""


def _are_betas(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_FRACTION.test(beta) for beta in value)


def _are_devices(value: Any) -> bool:
    if isinstance(value, str):
        if not re.fullmatch(r"auto|-1|\d+(,\d+)*,?", value):
            return False
        return "," in value or value != "0"
    if isinstance(value, list | tuple):
        return bool(value) and len(set(value)) == len(value) and all(integer(0).test(number) for number in value)
    return value == -1 or integer(1).test(value)


_FRACTION = number(lambda v: 0 <= v < 1, "a number in [0, 1)")
_ATTENTION = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")

_COPIED = {"steps", "tries", "validate_every"}
"""Settings of the data that are copies of others, which are reported where they are written."""

EVERY = integer(1)
"""Of callbacks: steps between two times that one acts."""

RULES: dict[str, Rule] = {
    "steps": integer(1),
    "seed": integer(0, _LARGEST_SEED),
    "mode": choice("fit", "validate", "export", "preflight"),
    "preflight.prompts": integer(1),
    "task_name": Rule(lambda v: isinstance(v, str) and bool(v), "a text that is not empty"),
    "tags": Rule(lambda v: isinstance(v, list) and all(isinstance(t, str) for t in v), "a list of texts, as in [a,b]"),
    **{f"data.{name}": rule for name, rule in DATA.items() if name not in _COPIED},
    "data.train_size": integer(1),
    "policy.quantization": Rule(lambda v: v in ("8bit", "4bit"), "one of 8bit, 4bit", null=True),
    "policy.activation_offload": flag(),
    "policy.system_prompt": Rule(
        lambda v: isinstance(v, str), "a text", null=True
    ),  # no object, which templates could use
    "policy.reply_role": Rule(lambda v: v in REPLY_ROLES, "one of user, tool", null=True),
    "rollout.group_size": integer(2),
    "rollout.temperature": _POSITIVE,
    **{f"rollout.{name}": rule for name, rule in _SAMPLING.items()},
    "validation.every": integer(1),
    "validation.ks": Rule(
        lambda v: isinstance(v, list | tuple) and all(integer(1).test(k) for k in v),
        "a list of integers >= 1, such as [1, 4]",
    ),
    "validation.samples_per_prompt": integer(1),
    "validation.temperature": _NOT_NEGATIVE,
    **{f"validation.{name}": rule for name, rule in _SAMPLING.items()},
    **{f"{part}.kv_cache_gib": number(lambda v: v > 0, "GiB > 0", null=True) for part in ("rollout", "validation")},
    **{f"sampler.{name}": rule for name, rule in SAMPLER.items()},
    **{f"environment.{name}": rule for name, rule in ENVIRONMENT.items()},
    "rollout.kl_penalty": _NOT_NEGATIVE,
    "rollout.max_tries": integer(1),
    "rollout.rescore": flag(),
    "rollout.downsample.size": integer(2),
    "rollout.top_entropy": number(lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "module.ppo_epochs": integer(1),
    "module.minibatch_size": integer(1, null=True),
    "module.microbatch_tokens": integer(1),
    "module.max_grad_norm": _POSITIVE,
    "module.max_skipped": integer(0),
    "loss.kl_coef": _NOT_NEGATIVE,
    "loss.entropy_coef": _NOT_NEGATIVE,
    "loss.surrogate.epsilon_low": number(lambda v: 0 < v < 1, "a number in (0, 1)"),
    "loss.surrogate.epsilon_high": _POSITIVE,
    "loss.surrogate.dual_clip": number(lambda v: v > 1, "a number > 1", null=True),
    "loss.surrogate.delta": number(lambda v: v > 1, "a number > 1", null=True),
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
    "optimizer.betas": Rule(_are_betas, "two numbers in [0, 1), such as [0.9, 0.999]"),
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "schedule.warmup_steps": integer(0),
    **{
        f"callbacks.{name}.every": EVERY
        for name in ("checkpoint", "samples", "progress", "rollouts", "reference", "reward_model")
    },
    "callbacks.samples.max_rows": integer(1),
    "callbacks.samples.max_characters": integer(1),
    "callbacks.doctor.stop": flag(),
    "policy.attn_implementation": choice(*_ATTENTION),
    "reference.attn_implementation": choice(*_ATTENTION),
    "trainer.accelerator": choice("auto", "cpu", "gpu", "cuda", "mps"),
    "trainer.devices": Rule(
        _are_devices, "an integer >= 1, auto or -1 for all, or a list of the GPUs' numbers such as [0, 2]"
    ),
    "trainer.num_nodes": integer(1),
    "trainer.strategy.timeout": number(lambda v: v > 0, "minutes > 0"),
    "policy.path": model_path(),
    "reference.path": model_path(),
    "policy.dtype": choice("float32", "bfloat16", "float16"),
    "reference.dtype": choice("float32", "bfloat16", "float16", null=True),
    "trainer.precision": Rule(
        lambda v: v in ("32-true", "32", 32, "bf16-mixed"),
        "32-true or bf16-mixed (16-mixed would clip gradients before they are unscaled)",
        null=True,
    ),
}


MAY_VARY = ("loss.", "correction.", "rollout.", "reward.")
"""Keys below which a number may vary with the step; every value that it takes is then checked."""
VARYING = "grpo_lightning.schedule."


def rules_of(config: Mapping[str, Any]) -> dict[str, Rule]:
    """Dotted key -> rule, with those of every reward and of every callback of this project, under whatever name."""
    rewards, callbacks = config.get("reward") or {}, config.get("callbacks") or {}
    rules = RULES | {f"reward.{name}.{setting}": rule for name in rewards for setting, rule in REWARD.items()}
    for name, callback in callbacks.items():
        if isinstance(callback, Mapping) and str(callback.get("_target_")).startswith("grpo_lightning.callbacks."):
            rules[f"callbacks.{name}.every"] = EVERY
    if "AdEMAMix" in str((config.get("optimizer") or {}).get("_target_")):
        del rules["optimizer.betas"]  # three of them
    return rules
