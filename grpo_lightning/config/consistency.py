"""Settings that are right by themselves and wrong together, or on this machine.

Each rule says what is wrong; one whose settings are broken or absent says nothing, since that is reported elsewhere or
no problem.
"""

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_lightning.config.redaction import single_line
from grpo_lightning.config.shell import format_override
from grpo_lightning.config.suggestions import nearest
from grpo_lightning.config.tree import HELD, value_at

_ENGINES = {
    "grpo_lightning.sampler.vllm.colocated.VLLM": "sampler=vllm",
    "grpo_lightning.sampler.vllm.server.VLLMServer": "sampler=vllm_server",
}


class Unsound(Exception):
    """A setting that a rule compares is broken or absent."""


Reader = Callable[[str], Any]
"""Dotted key -> value; raises ``Unsound`` where there is none that can be relied on."""


def reader(config: Mapping[str, Any], broken: Collection[str]) -> Reader:
    """A function that reads settings by key, and raises ``Unsound`` for keys that are ``broken`` or absent."""

    def read(key: str) -> Any:
        value = value_at(config, key, Unsound)
        if value is Unsound or key in broken:
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
            f"reward.{name}: no such reward was chosen; allowed is {format_override('reward', [*chosen, name])}, and a "
            f"file of your own for it that begins with 'defaults: [base@{name}]'"
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
        yield from filter(None, [missing_vllm()])


def _engine_arguments(get: Reader) -> Iterator[str]:
    _engine(get)
    engine = get("sampler.engine") or {}
    if isinstance(engine, dict):
        yield from engine_problems(engine)
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
    if get("policy._target_") == "grpo_lightning.policy.generic.GenericPolicy":
        yield f"policy=plain: allowed with {name} are policies of transformers, whose models vLLM knows"
    elif (bits := get("policy.quantization")) is not None:
        yield f"policy.quantization={bits}: allowed with {name} is null: its weights are handed over as they are"


def _environment_rewards(get: Reader) -> Iterator[str]:
    given = "grpo_lightning.reward.accuracy.of_environment"
    named = [name for name, node in get("reward").items() if value_at(node, "function._target_") == given]
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


def uses_fsdp(trainer: Mapping[str, Any]) -> bool:
    """Whether the settings of a trainer are those of ``trainer=fsdp``."""
    strategy = trainer.get("strategy")
    return isinstance(strategy, Mapping) and "FullySharded" in str(strategy.get("_target_"))


INSTALL = "pip install -r requirements-vllm.txt"
"""What brings vLLM, into an environment of its own; the file is in the project's repository."""

ENGINE = (
    *("async_scheduling", "block_size", "cpu_offload_gb", "disable_custom_all_reduce", "enable_chunked_prefill"),
    *("kv_cache_dtype", "long_prefill_token_threshold", "max_num_batched_tokens", "max_num_partial_prefills"),
    *("max_num_seqs", "num_gpu_blocks_override", "quantization", "use_fp64_gumbel"),
)
"""Further arguments of vLLM's that settings may hold: none names code, and none changes which tokens are drawn."""

SAMPLING = (
    *("allowed_token_ids", "bad_words", "frequency_penalty", "logit_bias", "logits_processors", "min_tokens"),
    *("override_generation_config", "presence_penalty", "repetition_penalty", "top_k", "top_p", "min_p", "temperature"),
)
"""Options with which another distribution would be sampled than the one that is trained."""


def engine_problems(engine: Mapping[str, Any]) -> list[str]:
    """What is wrong with further arguments of the engine, by key."""
    found = []
    for key, value in engine.items():
        told = f"sampler.engine.{key}={value}: "
        if key in SAMPLING:
            found.append(
                f"{told}allowed are arguments that leave the distribution as it is: what is sampled must be what is "
                "trained, and the keys of rollout are all that shapes it"
            )
        elif key not in ENGINE:
            found.append(f"{told}allowed are {', '.join(ENGINE)}")
    return found


def missing_vllm() -> str | None:
    """What to do where vLLM is not installed; None where it is."""
    if find_spec("vllm") is not None:
        return None
    return f"sampler=vllm: vLLM is not installed; allowed is sampler=own, or an environment of its own with: {INSTALL}"


