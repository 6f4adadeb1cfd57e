"""Settings that are right by themselves and wrong together."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from grpo_lightning.distributed.chosen import settings_shard
from grpo_lightning.output.shell import typed
from grpo_lightning.settings.walk import HELD


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
"""Dotted key -> value; raises ``Unsound`` where there is none that can be relied on."""


def reader(config: Mapping[str, Any], broken: Collection[str]) -> Reader:
    """A function that reads settings by key, and raises ``Unsound`` for keys that are ``broken`` or absent."""

    def read(key: str) -> Any:
        value = lookup(config, key)
        if value is KeyError or key in broken:
            raise Unsound(key)
        return value

    return read


def _parts_of_module(get: Reader) -> list[str]:
    module = get("module")
    return [
        f"module.{part}: allowed is what {part} says, such as {part}=NAME: checks and summaries look there"
        for part in HELD["module"]
        if part in module and module[part] != get(part)
    ]


def _ks(get: Reader) -> list[str]:
    ks, samples = get("validation.ks"), get("validation.samples_per_prompt")
    if all(k <= samples for k in ks):
        return []
    return [f"validation.ks={ks}: allowed are integers from 1 to validation.samples_per_prompt={samples}"]


def _outcome(get: Reader) -> list[str]:
    outcome, rewards = get("rollout.outcome"), get("reward")
    if not rewards:
        return ["reward=[]: allowed is at least one reward"]
    if not isinstance(outcome, str) or outcome in rewards:  # what is neither text nor null was refused before
        return []
    return [f"rollout.outcome={outcome}: allowed is one of the rewards: {', '.join(rewards)} or null"]


def _complete_rewards(get: Reader) -> list[str]:
    chosen = [name for name, reward in get("reward").items() if "_target_" in reward]
    listed = {name: typed("reward", [*chosen, name]) for name in get("reward").keys() - chosen}
    return [
        f"reward.{name}: no such reward was chosen; allowed is {word}, and a file of your own for it that begins with "
        f"'defaults: [base@{name}]'"
        for name, word in listed.items()
    ]


def _enough_prompts(get: Reader) -> list[str]:
    prompts, size = get("data.prompts_per_step"), get("data.train_size")
    if prompts <= size:
        return []
    return [
        f"data.prompts_per_step={prompts}: allowed is at most data.train_size={size}, the training prompts there are"
    ]


def _master_weights(get: Reader) -> list[str]:
    if (
        get("mode") not in ("fit", "preflight")
        or (dtype := get("policy.dtype")) == "float32"
        or get("policy.adapter") is not None
    ):
        return []
    return [
        f"policy.dtype={dtype}: allowed is float32 for training without policy.adapter, with trainer.precision="
        "bf16-mixed for speed: small updates vanish in 16-bit weights"
    ]


def _divisible(get: Reader) -> list[str]:
    size, kept = get("module.minibatch_size"), get("rollout.downsample")
    key = "rollout.downsample.size" if kept and "size" in kept else "rollout.group_size"
    completions = get("data.prompts_per_step") * get(key)
    if size is None or completions % size == 0:
        return []
    return [f"module.minibatch_size={size}: allowed is a divisor of data.prompts_per_step x {key} = {completions}"]


def _needs_reference(get: Reader) -> list[str]:
    if get("module.reference._target_") != "grpo_lightning.reference.none":
        return []
    return [
        f"{key}={get(key)}: allowed is 0 with reference=none; or choose a reference"
        for key in ("loss.kl_coef", "rollout.kl_penalty")
        if get(key) != 0
    ]


def _adapter_to_switch_off(get: Reader) -> list[str]:
    needed = get("loss.kl_coef") != 0 or get("rollout.kl_penalty") != 0
    if not needed or get("module.reference._target_") != "grpo_lightning.reference.adapter_off":
        return []
    if get("policy.adapter") is not None:
        return []
    return ["policy.adapter=null: allowed with reference=adapter_off is an adapter, such as {r: 16, lora_alpha: 32}"]


def _tries_need_a_filter(get: Reader) -> list[str]:
    if get("rollout.max_tries") != 1 and "rollout" not in get("module"):
        return [f"rollout.max_tries={get('rollout.max_tries')}: allowed is 1 with module=sft, whose batches would grow"]
    if get("rollout.max_tries") == 1 or get("rollout.group_filter") is not None:
        return []
    return [
        f"rollout.max_tries={get('rollout.max_tries')}: allowed is 1 without rollout.group_filter "
        "(rollout=dynamic_sampling has one)"
    ]


def _kept_of_a_group(get: Reader) -> list[str]:
    size, group = get("rollout.downsample.size"), get("rollout.group_size")
    return [f"rollout.downsample.size={size}: allowed is 2 to rollout.group_size={group}"] if size > group else []


def _delta_above_the_clip(get: Reader) -> list[str]:
    delta, high = get("loss.surrogate.delta"), get("loss.surrogate.epsilon_high")
    if delta is None or isinstance(high, Mapping) or isinstance(delta, Mapping) or delta > 1 + high:
        return []
    return [f"loss.surrogate.delta={delta}: allowed is more than 1 + loss.surrogate.epsilon_high = {1 + high}"]


def _quantized(get: Reader) -> list[str]:
    if get("policy.quantization") is None or get("policy.adapter") is not None:
        return []
    return [
        f"policy.quantization={get('policy.quantization')}: allowed is null without policy.adapter, such as "
        "{r: 16, lora_alpha: 32}: quantized weights cannot be trained"
    ]


def _old_sharding(get: Reader) -> list[str]:
    strategy = get("trainer.strategy")
    if not isinstance(strategy, str) or "fsdp" not in strategy.lower():
        return []
    return [
        f"trainer.strategy={strategy}: allowed is trainer=fsdp (FSDP2): the older FSDP runs on no CPU and does not "
        "support several backward passes in a step"
    ]


def _sharded_optimizer(get: Reader) -> list[str]:
    optimizer = str(get("optimizer._target_"))
    if not settings_shard(get("trainer")) or not optimizer.startswith("bitsandbytes."):
        return []
    return [
        f"optimizer._target_={optimizer}: allowed with trainer=fsdp are torch's optimizers: bitsandbytes' do not know "
        "sharded weights"
    ]


def _sharded_weights(get: Reader) -> list[str]:
    if not settings_shard(get("trainer")):
        return []
    problems = []
    if (dtype := get("policy.dtype")) != "float32":
        problems.append(f"policy.dtype={dtype}: allowed with trainer=fsdp is float32, one type for all weights")
    if (bits := get("policy.quantization")) is not None:
        problems.append(f"policy.quantization={bits}: allowed with trainer=fsdp is null; trainer=ddp has it")
    if get("trainer.strategy.sharded_checkpoints") and get("policy.adapter") is not None:
        problems.append(
            "trainer.strategy.sharded_checkpoints=true: allowed with policy.adapter is false, whose checkpoints hold "
            "the adapter only"
        )
    return problems


def _sharded_reference(get: Reader) -> list[str]:
    reference = get("reference")
    return [
        f"reference.{key}={reference[key]}: allowed with trainer=fsdp is {allowed}; trainer=ddp has it"
        for key, allowed in (("offload", "false"), ("quantization", "null"))
        if settings_shard(get("trainer")) and reference.get(key)
    ]


def _warmup(get: Reader) -> list[str]:
    warmup, steps = get("schedule.warmup_steps"), get("steps")
    if warmup <= steps or get("mode") not in ("fit", "preflight"):
        return []
    return [f"schedule.warmup_steps={warmup}: allowed is at most steps={steps}, the steps of the run"]


def _preflight_of_rollouts(get: Reader) -> list[str]:
    if get("mode") != "preflight" or "rollout" in get("module"):
        return []
    return ["mode=preflight: allowed with module=sft are fit, validate and export: it makes no rollouts"]


CONTRADICTIONS: tuple[Callable[[Reader], list[str]], ...] = (
    _parts_of_module,
    _ks,
    _outcome,
    _complete_rewards,
    _enough_prompts,
    _master_weights,
    _divisible,
    _needs_reference,
    _adapter_to_switch_off,
    _tries_need_a_filter,
    _kept_of_a_group,
    _delta_above_the_clip,
    _quantized,
    _old_sharding,
    _sharded_optimizer,
    _sharded_weights,
    _sharded_reference,
    _warmup,
    _preflight_of_rollouts,
)
"""Each says what is wrong between settings that are right by themselves."""
