"""Settings that are right by themselves and wrong together."""

from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_lightning.config.settings import format_override, value_at

Reader = Callable[[str], Any]
"""Dotted key -> value; raises `Unsound` where there is none that can be relied on."""


class Unsound(Exception):
    """A setting that a rule compares is absent, or breaks a rule of its own."""


def consistency_problems(config: Mapping[str, Any], broken: Collection[str]) -> Iterator[str]:
    """Settings that contradict one another; rules that compare a key of ``broken``, reported already, say nothing."""

    def get(key: str) -> Any:
        value = value_at(config, key, Unsound)
        if value is Unsound or key in broken:
            raise Unsound(key)
        return value

    for rule in _RULES:
        try:
            yield from rule(get)
        except Unsound:
            continue


def uses_fsdp(trainer: Mapping[str, Any]) -> bool:
    """Whether the settings of a trainer are those of ``trainer=fsdp``."""
    return "FullySharded" in str(value_at(trainer, "strategy._target_"))


def _sizes(get: Reader) -> Iterator[str]:
    prompts, warmup, steps = get("data.prompts_per_step"), get("schedule.warmup_steps"), get("steps")
    group, kept, size = get("rollout.group_size"), get("rollout.downsample"), get("module").get("minibatch_size")
    if prompts > (rows := get("data").get("train_size", prompts)):
        yield f"data.prompts_per_step={prompts} is more than the training prompts, data.train_size={rows}"
    if warmup > steps > 0:
        yield f"schedule.warmup_steps={warmup} is more than the steps of the run, steps={steps}"
    key = "rollout.downsample.size" if kept and "size" in kept else "rollout.group_size"
    if get(key) > group:
        yield f"rollout.downsample.size={get(key)} is more than rollout.group_size={group}"
    if size is not None and prompts * get(key) % get("module.minibatch_size"):
        completions = prompts * get(key)
        yield f"module.minibatch_size={size} does not divide data.prompts_per_step x {key} = {completions}"


def _validation(get: Reader) -> Iterator[str]:
    name, validation = str(get("sweep_metric")), get("validation")
    ks, samples = get("validation.ks"), get("validation.samples_per_prompt")
    if any(k > samples for k in ks):
        yield f"validation.ks={ks} needs validation.samples_per_prompt >= {max(ks)}, which is {samples}"
    known = ["val/pass@1", *(f"val/{kind}@{k}" for kind in ("pass", "maj") for k in ks if k > 1)]
    known += [f"val/reward/{reward}" for reward in ("total", *(validation.get("reward") or {}))]
    if name.startswith("val/") and name not in known:
        yield f"sweep_metric={name}: must be one of {', '.join(dict.fromkeys(known))}, or a metric of training"


def _recorded(get: Reader) -> Iterator[str]:
    if str(get("rollout._target_")).endswith(".Recorded"):
        source, own = Path(get("rollout.path")).resolve(), Path(get("run_dir")).resolve()
        if own in (source, source.parent):
            yield f"rollout.path={get('rollout.path')}: this run would write its own rollouts there; name another run"


def _rewards(get: Reader) -> Iterator[str]:
    rewards, outcome = get("reward"), get("rollout.outcome")
    if not rewards:
        yield "reward=[]: choose at least one reward"
    elif isinstance(outcome, str) and outcome not in rewards:
        yield f"rollout.outcome={outcome}: must be one of the rewards {', '.join(rewards)} or null"
    chosen = [name for name, reward in rewards.items() if isinstance(reward, Mapping) and "_target_" in reward]
    for name, reward in rewards.items():
        if not isinstance(reward, Mapping):
            yield f"reward.{name}={reward}: must be the settings of a reward, such as reward.NAME.weight=1.0"
        elif name not in chosen:
            yield (
                f"reward.{name}: this reward is not chosen; choose {format_override('reward', [*chosen, name])}, or "
                f"begin your own file for it with 'defaults: [base@{name}]'"
            )


