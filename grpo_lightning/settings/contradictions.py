"""Settings that are right by themselves and wrong together.

Each rule says what is wrong; one whose settings are broken or absent says nothing, since that is reported elsewhere or
no problem.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from grpo_lightning.distributed.devices import uses_fsdp
from grpo_lightning.output.shell import typed
from grpo_lightning.sampler.vllm import arguments
from grpo_lightning.settings.walk import HELD

_ENGINES = {
    "grpo_lightning.sampler.vllm.inside.VLLM": "sampler=vllm",
    "grpo_lightning.sampler.vllm.server.VLLMServer": "sampler=vllm_server",
}


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


def _parts_of_module(get: Reader) -> Iterator[str]:
    module = get("module")
    for part in HELD["module"]:
        if part in module and module[part] != get(part):
            yield f"module.{part}: allowed is what {part} says, such as {part}=NAME: checks and summaries look there"


def _ks(get: Reader) -> Iterator[str]:
    ks, samples = get("validation.ks"), get("validation.samples_per_prompt")
    if any(k > samples for k in ks):
        yield f"validation.ks={ks}: allowed are integers from 1 to validation.samples_per_prompt={samples}"


def _outcome(get: Reader) -> Iterator[str]:
    outcome, rewards = get("rollout.outcome"), get("reward")
    if not rewards:
        yield "reward=[]: allowed is at least one reward"
    elif isinstance(outcome, str) and outcome not in rewards:  # what is neither text nor null was refused before
        yield f"rollout.outcome={outcome}: allowed is one of the rewards: {', '.join(rewards)} or null"


def _complete_rewards(get: Reader) -> Iterator[str]:
    chosen = [name for name, reward in get("reward").items() if "_target_" in reward]
    for name in get("reward").keys() - chosen:
        yield (
            f"reward.{name}: no such reward was chosen; allowed is {typed('reward', [*chosen, name])}, and a file of "
            f"your own for it that begins with 'defaults: [base@{name}]'"
        )


def _enough_prompts(get: Reader) -> Iterator[str]:
    prompts, size = get("data.prompts_per_step"), get("data.train_size")
    if prompts > size:
        yield (
            f"data.prompts_per_step={prompts}: allowed is at most data.train_size={size}, the training prompts there "
            "are"
        )


def _master_weights(get: Reader) -> Iterator[str]:
    dtype, is_trained = get("policy.dtype"), get("mode") in ("fit", "preflight")
    if is_trained and dtype != "float32" and get("policy.adapter") is None:
        yield (
            f"policy.dtype={dtype}: allowed is float32 for training without policy.adapter, with trainer.precision="
            "bf16-mixed for speed: small updates vanish in 16-bit weights"
        )


def _divisible(get: Reader) -> Iterator[str]:
    size, kept = get("module.minibatch_size"), get("rollout.downsample")
    key = "rollout.downsample.size" if kept and "size" in kept else "rollout.group_size"
    completions = get("data.prompts_per_step") * get(key)
    if size is not None and completions % size:
        yield f"module.minibatch_size={size}: allowed is a divisor of data.prompts_per_step x {key} = {completions}"


def _reference(get: Reader) -> Iterator[str]:
    target = get("module.reference._target_")
    used = {key: get(key) for key in ("loss.kl_coef", "rollout.kl_penalty") if get(key) != 0}
    if target == "grpo_lightning.reference.none":
        yield from (
            f"{key}={one}: allowed is 0 with reference=none; or choose a reference" for key, one in used.items()
        )
    elif target == "grpo_lightning.reference.adapter_off" and used and get("policy.adapter") is None:
        yield "policy.adapter=null: allowed with reference=adapter_off is an adapter, such as {r: 16, lora_alpha: 32}"


def _tries(get: Reader) -> Iterator[str]:
    tries = get("rollout.max_tries")
    if tries != 1 and "rollout" not in get("module"):
        yield f"rollout.max_tries={tries}: allowed is 1 with module=sft, whose batches would grow"
    elif tries != 1 and get("rollout.group_filter") is None:
        yield (
            f"rollout.max_tries={tries}: allowed is 1 without rollout.group_filter (rollout=dynamic_sampling has one)"
        )


def _kept_of_a_group(get: Reader) -> Iterator[str]:
    size, group = get("rollout.downsample.size"), get("rollout.group_size")
    if size > group:
        yield f"rollout.downsample.size={size}: allowed is 2 to rollout.group_size={group}"


def _delta_above_the_clip(get: Reader) -> Iterator[str]:
    delta, high = get("loss.surrogate.delta"), get("loss.surrogate.epsilon_high")
    are_numbers = delta is not None and not isinstance(high, Mapping) and not isinstance(delta, Mapping)
    if are_numbers and delta <= 1 + high:
        yield f"loss.surrogate.delta={delta}: allowed is more than 1 + loss.surrogate.epsilon_high = {1 + high}"


def _quantized(get: Reader) -> Iterator[str]:
    bits = get("policy.quantization")
    if bits is not None and get("policy.adapter") is None:
        yield (
            f"policy.quantization={bits}: allowed is null without policy.adapter, such as {{r: 16, lora_alpha: 32}}: "
            "quantized weights cannot be trained"
        )


def _old_sharding(get: Reader) -> Iterator[str]:
    strategy = get("trainer.strategy")
    if isinstance(strategy, str) and "fsdp" in strategy.lower():
        yield (
            f"trainer.strategy={strategy}: allowed is trainer=fsdp (FSDP2): the older FSDP runs on no CPU and does not "
            "support several backward passes in a step"
        )


def _sharded(get: Reader) -> Iterator[str]:
    if not uses_fsdp(get("trainer")):
        return
    optimizer, reference = str(get("optimizer._target_")), get("reference")
    if optimizer.startswith("bitsandbytes."):
        yield (
            f"optimizer._target_={optimizer}: allowed with trainer=fsdp are torch's optimizers: bitsandbytes' do not "
            "know sharded weights"
        )
    for key, allowed in (("offload", "false"), ("quantization", "null")):
        if reference.get(key):
            yield f"reference.{key}={reference[key]}: allowed with trainer=fsdp is {allowed}; trainer=ddp has it"
    if (bits := get("policy.quantization")) is not None:
        yield f"policy.quantization={bits}: allowed with trainer=fsdp is null; trainer=ddp has it"
    if (dtype := get("policy.dtype")) != "float32":
        yield f"policy.dtype={dtype}: allowed with trainer=fsdp is float32, one type for all weights"
    if get("trainer.strategy.sharded_checkpoints") and get("policy.adapter") is not None:
        yield (
            "trainer.strategy.sharded_checkpoints=true: allowed with policy.adapter is false, whose checkpoints hold "
            "the adapter only"
        )


def _warmup(get: Reader) -> Iterator[str]:
    warmup, steps = get("schedule.warmup_steps"), get("steps")
    if warmup > steps and get("mode") in ("fit", "preflight"):
        yield f"schedule.warmup_steps={warmup}: allowed is at most steps={steps}, the steps of the run"


def _preflight_of_rollouts(get: Reader) -> Iterator[str]:
    if get("mode") == "preflight" and "rollout" not in get("module"):
        yield "mode=preflight: allowed with module=sft are fit, validate and export: it makes no rollouts"


def _engine(get: Reader) -> str:
    """The engine that samples beside the policy, as ``sampler=vllm``.

    Raises:
        Unsound: There is none.
    """
    name = _ENGINES.get(str(get("sampler._target_")))
    if name is None:
        raise Unsound("sampler")
    return name


def _engine_installed(get: Reader) -> Iterator[str]:
    if _engine(get) == "sampler=vllm" and get("mode") in ("fit", "validate", "preflight"):
        yield from filter(None, [arguments.missing()])


def _engine_arguments(get: Reader) -> Iterator[str]:
    _engine(get)
    engine = get("sampler.engine") or {}
    if isinstance(engine, dict):
        yield from arguments.problems(engine)
    else:
        yield f"sampler.engine={engine}: allowed is a mapping, such as {{max_num_seqs: 256}}"


def _engine_cache(get: Reader) -> Iterator[str]:
    name = _engine(get)
    instead = "sampler.kv_cache_gib" if name == "sampler=vllm" else "the server's own settings"
    for key in ("rollout.kv_cache_gib", "validation.kv_cache_gib"):
        if (size := get(key)) is not None:
            yield f"{key}={size}: allowed with {name} is null; an engine has a cache of its own, see {instead}"


def _engine_entropy(get: Reader) -> Iterator[str]:
    name, share = _engine(get), get("rollout.top_entropy")
    if share != 1:
        yield f"rollout.top_entropy={share}: allowed with {name} is 1: an engine does not tell the entropy of a token"


def _engine_policy(get: Reader) -> Iterator[str]:
    name = _engine(get)
    if get("policy._target_") == "grpo_lightning.policy.plain.PlainPolicy":
        yield f"policy=plain: allowed with {name} are policies of transformers, whose models vLLM knows"
    elif (bits := get("policy.quantization")) is not None:
        yield f"policy.quantization={bits}: allowed with {name} is null: its weights are handed over as they are"


def _environment_rewards(get: Reader) -> Iterator[str]:
    given = "grpo_lightning.reward.accuracy.of_environment"
    named = [name for name, node in get("reward").items() if lookup(node, "function._target_") == given]
    for name in named:
        if get("environment") is None:
            yield f"reward.{name}: allowed with an environment, whose scores it is: environment=custom, or another one"
        elif get("rollout._target_") == "grpo_lightning.rollout.Recorded" and get("rollout.rescore"):
            yield f"rollout.rescore=True: allowed with reward.{name} is false: the environment is not asked again"


def _process_in_episodes(get: Reader) -> Iterator[str]:
    if get("environment") is not None and get("advantage._target_") == "grpo_lightning.advantage.process":
        yield (
            "advantage=process: allowed with an environment is advantage=to_go for the scores of turns, or one for "
            "whole episodes, such as advantage=standardized: it compares turns with those of other episodes, which is "
            "biased where what the policy says decides how many there are"
        )


CONTRADICTIONS: tuple[Callable[[Reader], Iterator[str]], ...] = (
    *(_parts_of_module, _ks, _outcome, _complete_rewards, _enough_prompts, _master_weights, _divisible, _reference),
    *(_tries, _kept_of_a_group, _delta_above_the_clip, _quantized, _old_sharding, _sharded, _warmup),
    *(_preflight_of_rollouts, _engine_installed, _engine_arguments, _engine_cache, _engine_entropy, _engine_policy),
    *(_environment_rewards, _process_in_episodes),
)
