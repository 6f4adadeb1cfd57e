"""Preflight: what a run would do with its own policy, rewards and settings, measured before its first step."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_lightning import memory
from grpo_lightning.clock import peak_memory
from grpo_lightning.config.redaction import redact_config
from grpo_lightning.console import log_line, wrap, write_json
from grpo_lightning.data import PromptData
from grpo_lightning.data.order import prompt_index
from grpo_lightning.distributed.devices import is_first_process
from grpo_lightning.distributed.sharding import trainer_shards
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.module.base import StepModule
from grpo_lightning.preflight.advice import advice, page
from grpo_lightning.preflight.group_signal import signal_share
from grpo_lightning.rollout import Collector
from grpo_lightning.rollout.collector import Collected
from grpo_lightning.schedule import resolve_schedules
from grpo_lightning.types import Prompts, Scored

if TYPE_CHECKING:
    from lightning import Trainer

log = logging.getLogger(__name__)

GROUP_SIZES = (4, 8, 16, 32)
"""For which the share of groups with signal is predicted, besides the run's own."""
SUFFICIENT = 0.8
"""Of the highest share of groups with signal at any group size; the smallest size that reaches it pays."""
_PHASES = {"rollout": ("rollout", "wake", "sync", "environment"), "reward": ("reward",), "score": ("score",)}
"""Phase -> those of the clock that count as it."""


def run_preflight(
    module: GRPOLightningModule,
    data: PromptData,
    trainer: "Trainer",
    *,
    prompts: int,
    predicted: Mapping[str, float],
    directory: Path,
) -> dict[str, Any]:
    """Measure some rollouts and an update, print what they promise, and write it to ``preflight.json``.

    Args:
        module: The run's; its weights, counters and optimizer stay as they are.
        data: Its prompts.
        trainer: The run's, for device and precision.
        prompts: How many to sample, in batches of a step's size.
        predicted: Bytes by part, see `memory.predict`; may be empty.
        directory: The run's.

    Returns:
        The facts as plain values; "verdict" is a list of sentences.
    """
    data.setup("preflight")
    module.to(trainer.strategy.root_device)
    module.begin_without_trainer()
    with trainer.precision_plugin.train_step_context():
        facts = measure(module, data, prompts=prompts, processes=trainer.world_size)
    if predicted:
        facts["memory_gib"]["predicted"] = predicted["peak"] / memory.GiB
    facts = redact_config(facts | {"verdict": list(advice(facts))})
    if is_first_process():
        for line in [*page(facts), "", *facts["verdict"]]:
            log_line(line)
        write_json(directory / "preflight.json", facts)
    return facts