_SFT = {
    "loss": ("total",),
    "optim": ("grad_norm", "lr", "skipped"),
    "time": ("update", "step"),
}
_MISMATCH = ("mismatch_mean", "mismatch_max", "mismatch_kl")
_GRPO = {
    "reward": ("std",),
    "advantage": ("mean", "std"),
    "group": ("all_right", "all_wrong", "mixed", "tries", "kept", "carried"),
    "reward_model": ("loss", "accuracy"),
    "policy": ("kl_divergence", "entropy", "clip_fraction", "ratio_mean", "ratio_max", *_MISMATCH),
    "correction": ("mean", "max", "masked"),
    "loss": ("policy", "kl", "entropy"),
    "completion": ("length_mean", "length_max", "truncated_fraction", "set_size_mean", "set_full_fraction"),
    "sampler": ("weight_version", "support_miss_rate"),
    "episode": ("turns", "turns_max", "reply_tokens", "failed", "bad_calls", "cut_replies"),
    "time": ("environment", "sync", "wake", "rollout", "reward", "score", "wait"),
    "perf": ("tokens_per_second", "gemm_fraction", "peak_memory_gb"),
}
OF_SFT = tuple(f"{group}/{name}" for group, names in _SFT.items() for name in names)
OF_GRPO = OF_SFT + tuple(f"{group}/{name}" for group, names in _GRPO.items() for name in names)
"""Names that do not depend on the settings."""


def sweep_metric_problems(get: Reader) -> Iterator[str]:
    """Whether ``sweep_metric`` is among the metrics of the run; other modules than this project's have their own."""
    name = get("sweep_metric")
    if not str(get("module._target_")).startswith("grpo_lightning.module."):
        return
    known = _known_metrics(get)
    if name in known or str(name).startswith("varying/"):
        return
    listed = [one for one in known if one.startswith("val/")]
    meant = nearest(str(name), known)
    guess = f"; the nearest is {meant}" if meant and meant not in listed else ""
    shown = "null" if name is None else name
    yield f"sweep_metric={shown}: allowed are {', '.join(listed)} and the metrics of training{guess}"


def _known_metrics(get: Reader) -> list[str]:
    if any(k > get("validation.samples_per_prompt") for k in get("validation.ks")):
        raise Unsound("validation.ks")
    metrics = [f"val/{kind}@{k}" for kind in ("pass", "maj") for k in get("validation.ks")]
    metrics += [f"val/reward/{name}" for name in ("total", *_named(get, "validation.reward"))]
    if not str(get("module._target_")).endswith("GRPOLightningModule"):
        return [*metrics, *OF_SFT]
    own = _named(get, "reward")
    return [
        *metrics,
        *OF_GRPO,
        *(f"reward/{name}" for name in ("total", *own)),
        *(f"failure/{name}" for name in own),
    ]


def _named(get: Reader, key: str) -> list[str]:
    try:
        rewards: Any = get(key)
    except Unsound:
        return []
    return list(rewards) if isinstance(rewards, Mapping) else []


_RECORDED = "grpo_lightning.rollout.Recorded"
_READ_WHOLE = 100_000_000
"""Bytes of files that are read to their ends to find a damaged one before the first step; of more the beginnings."""


def recorded_problems(get: Reader) -> list[str]:
    """What stands in the way of training on the rollouts in ``rollout.path``."""
    if get("rollout").get("_target_") != _RECORDED or get("mode") != "fit":
        return []
    given, recording = get("rollout.path"), import_module("grpo_lightning.recording")
    if not isinstance(given, str):
        return [f"rollout.path={given}: allowed is a run directory with recorded rollouts"]
    try:
        found = _recorded(get, recording, recording.find_directory(given))
    except (recording.RecordingError, OSError) as error:
        found = [str(error)]
    return [f"rollout.path={given}: {problem}" for problem in found]


