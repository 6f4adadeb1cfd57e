"""Preflight: what a run would do with its own policy, rewards and settings, measured before its first step."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_lightning import memory
from grpo_lightning.console import is_first_process, log_line, redact_config, write_json
from grpo_lightning.data import PromptData
from grpo_lightning.data.datamodule import collate
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.reward.spec import arguments
from grpo_lightning.rollout import Collected
from grpo_lightning.rollout.scoring import describe_examples
from grpo_lightning.schedule import resolve_schedules
from grpo_lightning.types import Scored

if TYPE_CHECKING:
    from lightning import Trainer

LOW_SIGNAL = 0.2  # share of groups with signal below which learning is slow, as in docs/metrics.md
HIGH_TRUNCATION = 0.1  # share of truncated completions above which the limit is too low, as in docs/metrics.md
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
    """Measure rollouts of so many prompts and an update, print what they promise, and write it to ``preflight.json``.

    Weights, counters and optimizer stay as they are. ``predicted`` is of `memory.predict`, or empty. Returns the facts
    as plain values; "verdict" is a list of sentences.
    """
    data.setup("preflight")
    module.to(trainer.strategy.root_device)
    module.begin_without_trainer()
    with trainer.precision_plugin.train_step_context():
        facts = measure(module, data, prompts=prompts, processes=trainer.world_size)
    if predicted:
        facts["memory_gib"]["predicted"] = predicted["peak"] / memory.GiB
    examples = facts.pop("examples")
    facts = redact_config(facts | {"verdict": list(advice(facts))})
    if is_first_process():
        for line in [*examples, "", *page(facts), "", *facts["verdict"]]:
            log_line(line)
        write_json(directory / "preflight.json", facts)
    return facts


def measure(module: GRPOLightningModule, data: PromptData, *, prompts: int, processes: int) -> dict[str, Any]:
    """Facts of rollouts of the next training prompts and of the backward passes of an update; no optimizer step.

    Of the processes, which divide a step's prompts, it measures one.

    Raises:
        RuntimeError: The first rollout contradicts itself, see `check_rollout`, or the update does not fit.
    """
    step, source = module.completed_steps, data.train
    rollout = resolve_schedules(module.rollout, step)
    unfiltered = replace(rollout, group_filter=None, max_tries=1, downsample=None)
    share = -(-data.prompts_per_step // processes)
    num_prompts = min(share, prompts)
    first = step * data.prompts_per_batch
    collected, times = [], []
    for i in range(max(1, min(-(-prompts // num_prompts), len(source) // num_prompts))):
        batch = collate(source, data.batch(first + i * num_prompts, num_prompts))
        module.clock.restart()
        collected.append(module.collect(batch, unfiltered, module.context("preflight", step + i)))
        times.append(module.clock.read())
    # the first update also tries which ways of computing the model allows
    update = [_update_seconds(module, one) for one in collected[-2:]][-1]
    scale = share / num_prompts
    phases = {
        phase: scale * median(sum(seconds.get(name, 0.0) for name in names) for seconds in times)
        for phase, names in _PHASES.items()
    } | {"update": scale * update}

    scored = Scored.concatenate([one.scored for one in collected])
    size, num_groups, rewards = scored.group_size, len(scored.prompts), rollout.scorer.rewards
    mixed = signal_fraction(scored.right.double().view(num_groups, size))
    if rollout.group_filter is not None:  # samples again until it has enough
        tries = min(float(rollout.max_tries), math.ceil(1 / mixed) if mixed else math.inf)
        phases |= {phase: phases[phase] * tries for phase in ("rollout", "reward")}
    steps, seconds = module.steps - step, sum(phases.values())
    lengths, environment = scored.sampled.mask.sum(-1).float().cpu(), rollout.environment
    completions = {
        "length_mean": float(lengths.mean()),
        "length_p95": float(lengths.quantile(0.95)),
        "length_max": float(lengths.max()),
        "max_new_tokens": rollout.max_new_tokens,
        "truncated": 1 - sum(scored.sampled.finished) / len(scored.sampled.finished),
    }
    return {
        "examples": list(describe_examples(module.policy, scored, 3)),
        "prompts": num_groups,
        "group_size": size,
        "outcome": rollout.scorer.outcome_name,
        "right": float(scored.right.float().mean()),
        "signal": signal_fraction(scored.rewards["total"].view(num_groups, size)),
        "mixed": mixed,
        "rewards": {name: _reward_summary(name, values, collected) for name, values in scored.rewards.items()},
        "columns": {name: [*arguments(one.function, scored.prompts.columns)[1]] for name, one in rewards.items()},
        "completions": completions | ({} if environment is None else {"max_turns": environment.max_turns}),
        "step": phases | {"total": seconds},
        "memory_gib": {"measured": module.peak_memory() / memory.GiB},
        "run": {"steps": steps, "seconds": steps * seconds},
    }


def _update_seconds(module: GRPOLightningModule, collected: Collected) -> float:
    """Seconds of all backward passes on a rollout; the gradients are dropped."""

    def drop_gradients() -> float:
        module.policy.zero_grad()
        return 0.0

    step = module.completed_steps
    rollout, loss = resolve_schedules(module.rollout, step), resolve_schedules(module.loss, step)
    started = time.perf_counter()
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


def _reward_summary(name: str, values: Tensor, collected: Sequence[Collected]) -> dict[str, Any]:
    """Mean, spread and missing values of a reward [B], and on which fraction it failed; None without a timeout."""
    failed = [float(one.metrics[key]) for one in collected if (key := f"failure/{name}") in one.metrics]
    known = values[values.isfinite()].double()
    spread = [known.mean(), known.std(correction=0), known.min(), known.max()] if len(known) else [None] * 4
    return {
        "none": 1 - len(known) / len(values),
        "failed": sum(failed) / len(failed) if failed else None,
        **{k: None if v is None else float(v) for k, v in zip(("mean", "std", "min", "max"), spread, strict=True)},
    }


def advice(facts: Mapping[str, Any]) -> Iterator[str]:
    """What to think of the facts of a preflight and what to change, most important first."""
    size, right, completions = (facts[name] for name in ("group_size", "right", "completions"))
    signal, mixed = facts["signal"], facts["mixed"]
    yield f"{signal:.0%} of the groups of {size} have signal (their rewards differ); {right:.0%} are right."
    unscored = [name for name, reward in facts["rewards"].items() if reward["none"] == 1]
    if facts["outcome"] in unscored:
        yield f"{facts['outcome']} is None for all completions, so that none counts as right."
    elif right == 0:
        yield (
            f"No completion is right by {facts['outcome']}: easier prompts, supervised fine-tuning first "
            "(module=sft), or look at what the reward expects."
        )
    elif signal < LOW_SIGNAL:
        remedy = "harder prompts" if right > 0.5 else "easier prompts"
        yield f"Few groups have signal: {remedy}, a larger rollout.group_size or a higher rollout.temperature."
    elif mixed < min(LOW_SIGNAL, signal / 2):
        yield (
            f"Only {mixed:.0%} of the groups differ in {facts['outcome']}: most signal comes from the other rewards; "
            "watch that the outcome rises with the total."
        )
    if completions["truncated"] > HIGH_TRUNCATION:
        turns = completions.get("max_turns")
        more = "" if turns is None else f", or environment.max_turns={turns} if episodes have no end in so many turns"
        limit = f"rollout.max_new_tokens={completions['max_new_tokens']}"
        more += ", or rollout.stop=[TEXT] if the model writes no end token" if completions["truncated"] == 1 else ""
        yield f"{completions['truncated']:.0%} of completions are truncated: raise {limit}{more}."
    for name, reward in facts["rewards"].items():
        if reward["failed"]:
            yield f"reward {name} failed on {reward['failed']:.1%} of completions: raise its timeout, or fix it."
        if reward["none"] > (HIGH_TRUNCATION if name != "total" else 0):
            columns = ", ".join(facts["columns"].get(name, ())) if name in unscored else ""
            hint = f": look at the columns that it reads ({columns}), which data.map_row changes" * bool(columns)
            yield f"reward {name} is None for {reward['none']:.1%} of completions{hint}."
        if name != "total" and reward["std"] == 0:
            yield f"reward {name} is {reward['mean']:g} for all completions: it has no signal."
    seconds = facts["run"]["seconds"]
    duration = f"{seconds / 60:.0f} min" if 120 <= seconds < 7200 else f"{seconds / 3600:.1f} h"
    yield f"{facts['run']['steps']} steps would take about {f'{seconds:.0f} s' if seconds < 120 else duration}."


def page(facts: Mapping[str, Any]) -> Iterator[str]:
    """The facts of a preflight as lines of at most 80 characters."""
    completions, step = facts["completions"], facts["step"]
    yield f"preflight: {facts['prompts']} prompts x {facts['group_size']} completions"
    for name, reward in facts["rewards"].items():
        yield f"reward/{name}"[:40] + f": None {reward['none']:.1%}"
        if reward["mean"] is not None:
            yield "              mean {mean:.3g} ± {std:.3g}, from {min:.3g} to {max:.3g}".format(**reward)
    yield "completions   mean {length_mean:.1f}, 95 % within {length_p95:.0f}, longest {length_max:.0f}".format(
        **completions
    )
    yield f"              {completions['truncated']:.1%} truncated at {completions['max_new_tokens']} tokens"
    yield f"groups        {facts['signal']:.1%} with signal, {facts['mixed']:.1%} differ in {facts['outcome']}"[:80]
    yield f"a step        {step['total']:.3g} s: " + ", ".join(
        f"{name} {step[name]:.3g} s" for name in (*_PHASES, "update")
    )
    yield "memory        " + ", ".join(f"{value:.2f} GiB {kind}" for kind, value in facts["memory_gib"].items())


def signal_fraction(rewards: Tensor) -> float:
    """The share of groups [P, G] whose rewards differ by more than rounding; NaN (no reward) differs from nothing."""
    gaps = rewards.nan_to_num(-math.inf).amax(-1) - rewards.nan_to_num(math.inf).amin(-1)
    return float((gaps > 1e-6).double().mean())
