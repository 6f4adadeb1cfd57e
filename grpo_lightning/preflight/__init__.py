"""Preflight: what a run would do with its own policy, rewards and settings, measured before its first step."""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Some rollouts of one process's prompts, with their times."""

    scored: Scored
    """All completions, before any group filter or down-sampling."""
    failed: dict[str, float]
    """Reward with a timeout -> fraction of the completions on which it failed."""
    prompts: int
    """Prompts of each rollout."""
    phases: dict[str, float]
    """Median seconds of "rollout", "reward", "score" (the reference) and "update" for one rollout."""
    memory: int
    """Peak bytes: allocated on a GPU, resident on a CPU; without the optimizer's."""


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
        measured = measure(module, data, prompts=prompts, processes=trainer.world_size)
    facts = summarize(module, data, measured, processes=trainer.world_size, predicted=predicted)
    facts = redact_config(facts | {"verdict": list(advice(facts))})
    if is_first_process():
        for line in [*page(facts), "", *facts["verdict"]]:
            log_line(line)
        write_json(directory / "preflight.json", facts)
    return facts


def measure(module: GRPOLightningModule, data: PromptData, *, prompts: int, processes: int) -> Measurement:
    """Collect rollouts of the next training prompts, and make the backward passes of an update, but no optimizer step.

    Of the processes, which divide a step's prompts, it measures one.

    Raises:
        RuntimeError: The first rollout contradicts itself, see ``module.selfcheck``, or the update does not fit.
    """
    step, source = module.completed_steps, data.train
    rollout = resolve_schedules(module.rollout, step)
    unfiltered = replace(rollout, group_filter=None, max_tries=1, downsample=None)
    size = min(-(-data.prompts_per_step // processes), prompts)
    number = max(1, min(-(-prompts // size), len(source) // size))
    first = step * data.prompts_per_batch
    order = [source[prompt_index(data.seed, i, len(source))] for i in range(first, first + number * size)]
    batches = [Prompts.collate(order[start : start + size]) for start in range(0, number * size, size)]
    if on_gpu := module.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(module.device)
    collected, seconds = zip(*(_collect(module, unfiltered, batch, i) for i, batch in enumerate(batches)), strict=True)
    # the first one also tries which ways of computing the model allows
    update = [_update(module, rollout, one) for one in collected[-2:]][-1]
    return Measurement(
        scored=Scored.concatenate([one.scored for one in collected]),
        failed={
            name.removeprefix("failure/"): sum(float(one.metrics[name]) for one in collected) / number
            for name in collected[0].metrics
            if name.startswith("failure/")
        },
        prompts=size,
        phases={phase: median(one[phase] for one in seconds) for phase in _PHASES} | {"update": update},
        memory=torch.cuda.max_memory_allocated(module.device) if on_gpu else peak_memory(),
    )


def _collect(
    module: GRPOLightningModule, rollout: Collector, prompts: Prompts, number: int
) -> tuple[Collected, dict[str, float]]:
    """A rollout, and its seconds by phase."""
    module.clock.restart()
    collected = module.collect(prompts, rollout, module.context("preflight", module.completed_steps + number))
    seconds = module.clock.read()
    return collected, {phase: sum(seconds.get(name, 0.0) for name in names) for phase, names in _PHASES.items()}


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


def summarize(
    module: GRPOLightningModule,
    data: PromptData,
    measured: Measurement,
    *,
    processes: int,
    predicted: Mapping[str, float],
) -> dict[str, Any]:
    """The facts of ``preflight.json``, arguments as in `run_preflight`."""
    scored, share = measured.scored, -(-data.prompts_per_step // processes)
    lengths, environment = scored.sampled.mask.sum(-1).float().cpu(), module.rollout.environment
    size = scored.group_size
    completions = {
        "length_mean": float(lengths.mean()),
        "length_p95": float(lengths.quantile(0.95)),
        "length_max": float(lengths.max()),
        "max_new_tokens": resolve_schedules(module.rollout, module.completed_steps).max_new_tokens,
        "truncated": 1 - sum(scored.sampled.finished) / len(scored.sampled.finished),
    }
    shape = (len(scored.prompts), size)
    total, right = scored.rewards["total"].view(shape), scored.right.double().view(shape)
    scale = share / measured.prompts
    groups = {
        str(other): {
            "signal": signal_share(total, other),
            "mixed": signal_share(right, other),
            "seconds": sum(measured.phases.values()) * scale * other / size,
        }
        for other in sorted({*GROUP_SIZES, size})
    }
    best = max(group["signal"] for group in groups.values())
    paying = [int(other) for other, group in groups.items() if group["signal"] >= SUFFICIENT * best > 0]
    tries = 1.0  # of a group filter, which samples again until it has enough
    if module.rollout.group_filter is not None:
        passing = groups[str(size)]["mixed"]
        tries = min(float(module.rollout.max_tries), math.ceil(1 / passing) if passing else math.inf)
    phases = {
        phase: seconds * scale * (tries if phase in ("rollout", "reward") else 1.0)
        for phase, seconds in measured.phases.items()
    }
    left, every = range(module.completed_steps, module.steps), module.validation.every
    validations = sum(step % every == 0 for step in left) + 1
    per_completion = (measured.phases["rollout"] + measured.phases["reward"]) / (measured.prompts * size)
    validated = len(data.validation) * module.validation.samples_per_prompt / processes
    return {
        "prompts": len(scored.prompts),
        "group_size": size,
        "outcome": module.rollout.scorer.outcome_name,
        "right": float(scored.right.float().mean()),
        "rewards": {name: _reward(values, measured.failed.get(name)) for name, values in scored.rewards.items()},
        "completions": completions | ({} if environment is None else {"max_turns": environment.max_turns}),
        "groups": groups,
        "pays": min(paying, default=None),
        "step": phases | {"total": sum(phases.values())},
        "memory_gib": {"measured": measured.memory / memory.GiB}
        | ({"predicted": predicted["peak"] / memory.GiB} if predicted else {}),
        "run": {
            "steps": len(left),
            "validations": validations,
            "validation_seconds": per_completion * validated,
            "seconds": len(left) * sum(phases.values()) + validations * per_completion * validated,
        },
    }


def _reward(values: Tensor, failed: float | None) -> dict[str, Any]:
    """Mean, spread and missing values of a reward [B]."""
    known = values[values.isfinite()].double()
    names = ("mean", "std", "min", "max")
    spread = [known.mean(), known.std(correction=0), known.min(), known.max()] if len(known) else [None] * 4
    return {
        "none": 1 - len(known) / len(values),
        "failed": failed,
        **{name: None if value is None else float(value) for name, value in zip(names, spread, strict=True)},
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
