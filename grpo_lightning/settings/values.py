"""What each setting may be."""

import math
import re
from collections.abc import Mapping
from typing import Any

from grpo_lightning.allowed import DATA, REPLY_ROLES, Rule, choice, flag, integer, model_path, number
from grpo_lightning.environment.environment import RULES as ENVIRONMENT
from grpo_lightning.reward.spec import RULES as REWARD
from grpo_lightning.sampler.vllm.arguments import RULES as SAMPLER

__all__ = ["MAY_VARY", "REWARD", "RULES", "VARYING", "rules_of"]


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