def _rollouts(get: Reader) -> Iterator[str]:
    tries, has_rollouts = get("rollout.max_tries"), "rollout" in get("module")
    if get("mode") == "preflight" and not has_rollouts:
        yield "mode=preflight does not work with module=sft, which makes no rollouts"
    if tries != 1 and not has_rollouts:
        yield f"rollout.max_tries={tries} does not work with module=sft, which makes no rollouts"
    elif tries != 1 and get("rollout.group_filter") is None:
        yield f"rollout.max_tries={tries} needs rollout.group_filter, which rollout=dynamic_sampling has"


def _reference(get: Reader) -> Iterator[str]:
    target = get("module.reference._target_")
    used = {key: get(key) for key in ("loss.kl_coef", "rollout.kl_penalty") if get(key) != 0}
    if target == "grpo_lightning.reference.none":
        yield from (f"{key}={value} needs a reference, and reference=none has none" for key, value in used.items())
    elif target == "grpo_lightning.reference.adapter_off" and used and get("policy.adapter") is None:
        yield "reference=adapter_off needs policy.adapter, such as {r: 16, lora_alpha: 32}"


def _delta(get: Reader) -> Iterator[str]:
    delta, high = get("loss.surrogate.delta"), get("loss.surrogate.epsilon_high")
    if delta is not None and not isinstance(high, Mapping) and not isinstance(delta, Mapping) and delta <= 1 + high:
        yield f"loss.surrogate.delta={delta}: must be more than 1 + loss.surrogate.epsilon_high = {1 + high}"


def _weights(get: Reader) -> Iterator[str]:
    dtype, bits = get("policy.dtype"), get("policy").get("quantization")
    if get("policy.adapter") is not None:
        return
    if get("mode") in ("fit", "preflight") and dtype != "float32":
        yield (
            f"policy.dtype={dtype}: training without policy.adapter needs float32, since small updates vanish in "
            "16-bit weights; trainer.precision=bf16-mixed is for speed"
        )
    if bits is not None:
        yield (
            f"policy.quantization={bits} needs policy.adapter, such as {{r: 16, lora_alpha: 32}}: quantized weights "
            "cannot be trained"
        )


def _fsdp(get: Reader) -> Iterator[str]:
    trainer = get("trainer")
    strategy = trainer.get("strategy")
    if isinstance(strategy, str) and "fsdp" in strategy.lower():
        yield f"trainer.strategy={strategy}: use trainer=fsdp (FSDP2); FSDP1 has no several backward passes in a step"
    if not uses_fsdp(trainer):
        return
    optimizer, dtype = str(get("optimizer._target_")), get("policy.dtype")
    if optimizer.startswith("bitsandbytes."):
        yield f"optimizer._target_={optimizer}: trainer=fsdp needs an optimizer of torch, which knows sharded weights"
    if dtype != "float32":
        yield f"policy.dtype={dtype}: trainer=fsdp needs float32, one type for all weights"
    for part in ("policy", "reference"):
        for key in ("quantization", "offload"):
            if value := get(part).get(key):
                yield f"{part}.{key}={value} does not work with trainer=fsdp; trainer=ddp has it"
    if get("trainer.strategy.sharded_checkpoints") and get("policy").get("adapter") is not None:
        yield (
            "trainer.strategy.sharded_checkpoints=true does not work with policy.adapter, whose checkpoints hold the "
            "adapter only"
        )


def _environment(get: Reader) -> Iterator[str]:
    environment = get("environment")
    for name, reward in get("reward").items():
        if value_at(reward, "function._target_") != "grpo_lightning.reward.accuracy.of_environment":
            continue
        if environment is None:
            yield f"reward.{name} needs an environment, whose score it is: environment=custom, or another one"
        elif get("rollout._target_") == "grpo_lightning.recording.Recorded" and get("rollout.rescore"):
            yield f"rollout.rescore=true does not work with reward.{name}: the environment is not run again"
    if environment is not None and get("advantage._target_") == "grpo_lightning.advantage.process":
        yield (
            "advantage=process does not work with an environment: it compares turns across episodes, which is biased "
            "where the policy decides how many there are; use advantage=to_go for scores of turns, or standardized"
        )


