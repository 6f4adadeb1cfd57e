"""Settings that are right by themselves and wrong together."""

from collections.abc import Callable, Collection, Mapping
from typing import Any


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, or ``KeyError`` (the class) where there is none."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return KeyError
        node = node[part]
    return node


class Unsound(Exception):
    """A setting that a rule compares is broken or absent."""


Reader = Callable[[str], Any]
"""Key -> its value; raises ``Unsound``."""


def reader(config: Mapping[str, Any], broken: Collection[str]) -> Reader:
    """Reads settings, but not those whose keys are ``broken``."""

    def read(key: str) -> Any:
        value = lookup(config, key)
        if value is KeyError or key in broken:
            raise Unsound(key)
        return value

    return read


def _ks(get: Reader) -> list[str]:
    ks, samples = get("validation.ks"), get("validation.samples_per_prompt")
    if all(isinstance(k, int) and 0 < k <= samples for k in ks):
        return []
    return [f"validation.ks={ks}: allowed are integers from 1 to validation.samples_per_prompt={samples}"]


def _outcome(get: Reader) -> list[str]:
    outcome, rewards = get("rollout.outcome"), get("reward")
    if not rewards:
        return ["reward=[]: allowed is at least one reward"]
    if outcome is None or outcome in rewards:
        return []
    return [f"rollout.outcome={outcome}: allowed is one of the rewards: {', '.join(rewards)} or null"]


def _complete_rewards(get: Reader) -> list[str]:
    chosen = [name for name, reward in get("reward").items() if "_target_" in reward]
    return [
        f"reward.{name}: no such reward was chosen; allowed is reward=[{', '.join([*chosen, name])}]"
        for name in get("reward").keys() - chosen
    ]


def _enough_prompts(get: Reader) -> list[str]:
    prompts, size = get("data.prompts_per_step"), get("data.train_size")
    if prompts <= size:
        return []
    return [
        f"data.prompts_per_step={prompts}: allowed is at most data.train_size={size}, the training prompts there are"
    ]


def _master_weights(get: Reader) -> list[str]:
    if get("mode") != "fit" or (dtype := get("policy.dtype")) == "float32":
        return []
    return [
        f"policy.dtype={dtype}: allowed is float32 for training, with trainer.precision=bf16-mixed for speed: small "
        "updates vanish in 16-bit weights"
    ]


def _divisible(get: Reader) -> list[str]:
    size, completions = get("module.minibatch_size"), get("data.prompts_per_step") * get("rollout.group_size")
    if size is None or completions % size == 0:
        return []
    return [
        f"module.minibatch_size={size}: allowed is a divisor of data.prompts_per_step x rollout.group_size = "
        f"{completions}"
    ]


def _needs_reference(get: Reader) -> list[str]:
    if get("loss.kl_coef") == 0 or get("module.reference._target_") != "grpo_lightning.reference.none":
        return []
    return [f"loss.kl_coef={get('loss.kl_coef')}: allowed is 0 with reference=none; or choose a reference"]


CONTRADICTIONS: tuple[Callable[[Reader], list[str]], ...] = (
    _ks,
    _outcome,
    _complete_rewards,
    _enough_prompts,
    _master_weights,
    _divisible,
    _needs_reference,
)
"""Each says what is wrong between settings that are right by themselves."""
