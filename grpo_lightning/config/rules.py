"""What the value of each setting may be, by itself and together with others."""

import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_lightning.config.settings import command_name, format_override, leaves, value_at
from grpo_lightning.console import single_line

LIVE = "grpo_lightning.composition.live_object"
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


_ESCAPE = re.compile(r"\\[nrt](?![a-z])")  # a line break or tab as it was typed; \nabla is LaTeX
_FINITE = number(lambda _: True, "a finite number")
REFERENCE_KEYS = ("loss.kl_coef", "rollout.kl_penalty", "rollout.teacher_coef")
"""Numbers of which none needs a reference where it is 0."""
_NOT_NEGATIVE = number(lambda v: v >= 0, "a number >= 0")
_POSITIVE = number(lambda v: v > 0, "a number > 0")
_SHARE = number(lambda v: 0 < v <= 1, "a number in (0, 1]")
_FRACTION = number(lambda v: 0 <= v < 1, "a number in [0, 1)")
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
    **_each(Rule(integer(0).test, "an integer >= 0, where 0 keeps all tokens"), "rollout.top_k"),
    **_each(integer(0), "steps", "module.max_skipped", "schedule.warmup_steps", "callbacks.reward_model.buffer_size"),
    **_each(integer(1), "preflight.prompts", "data.train_size", "rollout.max_new_tokens", "rollout.max_tries"),
    **_each(integer(1), "validation.every", "validation.samples_per_prompt", "loss.weights.length"),
    **_each(integer(1), "module.ppo_epochs", "module.microbatch_tokens", "callbacks.doctor.rollouts"),
    **_each(integer(1), "callbacks.reward_model.epochs", "callbacks.reward_model.batch_size"),
    **_each(integer(1, null=True), "module.minibatch_size"),
    **_each(integer(2), "rollout.group_size", "rollout.downsample.size"),
    **_each(integer(2, null=True), "sampler.max_model_len"),
    "seed": integer(0, 2**32 - 1),  # the range of numpy's generator, which Lightning seeds
    **_each(_FINITE, "rollout.threshold"),
    **_each(_NOT_NEGATIVE, *REFERENCE_KEYS, "validation.temperature", "loss.entropy_coef"),
    **_each(_NOT_NEGATIVE, "advantage.eps", "optimizer.lr", "optimizer.weight_decay", "callbacks.reward_model.lr"),
    **_each(_POSITIVE, "rollout.temperature", "module.max_grad_norm", "loss.surrogate.epsilon_high"),
    "callbacks.reward_model.max_grad_norm": _POSITIVE,
    **_each(_POSITIVE, "loss.surrogate.tau_positive", "loss.surrogate.tau_negative"),
    **_each(_SHARE, "rollout.top_p", "rollout.top_entropy", "sampler.gpu_memory_utilization"),
    "callbacks.reference.alpha": _SHARE,
    **_each(_FRACTION, "rollout.min_p", "correction.low", "callbacks.reward_model.replay"),
    **_each(number(lambda v: v > 0, "GiB > 0", null=True), "rollout.kv_cache_gib", "sampler.kv_cache_gib"),
    **_each(number(lambda v: v > 1, "a number > 1", null=True), "loss.surrogate.dual_clip", "loss.surrogate.delta"),
    "loss.surrogate.epsilon_low": number(lambda v: 0 < v < 1, "a number in (0, 1)"),
    "loss.surrogate.ratio_max": number(lambda v: v > 1, "a ratio > 1, not a distance from 1"),
    "correction.cap": number(lambda v: v >= 1, "a ratio >= 1"),
    "correction.high": number(lambda v: v > 1, "a ratio > 1"),
    "advantage.correction": choice(0, 1),
    "callbacks.export.push_to_hub": Rule(
        lambda v: re.fullmatch(r"([\w.-]+/)?[\w.-]+", str(v)) is not None, "NAME or ORG/NAME of the hub", null=True
    ),
    "mode": choice("fit", "validate", "export", "preflight"),
    **_each(
        flag(), "rollout.rescore", "policy.activation_offload", "callbacks.doctor.stop", "callbacks.export.adapter"
    ),
    **_each(model_path(), "policy.path", "policy.adapter.path", "reference.path"),
    **_each(_ATTENTION, "policy.attn_implementation", "reference.attn_implementation"),
    "policy.dtype": choice(*_DTYPES),
    "policy.adapter": Rule(lambda v: isinstance(v, Mapping), "{r: 16, lora_alpha: 32}, {path: DIRECTORY}", null=True),
    "policy.quantization": choice("8bit", "4bit", null=True),
    "policy.chat_template": Rule(lambda v: isinstance(v, str), "a file with a Jinja template", null=True),
    "policy.system_prompt": Rule(lambda v: isinstance(v, str), "a text", null=True),
    "policy.reply_role": choice(*REPLY_ROLES, null=True),
    "tags": Rule(lambda v: isinstance(v, list) and all(isinstance(t, str) for t in v), "a list of texts, as in [a,b]"),
    **{f"data.{name}": DATA[name] for name in DATA if name not in ("steps", "tries", "validate_every")},  # are copies
    **{f"environment.{name}": rule for name, rule in ENVIRONMENT.items()},
    **_each(
        Rule(
            lambda v: isinstance(v, list) and all(isinstance(t, str) and t and not _ESCAPE.search(t) for t in v),
            'a list of texts that are not empty, with numbers in quotes, rollout.stop=["7"], and line breaks as such: '
            "in bash $'rollout.stop=[\"\\n\"]'",
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
    "trainer.num_nodes": integer(1),
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


Reader = Callable[[str], Any]
"""Dotted key -> value; raises `InvalidSetting` where there is none that can be relied on."""


class InvalidSetting(Exception):
    """A setting that a rule compares is absent, or breaks a rule of its own."""


def consistency_problems(config: Mapping[str, Any], broken: Collection[str]) -> Iterator[str]:
    """Settings that contradict one another; rules that compare a key of ``broken``, reported already, say nothing."""

    def get(key: str) -> Any:
        value = value_at(config, key, InvalidSetting)
        if value is InvalidSetting or key in broken:
            raise InvalidSetting(key)
        return value

    for check in _CROSS_CHECKS:
        try:
            yield from check(get)
        except InvalidSetting:
            continue


def uses_fsdp(trainer: Mapping[str, Any]) -> bool:
    """Whether the settings of a trainer are those of ``trainer=fsdp``."""
    return "FullySharded" in str(value_at(trainer, "strategy._target_"))


def _sizes(get: Reader) -> Iterator[str]:
    prompts, warmup, steps = get("data.prompts_per_step"), get("schedule.warmup_steps"), get("steps")
    group, kept, size = get("rollout.group_size"), get("rollout.downsample"), get("module").get("minibatch_size")
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
    if str(get("rollout._target_")).endswith(".RecordedCollector"):
        source, own = Path(get("rollout.path")).resolve(), Path(get("run_dir")).resolve()
        if own in (source, source.parent):
            yield f"rollout.path={get('rollout.path')}: this run would write its own rollouts there; name another run"


def _rewards(get: Reader) -> Iterator[str]:
    rewards, outcome = get("reward"), get("rollout.outcome")
    if not rewards:
        yield "reward=[]: choose at least one reward"
    elif isinstance(outcome, str) and outcome not in rewards:
        yield f"rollout.outcome={outcome}: must be one of the rewards {', '.join(rewards)} or null"
    for source, options in (get("data").get("sources") or {}).items():
        if unknown := sorted(set(options.get("rewards") or ()) - set(rewards)):
            yield f"data.sources.{source}.rewards: there is no reward {unknown[0]}, but {', '.join(rewards)}"
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
    used = {key: get(key) for key in REFERENCE_KEYS if get(key) != 0}
    if target == "grpo_lightning.reference.none":
        yield from (f"{key}={value} needs a reference, and reference=none has none" for key, value in used.items())
    elif target == "grpo_lightning.reference.adapter_off" and used and get("policy.adapter") is None:
        yield "reference=adapter_off needs policy.adapter, such as {r: 16, lora_alpha: 32}"


def _delta(get: Reader) -> Iterator[str]:
    delta, high = get("loss.surrogate.delta"), get("loss.surrogate.epsilon_high")
    if delta is not None and not isinstance(high, Mapping) and not isinstance(delta, Mapping) and delta <= 1 + high:
        yield f"loss.surrogate.delta={delta}: must be more than 1 + loss.surrogate.epsilon_high = {1 + high}"


def _weights(get: Reader) -> Iterator[str]:
    dtype, bits, adapter = get("policy.dtype"), get("policy").get("quantization"), get("policy.adapter")
    if adapter is not None:
        for key in adapter.keys() - {"path"} if "path" in adapter else ():
            yield f"policy.adapter.{key}={adapter[key]} does not work with policy.adapter.path, whose config has it"
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
    if get("callbacks.export.adapter"):
        yield "callbacks.export.adapter=true needs policy.adapter, such as {r: 16, lora_alpha: 32}"


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
        elif get("rollout._target_") == "grpo_lightning.recording.RecordedCollector" and get("rollout.rescore"):
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
            options = " or ".join(map(_format_value, allowed))
            yield f"trainer.{name}={_format_value(value)}: must be {options}; {instead}"


def _format_value(value: Any) -> str:
    """A value as a user writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_CROSS_CHECKS: tuple[Callable[[Reader], Iterator[str]], ...] = (
    *(_validation, _rewards, _weights, _sizes, _reference, _rollouts, _delta, _fsdp, _vllm, _environment, _trainer),
    _recorded,
)


_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Driver files of NVIDIA, AMD and WSL; without any of them Linux has no GPU that PyTorch calls CUDA."""


def default_precision(trainer: Mapping[str, Any]) -> str:
    """The precision for ``trainer.precision=null``: "bf16-mixed" on a CUDA device, else "32-true"."""
    accelerator = trainer.get("accelerator", "auto")
    on_cuda = accelerator == "cuda" or (accelerator in ("auto", "gpu") and has_cuda())
    return "bf16-mixed" if on_cuda else "32-true"


def has_cuda() -> bool:
    """Whether PyTorch finds a CUDA device."""
    if sys.platform == "linux" and not any(Path(device).exists() for device in _DEVICES):
        return False  # without the seconds that torch takes
    import torch

    return torch.cuda.is_available()


def num_processes(trainer: Mapping[str, Any]) -> int:
    """The number of processes that the settings of a trainer ask for on this machine."""
    import torch

    devices = trainer.get("devices", 1)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len(devices.strip(",").split(","))
    if devices in ("auto", -1, "-1"):
        on_gpu = trainer.get("accelerator", "auto") != "cpu"
        return max(torch.cuda.device_count(), 1) if on_gpu else 1
    return int(devices)


def device_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with ``trainer.accelerator``, ``trainer.devices`` and activation offloading on this machine.

    Args:
        config: All settings, whose values satisfy the rules of each key.
    """
    import torch

    trainer = config["trainer"]
    accelerator, devices = trainer.get("accelerator", "auto"), trainer.get("devices", 1)
    has_mps = torch.backends.mps.is_available()
    count = torch.cuda.device_count() or int(has_mps and accelerator in ("auto", "gpu", "mps"))
    if accelerator in ("gpu", "cuda", "mps") and (not count or (accelerator == "mps" and not has_mps)):
        yield f"trainer.accelerator={accelerator}: PyTorch finds no such GPU; use cpu or auto"
    elif accelerator != "cpu" and count and str(devices).isdigit() and int(devices) > count:
        yield f"trainer.devices={devices}: this machine has {count} GPUs"
    if config["policy"].get("activation_offload") and (accelerator == "cpu" or not torch.cuda.device_count()):
        yield (
            "policy.activation_offload=true: activations on a CPU are in CPU RAM already; "
            "policy.gradient_checkpointing=true saves memory there"
        )
