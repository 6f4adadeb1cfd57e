"""What a run would do, measured on some of its prompts, as plain values for ``preflight.json``."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from grpo_lightning import memory
from grpo_lightning.data import PromptData
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.preflight.groups import teaching_share
from grpo_lightning.preflight.measure import Measured, measure
from grpo_lightning.preflight.verdict import verdict

GROUP_SIZES = (4, 8, 16, 32)
"""For which it is predicted how many groups teach, besides the run's own."""
ENOUGH = 0.8
"""Of the most teaching completions per second that a group size gets; the smallest size that gets it pays."""


def look(
    module: GRPOLightningModule, data: PromptData, *, prompts: int, processes: int, predicted: Mapping[str, float]
) -> dict[str, Any]:
    """Measure some rollouts, and say what they promise.

    Args:
        module: The run's, on its device; its weights, and whatever else it holds, stay as they are.
        data: Its prompts.
        prompts: How many to ask.
        processes: Of the run.
        predicted: Bytes by part that the run was predicted to need, see `memory.predicted`; may be empty.

    Returns:
        Plain values by name, for JSON; "verdict" is a list of sentences.
    """
    measured = measure(module, data, prompts=prompts, processes=processes)
    scored, own = measured.scored, -(-data.prompts_per_step // processes)
    groups = (len(scored.prompts), scored.group_size)
    lengths, environment = scored.sampled.mask.sum(-1).float().cpu(), module.rollout.environment
    facts: dict[str, Any] = {
        "prompts": groups[0],
        "group_size": groups[1],
        "outcome": module.rollout.scorer.outcome_name,
        "right": float(scored.right.float().mean()),
        "rewards": {name: _reward(values, measured.failed.get(name)) for name, values in scored.rewards.items()},
        "completions": {
            "length_mean": float(lengths.mean()),
            "length_p95": float(lengths.quantile(0.95)),
            "length_max": float(lengths.max()),
            "max_new_tokens": measured.max_new_tokens,
            "truncated": 1 - sum(scored.sampled.finished) / len(scored.sampled.finished),
        }
        | ({} if environment is None else {"max_turns": environment.max_turns}),
        "groups": {str(size): _group(measured, size, own) for size in sorted({*GROUP_SIZES, groups[1]})},
    }
    facts["pays"] = best_size(facts["groups"])
    facts["step"] = _step(module, measured, own)
    facts["memory_gib"] = {"measured": measured.memory / memory.GiB}
    if predicted:
        facts["memory_gib"]["predicted"] = predicted["peak"] / memory.GiB
    facts["run"] = _run(module, data, measured, facts["step"]["total"], processes)
    return facts | {"verdict": verdict(facts)}


def _reward(values: Tensor, failed: float | None) -> dict[str, Any]:
    known = values[values.isfinite()].double()
    facts: dict[str, Any] = {"none": float((~values.isfinite()).double().mean()), "failed": failed}
    if not len(known):
        return facts | dict.fromkeys(("mean", "std", "min", "max"))
    spread = {"std": float(known.std(correction=0)), "min": float(known.min()), "max": float(known.max())}
    return facts | {"mean": float(known.mean()), **spread}


def _group(measured: Measured, size: int, own: int) -> dict[str, float]:
    """What groups of a size promise: the shares that teach and whose outcome differs, and what a step of them costs."""
    scored = measured.scored
    shape = (len(scored.prompts), scored.group_size)
    teaching = teaching_share(scored.rewards["total"].view(shape), size)
    seconds = step_seconds(measured, size) * own / measured.prompts
    return {
        "teaching": teaching,
        "mixed": teaching_share(scored.right.double().view(shape), size),
        "seconds": seconds,
        "teaching_per_second": teaching * own * size / seconds,
    }


def step_seconds(measured: Measured, size: int) -> float:
    """Seconds of a step at a group size: collecting has a fixed part, as measured at two sizes; an update has none."""
    own = measured.scored.group_size
    collecting = sum(seconds for phase, seconds in measured.phases.items() if phase != "update")
    fixed = 0.0
    if measured.small_group:
        small, seconds = measured.small_group
        fixed = min(max(seconds - (collecting - seconds) * small / (own - small), 0.0), collecting)
    return fixed + (collecting - fixed + measured.phases["update"]) * size / own


def best_size(groups: Mapping[str, Mapping[str, float]]) -> int | None:
    """The smallest group size that gets almost as many teaching completions per second as any; None without one."""
    best = max(group["teaching_per_second"] for group in groups.values())
    paying = [int(size) for size, one in groups.items() if one["teaching_per_second"] >= ENOUGH * best > 0]
    return min(paying, default=None)


def _step(module: GRPOLightningModule, measured: Measured, own: int) -> dict[str, float]:
    """Seconds of a step by phase, for ``own`` prompts of a process; a group filter asks again until it has enough."""
    tries = 1.0
    if module.rollout.group_filter is not None:
        size = measured.scored.group_size
        kept = teaching_share(measured.scored.right.double().view(-1, size), size)
        tries = min(float(module.rollout.max_tries), math.ceil(1 / kept) if kept else math.inf)
    scale = own / measured.prompts
    asked = {"rollout": tries, "reward": tries}
    phases = {phase: seconds * scale * asked.get(phase, 1.0) for phase, seconds in measured.phases.items()}
    return phases | {"total": sum(phases.values())}


def _run(
    module: GRPOLightningModule, data: PromptData, measured: Measured, step: float, processes: int
) -> dict[str, Any]:
    """Steps that are left, and the seconds that they and their validations take."""
    left = module.steps - module.completed_steps
    times = sum(number % module.validation.every == 0 for number in range(module.completed_steps, module.steps)) + 1
    completions = len(data.validation) * module.validation.samples_per_prompt / processes
    sampling = measured.phases["rollout"] + measured.phases["reward"]
    validation = sampling * completions / (measured.prompts * measured.scored.group_size)
    return {
        "steps": left,
        "validations": times,
        "validation_seconds": validation,
        "seconds": left * step + times * validation,
    }