_VLLM = {
    "grpo_lightning.sampler.vllm.colocated.VLLM": "sampler=vllm",
    "grpo_lightning.sampler.vllm.server.VLLMServer": "sampler=vllm_server",
}
_VLLM_ARGUMENTS = (
    *("async_scheduling", "block_size", "cpu_offload_gb", "disable_custom_all_reduce", "enable_chunked_prefill"),
    *("kv_cache_dtype", "long_prefill_token_threshold", "max_num_batched_tokens", "max_num_partial_prefills"),
    *("max_num_seqs", "num_gpu_blocks_override", "quantization", "use_fp64_gumbel"),
)
"""Further arguments of vLLM that settings may hold: none names code, and none changes which tokens are sampled."""


def _vllm(get: Reader) -> Iterator[str]:
    sampler = _VLLM.get(str(get("sampler._target_")))
    if sampler is None:
        return
    if sampler == "sampler=vllm" and get("mode") != "export" and find_spec("vllm") is None:
        install = "pip install -r requirements-vllm.txt"
        yield f"sampler=vllm: vLLM is not installed; use sampler=own, or an environment of its own with: {install}"
    allowed = f"must be one of {', '.join(_VLLM_ARGUMENTS)}; the keys of rollout decide what is sampled"
    engine = get("sampler").get("engine") or {}
    yield from (f"sampler.engine.{k}={v}: {allowed}" for k, v in engine.items() if k not in _VLLM_ARGUMENTS)
    for key, usual in (("rollout.kv_cache_gib", None), ("validation.kv_cache_gib", None), ("rollout.top_entropy", 1)):
        if (value := get(key)) != usual:
            yield f"{key}={value} does not work with {sampler}"
    if get("policy._target_") == "grpo_lightning.policy.generic.GenericPolicy":
        yield f"policy=plain does not work with {sampler}; use a policy of transformers"
    elif (bits := get("policy").get("quantization")) is not None:
        yield f"policy.quantization={bits} does not work with {sampler}, which takes the policy's weights as they are"


_STEPS = "the run ends after steps=N rollouts"
_VALIDATION = "validations come every validation.every=N steps on data.validation_size=N prompts"
_TRAINER_OPTIONS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "max_steps": ((-1,), _STEPS),
    "max_epochs": ((-1,), _STEPS),
    "max_time": ((None,), "`timeout -s TERM 4h` before the command ends a run after four hours, with a checkpoint"),
    "fast_dev_run": ((False,), "steps=1 tries a run"),
    "overfit_batches": ((0, 0.0), "data.train_size=N trains on few prompts"),
    "limit_train_batches": ((None, 1.0), _STEPS),
    "limit_val_batches": ((None, 1.0), _VALIDATION),
    "val_check_interval": ((None, 1.0), _VALIDATION),
    "check_val_every_n_epoch": ((1,), _VALIDATION),
    "num_sanity_val_steps": ((-1, 0), "-1 validates before the first step, 0 does not"),
    "accumulate_grad_batches": ((1,), "module.microbatch_tokens=N divides a step's work, and never changes results"),
    "gradient_clip_val": ((None,), "module.max_grad_norm=X clips gradients"),
}
"""Option of Lightning's Trainer that would end or thin a run -> allowed values, and what to use instead."""


def _trainer(get: Reader) -> Iterator[str]:
    """What is wrong with the options of a trainer; one that a program hands over is looked at when it begins."""
    trainer = get("trainer")
    if trainer.get("_target_") != "lightning.Trainer":
        return
    for name, (allowed, instead) in _TRAINER_OPTIONS.items():
        value = trainer.get(name, allowed[0])
        # 1 batch is another thing than 1.0 of all batches, and True is 1
        if not any(type(value) is type(option) and value == option for option in allowed):
            options = " or ".join(map(_written, allowed))
            yield f"trainer.{name}={_written(value)}: must be {options}; {instead}"


def _written(value: Any) -> str:
    """A value as a user writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_RULES: tuple[Callable[[Reader], Iterator[str]], ...] = (
    *(_validation, _rewards, _weights, _sizes, _reference, _rollouts, _delta, _fsdp, _vllm, _environment, _trainer),
    _recorded,
)
