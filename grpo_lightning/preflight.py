"""Preflight: what a run would do with its own policy, rewards and settings, measured before its first step."""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_lightning import memory
from grpo_lightning.clock import peak_memory
from grpo_lightning.console import log_line, redact_config, wrap, write_json
from grpo_lightning.data import PromptData
from grpo_lightning.data.datamodule import collate, prompt_index
from grpo_lightning.distributed.devices import is_first_process
from grpo_lightning.distributed.strategies import trainer_shards
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.module.base import StepModule
from grpo_lightning.rollout import Collector
from grpo_lightning.rollout.collector import Collected
from grpo_lightning.schedule import resolve_schedules
from grpo_lightning.types import Scored

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
    order = [prompt_index(data.seed, i, len(source)) for i in range(first, first + count)]
    if on_gpu := module.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(module.device)
    collected, times = [], []
    for i in range(number):
        batch = collate(source, order[i * num_prompts : (i + 1) * num_prompts])
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


LOW_SIGNAL = 0.2
"""Share of groups with signal below which learning is slow, as in docs/metrics.md."""
HIGH_TRUNCATION = 0.1
"""Share of truncated completions above which the limit is too low, as in docs/metrics.md."""


def advice(facts: Mapping[str, Any]) -> Iterator[str]:
    """What to think of the facts of a preflight and what to change, most important first."""
    size, right, pays, lengths = (facts[name] for name in ("group_size", "right", "pays", "completions"))
    current = facts["groups"][str(size)]
    yield f"{current['signal']:.0%} of the groups of {size} have signal (their rewards differ); {right:.0%} are right."
    if right == 0:
        yield (
            f"No completion is right by {facts['outcome']}: easier prompts, supervised fine-tuning first "
            "(module=sft), or look at what the reward expects."
        )
    elif current["signal"] < LOW_SIGNAL:
        remedy = "harder prompts" if right > 0.5 else "easier prompts"
        yield f"Few groups have signal: {remedy}, a larger rollout.group_size or a higher rollout.temperature."
    elif current["mixed"] < min(LOW_SIGNAL, current["signal"] / 2):
        yield (
            f"Only {current['mixed']:.0%} of the groups differ in {facts['outcome']}: most signal comes from the other "
            "rewards; watch that the outcome rises with the total."
        )
    if pays not in (None, size):
        other = facts["groups"][str(pays)]
        yield (
            f"rollout.group_size={pays} pays: {other['signal']:.0%} of its groups have signal, a step takes "
            f"{other['seconds']:.2g} s instead of {current['seconds']:.2g} s."
        )
    if lengths["truncated"] > HIGH_TRUNCATION:
        turns = lengths.get("max_turns")
        more = "" if turns is None else f", or environment.max_turns={turns} if episodes have no end in so many turns"
        yield (
            f"{lengths['truncated']:.0%} of completions are truncated: raise rollout.max_new_tokens="
            f"{lengths['max_new_tokens']}{more}."
        )
    for name, reward in facts["rewards"].items():
        if reward["failed"]:
            yield f"reward {name} failed on {reward['failed']:.1%} of completions: raise its timeout, or fix it."
        if reward["none"] > (HIGH_TRUNCATION if name != "total" else 0):
            yield f"reward {name} is None for {reward['none']:.1%} of completions."
        if name != "total" and reward["std"] == 0:
            yield f"reward {name} is {reward['mean']:g} for all completions: it has no signal."
    yield f"{facts['run']['steps']} steps would take about {_duration(facts['run']['seconds'])}."


