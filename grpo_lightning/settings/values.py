"""What each setting may be."""

import math

from grpo_lightning.allowed import Rule, choice, integer, number
from grpo_lightning.data import RULES as DATA
from grpo_lightning.reward.engine.weighted import RULES as REWARD

__all__ = ["MAY_VARY", "REWARD", "RULES", "VARYING"]


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

_COPIED = {"steps", "tries", "validate_every"}
"""Settings of the data that are copies of others, which are reported where they are written."""

RULES: dict[str, Rule] = {
    "steps": integer(1),
    "seed": integer(0),
    "mode": choice("fit", "validate", "export"),
    **{f"data.{name}": rule for name, rule in DATA.items() if name not in _COPIED},
    "data.train_size": integer(1),
    "policy.quantization": Rule(lambda v: v in ("8bit", "4bit"), "one of 8bit, 4bit", null=True),
    "rollout.group_size": integer(2),
    "rollout.temperature": _POSITIVE,
    **{f"rollout.{name}": rule for name, rule in _SAMPLING.items()},
    "validation.every": integer(1),
    "validation.samples_per_prompt": integer(1),
    "validation.temperature": _NOT_NEGATIVE,
    **{f"validation.{name}": rule for name, rule in _SAMPLING.items()},
    "rollout.kl_penalty": _NOT_NEGATIVE,
    "rollout.max_tries": integer(1),
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
    "advantage.eps": _NOT_NEGATIVE,
    "advantage.correction": choice(0, 1),
    "optimizer.lr": _NOT_NEGATIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "schedule.warmup_steps": integer(0),
    "callbacks.checkpoint.every": integer(1),
    "policy.dtype": choice("float32", "bfloat16", "float16"),
    "trainer.precision": Rule(
        lambda v: v in ("32-true", "32", 32, "bf16-mixed"),
        "32-true or bf16-mixed (16-mixed would clip gradients before they are unscaled)",
    ),
}


MAY_VARY = ("loss.", "rollout.", "reward.")
"""Keys below which a number may vary with the step; every value that it takes is then checked."""
VARYING = "grpo_lightning.varying."