def _recorded(get: Reader, recording: Any, directory: Path) -> list[str]:
    known = recording.recorded_steps(directory)
    if not known:
        return [f"there are no recorded rollouts in {directory}; callbacks=rollouts records all of a run"]
    own = get("callbacks").get("rollouts") or {}
    if directory.resolve() in {
        Path(str(own.get("directory"))).resolve(),
        (Path(get("run_dir")) / recording.FOLDER).resolve(),
    }:
        return ["allowed is the directory of another run: this one would write its own rollouts there"]
    last = get("steps")
    needed = range(1, last + 1)
    if get("checkpoint") is not None:  # a run that goes on needs the rest, and the first steps may be gone
        needed = range(min(max((step for step in needed if step not in known), default=0) + 1, last), last + 1)
    if missing := [step for step in needed if step not in known]:
        return [
            f"steps={last} needs the rollouts of steps 1 to {last}; there are {recording.format_steps(known)}, and not "
            f"{recording.format_steps(missing)} (callbacks.rollouts.every=1 records all of a run)"
        ]
    chosen = [known[step] for step in needed]
    whole = sum(path.stat().st_size for path in chosen) <= _READ_WHOLE
    sizes: dict[str, Any] = {}
    for path in chosen:
        first = recording.read(path)[0] if whole else recording.read_header(path)
        sizes = sizes or first
    wanted = {"prompts": "data.prompts_per_step", "group_size": "rollout.group_size"}
    return [
        f"{key}={get(key)} is not what was recorded; allowed is {sizes[name]}"
        for name, key in wanted.items()
        if isinstance(get(key), int) and get(key) != sizes[name]
    ]


TRIED = {
    f"grpo_lightning.{name}"
    for name in (
        "reward.format.pattern",
        "reward.format.keyword",
        "reward.format.json_schema",
        "reward.length.length",
        "reward.length.repetition",
        "reward.format.reasoning_steps",
        "reward.countdown.countdown",
        "reward.code.code",
        "reward.judge.ChatJudge",
        "environment.gymnasium.Gymnasium",
        "environment.python.Python",
    )
}
"""What needs no heavy library and reads its settings before any completion: functions, and classes."""

JUDGE = "grpo_lightning.reward.judge.ChatJudge"


def reward_problems(node: Mapping[str, Any], key: str) -> Iterator[str]:
    """What a reward function or an environment refuses of its own settings.

    Args:
        node: Settings with a ``_target_``.
        key: The dotted key of these settings.
    """
    target = node["_target_"]
    given = {name: value for name, value in node.items() if not name.startswith("_")}
    if target not in TRIED or any(isinstance(value, Mapping) and "_target_" in value for value in given.values()):
        return
    module, _, name = target.rpartition(".")
    function = getattr(import_module(module), name)
    columns: dict[str, list[Any]] = {
        parameter.name: []
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    if inspect.isfunction(function):  # whose columns no settings give: it would score completions of theirs
        given = {name: value for name, value in given.items() if name not in columns}
    try:
        function(**{**columns, **given})
    except TypeError:
        return  # arguments that are missing, unknown or of a wrong type are reported as such
    except ValueError as error:
        yield single_line(f"{key}.{_said(str(error), given)}")


def key_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """The environment variables that hold the keys of judges, where they are not set."""
    if config.get("mode") == "export":
        return
    for name, reward in (config.get("reward") or {}).items():
        function = reward.get("function") if isinstance(reward, Mapping) else None
        if isinstance(function, Mapping) and function.get("_target_") == JUDGE:
            variable = function.get("api_key_env")
            if variable is not None and not os.environ.get(variable, "").strip():
                yield (
                    f"reward.{name}.function.api_key_env={variable}: allowed is an environment variable that is set, "
                    "or null for a server that asks for no key"
                )


def _said(message: str, given: Mapping[str, Any]) -> str:
    """The function's own words, in the form that all settings are reported in."""
    name, _, rest = message.partition(": expected ")
    allowed, _, got = rest.rpartition(", got ")
    if name not in given or not allowed:
        return message
    shown = f"{given[name]!r:.80}"
    reason = got.removeprefix(shown).lstrip(": ")
    return f"{name}={shown.strip(chr(39))}: allowed is {allowed}{f' ({reason})' if reason and reason != got else ''}"


_STEPS = "the run ends after steps=N rollouts"
_VALIDATED = "the held-out prompts are data.validation_size=N"
_VALIDATIONS = "a validation comes every validation.every=N steps"

OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "max_steps": ((-1,), _STEPS),
    "max_epochs": ((-1,), _STEPS),
    "min_steps": ((None,), _STEPS),
    "min_epochs": ((None,), _STEPS),
    "max_time": (
        (None,),
        "`timeout -s TERM 4h`, before the command, ends a run after four hours, and its last complete step is saved",
    ),
    "fast_dev_run": ((False,), "steps=1 tries a run"),
    "overfit_batches": ((0, 0.0), "data.train_size=N trains on few prompts"),
    "limit_train_batches": ((None, 1.0), _STEPS),
    "limit_val_batches": ((None, 1.0), _VALIDATED),
    "val_check_interval": ((None, 1.0), _VALIDATIONS),
    "check_val_every_n_epoch": ((1,), _VALIDATIONS),
    "num_sanity_val_steps": ((-1, 0), f"-1 validates before the first step, 0 does not, and {_VALIDATED}"),
    "accumulate_grad_batches": ((1,), "module.microbatch_tokens=N divides a step's work, and never changes results"),
    "gradient_clip_val": ((None,), "module.max_grad_norm=X clips gradients"),
    "gradient_clip_algorithm": ((None,), "module.max_grad_norm=X clips gradients, by their norm"),
    "enable_checkpointing": ((True,), "~callbacks.checkpoint leaves checkpoints out"),
    "reload_dataloaders_every_n_epochs": ((1,), "prompts are loaded anew after every validation"),
    "use_distributed_sampler": ((False,), "all processes read the same prompts and divide them later"),
    "barebones": ((False,), "logger=none writes no metrics"),
    "model_registry": ((None,), "mode=export writes the policy"),
}
"""Option -> the values that change nothing here, and what does instead of others."""