def page(facts: Mapping[str, Any]) -> Iterator[str]:
    """The facts of a preflight as lines of at most 80 characters."""
    completions, run, step = facts["completions"], facts["run"], facts["step"]
    yield f"preflight: {facts['prompts']} prompts x {facts['group_size']} completions"
    for name, reward in facts["rewards"].items():
        failed = "" if reward["failed"] is None else f", failed {reward['failed']:.1%}"
        yield f"reward/{name}"[:40] + f": None {reward['none']:.1%}{failed}"
        if reward["mean"] is not None:
            yield "              mean {mean:.3g} ± {std:.3g}, from {min:.3g} to {max:.3g}".format(**reward)
    yield (
        f"completions   mean {completions['length_mean']:.1f}, 95 % within {completions['length_p95']:.0f}, longest "
        f"{completions['length_max']:.0f} of {completions['max_new_tokens']} tokens"
    )
    turns = " or environment.max_turns" if completions.get("max_turns") else ""
    yield f"              {completions['truncated']:.1%} truncated at rollout.max_new_tokens{turns}"
    yield ""
    yield "group size    signal   outcome differs    s/step"
    for size, group in facts["groups"].items():
        notes = [note for note, key in (("now", "group_size"), ("pays", "pays")) if facts[key] == int(size)]
        columns = f"{size:>10} {group['signal']:>9.0%} {group['mixed']:>17.0%} {group['seconds']:>9.2f}"
        yield f"{columns}   {', '.join(notes)}".rstrip()
    yield "Sizes above the sampled one: prompts' rates are taken to be beta distributed."
    yield ""
    phases = ", ".join(f"{name} {step[name]:.3g} s" for name in ("rollout", "reward", "score", "update"))
    yield f"a step        {step['total']:.3g} s: {phases}"
    yield "memory        " + ", ".join(f"{value:.2f} GiB {kind}" for kind, value in facts["memory_gib"].items())
    duration = _duration(run["seconds"])
    yield f"the run       {run['steps']} steps and {run['validations']} validations: about {duration}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_SPREADS = torch.linspace(-7, 7, 281, dtype=torch.float64).sigmoid()
"""Candidates for 1 / (a + b + 1), the share of a value's variance that lies between prompts."""
_DIGITS = 6
"""Rewards that agree in so many decimals are equal: a sum of weights times scores rounds."""


def signal_share(rewards: Tensor, group_size: int) -> float:
    """The expected share of groups of ``group_size`` whose rewards differ.

    Up to the sampled size it is unbiased: g of n completions all have a value that c of the n have with probability
    C(c, g) / C(n, g). Beyond it, each value's probability varies over the prompts like Beta(a, b), whose mean is the
    observed one and whose spread is the likeliest (beta-binomial).

    Args:
        rewards: [P, n] of groups of n completions; NaN (no reward) differs from nothing.
        group_size: Of the groups asked about, at least 2.
    """
    size = rewards.shape[1]
    groups = [Counter(round(value, _DIGITS) for value in row if math.isfinite(value)) for row in rewards.tolist()]
    if group_size <= size:
        equal = sum(_equal_subsets([*group.values()], size, group_size) for group in groups)
        return 1 - equal / (math.comb(size, group_size) * len(groups))
    for group in groups:  # unknown rewards are given to the most frequent value
        value = max(group, key=lambda one: group[one]) if group else 0.0
        group[value] += size - group.total()
    # a value that never fills half of a group hardly ever fills a larger one
    values = {value for group in groups for value, count in group.items() if 2 * count >= size}
    equal_share = sum(_moment([group[value] for group in groups], size, group_size) for value in values)
    # a larger group differs at least as often as a part of it
    return max(signal_share(rewards, size), 1 - equal_share)


def _equal_subsets(counts: Sequence[int], size: int, subset: int) -> int:
    """How many subsets have equal known rewards, with ``counts`` of each reward; the others are unknown."""
    unknown = size - sum(counts)
    # those without any known value are in every value's count, and are counted once
    return sum(math.comb(count + unknown, subset) for count in counts) - (len(counts) - 1) * math.comb(unknown, subset)


def _moment(counts: Sequence[int], size: int, power: int) -> float:
    """E[p ** power] where ``counts`` [P] of ``size`` each are binomial, with p beta distributed."""
    mean = sum(counts) / (size * len(counts))
    if mean in (0, 1):
        return mean
    total = 1 / _SPREADS - 1  # a + b of every candidate
    a, b = mean * total, (1 - mean) * total
    hits = torch.tensor(counts, dtype=torch.float64).unsqueeze(-1)  # [P, 1] against [candidates]
    likelihood = (_log_beta(a + hits, b + size - hits) - _log_beta(a, b)).sum(0)
    return float((_log_beta(a + power, b) - _log_beta(a, b))[likelihood.argmax()].exp())


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
