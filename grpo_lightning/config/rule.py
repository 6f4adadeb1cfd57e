"""What each setting may be."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_lightning.reward.gate import Gate


@dataclass(frozen=True)
class Rule:
    """What a value must be: ``test`` accepts it, ``allowed`` says so in words."""

    test: Callable[[Any], bool]
    allowed: str
    null: bool = False

    def problem(self, key: str, value: Any) -> str | None:
        """What is wrong with ``key=value``, if anything."""
        if value is None and self.null:
            return None
        if value is not None and self.test(value):
            return None
        null = " or null" if self.null else ""
        return f"{key}={'null' if value is None else value}: allowed is {self.allowed}{null}"


def integer(low: int, *, null: bool = False) -> Rule:
    """A whole number, at least ``low``."""
    return Rule(lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low, f"an integer >= {low}", null)


def number(test: Callable[[float], bool], allowed: str, *, null: bool = False) -> Rule:
    """A finite number that passes ``test``."""
    return Rule(
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and test(v), allowed, null
    )


def choice(*values: Any) -> Rule:
    """One of ``values``."""
    return Rule(lambda v: v in values and not isinstance(v, bool), "one of " + ", ".join(map(str, values)))


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

RULES: dict[str, Rule] = {
    "steps": integer(1),
    "seed": integer(0),
    "mode": choice("fit", "validate", "export"),
    "data.prompts_per_step": integer(1),
    "data.max_prompt_length": integer(1, null=True),
    "data.train_size": integer(1),
    "data.validation_size": integer(1),
    "data.validation_batch_size": integer(1),
    "data.num_workers": integer(0),
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


def _is_condition(value: Any) -> bool:
    try:
        return Gate.parse(value) is not None
    except ValueError:
        return False


REWARD = {
    "weight": number(math.isfinite, "a finite number"),
    "timeout": number(lambda v: v > 0, "seconds > 0", null=True),
    "max_failed": number(lambda v: 0 <= v <= 1, "a share from 0 to 1"),
    "failed_score": number(math.isfinite, "a finite number", null=True),
    "clip": Rule(
        lambda v: (
            isinstance(v, list)
            and len(v) == 2
            and all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in v)
            and v[0] <= v[1]
        ),
        "[lowest, highest]",
        null=True,
    ),
    "only_if": Rule(
        _is_condition,
        'a condition on another reward, such as "format > 0"',
        null=True,
    ),
}
"""Setting of a reward -> what it may be."""
MAY_VARY = ("loss.", "rollout.", "reward.")
"""Where a number may be a varying one, in place of which its values are checked."""
VARYING = "grpo_lightning.varying."