_CHECKPOINTS = "grpo_lightning.checkpoint.io.AtomicCheckpointIO"
_STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true", "single_device")
_SHARDING = ("deepspeed", "fsdp")  # how the names of strategies begin that have answers of their own


def trainer_problems(get: Reader) -> list[str]:
    """What is wrong with the options of a trainer; one that a program hands over is looked at when it begins."""
    trainer = get("trainer")
    if not isinstance(trainer, Mapping) or str(trainer.get("_target_")).startswith("grpo_lightning.composition."):
        return []
    return [*_options(trainer), *_plugins(trainer), *_cpu_devices(trainer), *_strategy(trainer)]


def _options(trainer: Mapping[str, Any]) -> Iterator[str]:
    for name, (allowed, instead) in OPTIONS.items():
        value = trainer.get(name, allowed[0])
        # 1 batch is another thing than 1.0 of all batches, and True is 1
        if not any(type(value) is type(one) and value == one for one in allowed):
            listed = " or ".join(_written(one) for one in allowed)
            yield f"trainer.{name}={_written(value)}: allowed is {listed}; {instead}"
    if (value := trainer.get("logger", [])) is None or value is True:
        yield f"trainer.logger={_written(value)}: allowed is a list or false; Lightning's own is logger=tensorboard"


def _plugins(trainer: Mapping[str, Any]) -> Iterator[str]:
    """A run whose checkpoints Lightning writes itself could lose them to a kill."""
    plugins = trainer.get("plugins")
    listed = plugins if isinstance(plugins, list | tuple) else [plugins]
    if not any(isinstance(one, Mapping) and one.get("_target_") == _CHECKPOINTS for one in listed):
        needed = f"{{_target_: {_CHECKPOINTS}}}"
        yield f"trainer.plugins={plugins}: allowed is a list with {needed}, which keeps checkpoints whole"


def _cpu_devices(trainer: Mapping[str, Any]) -> Iterator[str]:
    devices = trainer.get("devices")
    on_all = str(devices) == "-1"
    if trainer.get("accelerator") == "cpu" and (on_all or isinstance(devices, list | tuple) or "," in str(devices)):
        yield f"trainer.devices={devices}: allowed with trainer.accelerator=cpu is auto or a number of processes, >= 1"


def _strategy(trainer: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a strategy that is given by Lightning's name of it."""
    name = trainer.get("strategy")
    if isinstance(name, str) and name.lower() not in _STRATEGIES and not name.lower().startswith(_SHARDING):
        yield (
            f"trainer.strategy={name}: allowed are {', '.join(_STRATEGIES)}, and trainer=ddp or trainer=fsdp; forked "
            "and spawned processes cannot give back what the command has to know at its end"
        )


def _written(value: Any) -> str:
    """A value as a user writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