def measure(module: GRPOLightningModule, data: PromptData, *, prompts: int, processes: int) -> dict[str, Any]:
    """Facts of rollouts of the next training prompts and of the backward passes of an update; no optimizer step.

    Of the processes, which divide a step's prompts, it measures one.

    Raises:
        RuntimeError: The first rollout contradicts itself, see ``module.selfcheck``, or the update does not fit.
    """
    step, source = module.completed_steps, data.train
    rollout = resolve_schedules(module.rollout, step)
    unfiltered = replace(rollout, group_filter=None, max_tries=1, downsample=None)
    share = -(-data.prompts_per_step // processes)
    num_prompts = min(share, prompts)
    number = max(1, min(-(-prompts // num_prompts), len(source) // num_prompts))
    first, count = step * data.prompts_per_batch, number * num_prompts
    order = [source[prompt_index(data.seed, i, len(source))] for i in range(first, first + count)]
    if on_gpu := module.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(module.device)
    collected, times = [], []
    for i in range(number):
        batch = Prompts.collate(order[i * num_prompts : (i + 1) * num_prompts])
        module.clock.restart()
        collected.append(module.collect(batch, unfiltered, module.context("preflight", step + i)))
        times.append(module.clock.read())
    # the first update also tries which ways of computing the model allows
    update = [_update(module, rollout, one) for one in collected[-2:]][-1]
    scale = share / num_prompts
    phases = {
        phase: scale * median(sum(seconds.get(name, 0.0) for name in names) for seconds in times)
        for phase, names in _PHASES.items()
    } | {"update": scale * update}

    scored = Scored.concatenate([one.scored for one in collected])
    size, shape = scored.group_size, (len(scored.prompts), scored.group_size)
    total, right = scored.rewards["total"].view(shape), scored.right.double().view(shape)
    groups = {
        str(other): {
            "signal": signal_share(total, other),
            "mixed": signal_share(right, other),
            "seconds": sum(phases.values()) * other / size,
        }
        for other in sorted({*GROUP_SIZES, size})
    }
    best = max(group["signal"] for group in groups.values())
    paying = [int(other) for other, group in groups.items() if group["signal"] >= SUFFICIENT * best > 0]
    validated = len(data.validation) * module.validation.samples_per_prompt / (processes * share * size)
    validation_seconds = (phases["rollout"] + phases["reward"]) * validated
    if rollout.group_filter is not None:  # samples again until it has enough
        passing = groups[str(size)]["mixed"]
        tries = min(float(rollout.max_tries), math.ceil(1 / passing) if passing else math.inf)
        phases |= {phase: phases[phase] * tries for phase in ("rollout", "reward")}
    left, every = range(step, module.steps), module.validation.every
    validations = sum(number % every == 0 for number in left) + 1
    lengths, environment = scored.sampled.mask.sum(-1).float().cpu(), rollout.environment
    completions = {
        "length_mean": float(lengths.mean()),
        "length_p95": float(lengths.quantile(0.95)),
        "length_max": float(lengths.max()),
        "max_new_tokens": rollout.max_new_tokens,
        "truncated": 1 - sum(scored.sampled.finished) / len(scored.sampled.finished),
    }
    peak = torch.cuda.max_memory_allocated(module.device) if on_gpu else peak_memory()
    return {
        "prompts": len(scored.prompts),
        "group_size": size,
        "outcome": rollout.scorer.outcome_name,
        "right": float(scored.right.float().mean()),
        "rewards": {name: _reward(name, values, collected) for name, values in scored.rewards.items()},
        "completions": completions | ({} if environment is None else {"max_turns": environment.max_turns}),
        "groups": groups,
        "pays": min(paying, default=None),
        "step": phases | {"total": sum(phases.values())},
        "memory_gib": {"measured": peak / memory.GiB},
        "run": {
            "steps": len(left),
            "validations": validations,
            "validation_seconds": validation_seconds,
            "seconds": len(left) * sum(phases.values()) + validations * validation_seconds,
        },
    }


def _update(module: GRPOLightningModule, rollout: Collector, collected: Collected) -> float:
    """Seconds of all backward passes on a rollout; the gradients are dropped."""

    def drop_gradients() -> float:
        for parameter in module.policy.parameters():
            parameter.grad = None
        return 0.0

    loss, started = resolve_schedules(module.loss, module.completed_steps), time.perf_counter()
    try:
        updates = module.update(collected, loss, rollout.temperature, apply_gradients=drop_gradients)
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            "the update does not fit into the GPU's memory: a smaller module.microbatch_tokens, "
            "policy.gradient_checkpointing=true, policy.adapter or trainer=fsdp need less"
        ) from error
    float(updates[-1].ratio.sum())  # waits for a GPU
    seconds = time.perf_counter() - started
    if rollout.downsample is None:
        return seconds
    rewards = collected.scored.rewards["total"].view(len(collected.scored.prompts), -1)
    return seconds * rollout.downsample(rewards).shape[-1] / rewards.shape[-1]


def _reward(name: str, values: Tensor, collected: Sequence[Collected]) -> dict[str, Any]:
    """Mean, spread and missing values of a reward [B], and on which fraction it failed; None without a timeout."""
    failed = [float(one.metrics[key]) for one in collected if (key := f"failure/{name}") in one.metrics]
    known = values[values.isfinite()].double()
    spread = [known.mean(), known.std(correction=0), known.min(), known.max()] if len(known) else [None] * 4
    return {
        "none": 1 - len(known) / len(values),
        "failed": sum(failed) / len(failed) if failed else None,
        **{k: None if v is None else float(v) for k, v in zip(("mean", "std", "min", "max"), spread, strict=True)},
    }


def announce_memory(
    config: Mapping[str, Any], module: StepModule, data: PromptData, trainer: "Trainer"
) -> dict[str, float]:
    """Print the memory that a run needs, and warn where a GPU has less; returns the bytes by part, if predictable."""
    shape = module.policy.shape()
    if shape is None or not memory.is_predictable(config) or not is_first_process():
        return {}
    on_cpu = trainer.strategy.root_device.type == "cpu"
    first = [data.validation[number][0] for number in range(min(64, len(data.validation)))]
    parts = memory.predict(
        shape,
        memory.workload(
            config,
            processes=trainer.world_size,
            is_sharded=trainer_shards(trainer),
            on_cpu=on_cpu,
            prompt_tokens=max(module.policy.count_tokens(first)),
        ),
    )
    for line in wrap(memory.format_prediction(parts)):
        log_line(line)
    if not on_cpu and parts["peak"] > (available := torch.cuda.mem_get_info()[1]):
        log.warning(
            "the GPU has %.1f GiB: trainer=fsdp, policy.gradient_checkpointing=true, a smaller "
            "module.microbatch_tokens, loss.kl_coef=0 or policy.adapter need less",
            available / memory.GiB,
        )
    return parts
