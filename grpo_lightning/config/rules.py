"""What the value of each setting may be."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lightning.config.settings import command_name, leaves, value_at
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
_SHARE = number(lambda v: 0 < v <= 1, "a number in (0, 1]")
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
    "timeout": number(lambda v: v > 0, "seconds > 0", null=True),
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


def _each(rule: Rule, *keys: str) -> dict[str, Rule]:
    """The same rule for some keys; those of sampling also for validation."""
    sampling = [key.replace("rollout.", "validation.", 1) for key in keys if key in _SAMPLING]
    return dict.fromkeys([*keys, *sampling], rule)


_SAMPLING = tuple(
    f"rollout.{name}" for name in ("top_p", "top_k", "min_p", "max_new_tokens", "stop", "kv_cache_gib", "threshold")
)
RULES: dict[str, Rule] = {
    **_each(integer(0), "steps", "rollout.top_k", "module.max_skipped", "schedule.warmup_steps"),
    **_each(integer(1), "preflight.prompts", "data.train_size", "rollout.max_new_tokens", "rollout.max_tries"),
    **_each(integer(1), "validation.every", "validation.samples_per_prompt", "loss.weights.length"),
    **_each(integer(1), "module.ppo_epochs", "module.microbatch_tokens"),
    **_each(integer(1, null=True), "module.minibatch_size"),
    **_each(integer(2), "rollout.group_size", "rollout.downsample.size"),
    **_each(integer(2, null=True), "sampler.max_model_len"),
    "seed": integer(0, 2**32 - 1),  # the range of numpy's generator, which Lightning seeds
    **_each(_FINITE, "rollout.threshold"),
    **_each(_NOT_NEGATIVE, "rollout.kl_penalty", "validation.temperature", "loss.kl_coef", "loss.entropy_coef"),
    **_each(_NOT_NEGATIVE, "advantage.eps", "optimizer.lr", "optimizer.weight_decay"),
    **_each(_POSITIVE, "rollout.temperature", "module.max_grad_norm", "loss.surrogate.epsilon_high"),
    **_each(_POSITIVE, "loss.surrogate.tau_positive", "loss.surrogate.tau_negative"),
    **_each(_SHARE, "rollout.top_p", "rollout.top_entropy", "sampler.gpu_memory_utilization"),
    **_each(number(lambda v: 0 <= v < 1, "a number in [0, 1)"), "rollout.min_p", "correction.low"),
    **_each(number(lambda v: v > 0, "GiB > 0", null=True), "rollout.kv_cache_gib", "sampler.kv_cache_gib"),
    **_each(number(lambda v: v > 1, "a number > 1", null=True), "loss.surrogate.dual_clip", "loss.surrogate.delta"),
    "loss.surrogate.epsilon_low": number(lambda v: 0 < v < 1, "a number in (0, 1)"),
    "loss.surrogate.ratio_max": number(lambda v: v > 1, "a ratio > 1, not a distance from 1"),
    "correction.cap": number(lambda v: v >= 1, "a ratio >= 1"),
    "correction.high": number(lambda v: v > 1, "a ratio > 1"),
    "advantage.correction": choice(0, 1),
    "mode": choice("fit", "validate", "export", "preflight"),
    **_each(flag(), "rollout.rescore", "policy.activation_offload", "callbacks.doctor.stop"),
    **_each(model_path(), "policy.path", "reference.path"),
    **_each(_ATTENTION, "policy.attn_implementation", "reference.attn_implementation"),
    "policy.dtype": choice(*_DTYPES),
    "policy.quantization": choice("8bit", "4bit", null=True),
    "policy.chat_template": Rule(lambda v: isinstance(v, str), "a file with a Jinja template", null=True),
    "policy.system_prompt": Rule(lambda v: isinstance(v, str), "a text", null=True),
    "policy.reply_role": choice(*REPLY_ROLES, null=True),
    "tags": Rule(lambda v: isinstance(v, list) and all(isinstance(t, str) for t in v), "a list of texts, as in [a,b]"),
    **{f"data.{name}": DATA[name] for name in DATA if name not in ("steps", "tries", "validate_every")},  # are copies
    **{f"environment.{name}": rule for name, rule in ENVIRONMENT.items()},
    **_each(
        Rule(
            lambda v: isinstance(v, list) and all(isinstance(text, str) and text for text in v),
            'a list of texts that are not empty, quoted if they are numbers: rollout.stop=["7"]',
        ),
        "rollout.stop",
    ),
    "validation.ks": Rule(
        lambda v: isinstance(v, list | tuple) and all(map(integer(1).test, v)),
        "a list of integers >= 1, such as [1, 4]",
    ),
    "trainer.accelerator": choice("auto", "cpu", "gpu", "cuda", "mps"),
    "trainer.devices": Rule(
        lambda v: isinstance(v, int | list) or bool(re.fullmatch(r"auto|-1|\d+(,\d+)*,?", str(v))),
        "a number, auto or -1 for all, or a list of the GPUs' numbers such as [0, 2]",
    ),
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
            rules[f"callbacks.{name}.every"] = integer(1)
    for key, rule in rules.items():
        for name, value in scheduled_values(key, value_at(config, key, _MISSING)):
            if value is not _MISSING and (problem := rule.problem(name, value)):
                yield key, single_line(problem + _how_to_make(key, value))
    for key, value in leaves(config):
        if isinstance(value, float) and not math.isfinite(value) and not {key, key.rpartition(".")[0]} & rules.keys():
            yield key, f"{key}={value}: must be a finite number"


def _how_to_make(key: str, value: Any) -> str:
    """The command that makes a missing policy which is an experiment's export."""
    made = re.fullmatch(r"(?:\./)?runs/((?:calculator|guess)_taught|sft_tiny)/export", str(value))
    if key != "policy.path" or not made:
        return ""
    return f"; `{command_name()} experiment={made[1]} hydra.run.dir=runs/{made[1]}` makes this one"


def scheduled_values(key: str, value: Any) -> list[tuple[str, Any]]:
    """Every value that a number takes during a run, several if it is a schedule, as pairs of key and value."""
    if not (key.startswith(_SCHEDULED) and str(value_at(value, "_target_")).startswith(_SCHEDULE)):
        return [(key, value)]
    named = [(f"{key}.{name}", value[name]) for name in ("start", "end", "lowest", "highest") if name in value]
    listed = value.get("values")
    return named + [(f"{key}.values.{i}", item) for i, item in enumerate(listed if isinstance(listed, list) else ())]
