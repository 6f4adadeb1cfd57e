"""Replay of recorded rollouts without a model: what other rewards, advantages and losses would have made of them.

``python -m grpo_lightning.replay DIR [overrides…]`` prints it.
"""

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from grpo_lightning import recording
from grpo_lightning.composition import load_run_config
from grpo_lightning.config.rules import REFERENCE_KEYS
from grpo_lightning.config.settings import value_at
from grpo_lightning.console import describe_error, log_line, redact_config, single_line
from grpo_lightning.loss import PolicyLoss
from grpo_lightning.recording import RecordedRollout, from_lines
from grpo_lightning.reward import RewardSpec
from grpo_lightning.rollout import Collector
from grpo_lightning.rollout.collector import advantage_metrics, sampled_metrics, token_metrics
from grpo_lightning.rollout.scoring import StepContext, turn_spans
from grpo_lightning.schedule import resolve_schedules, restore_schedules, schedule_state
from grpo_lightning.types import Rollout, Scored

PARTS = ("reward", "advantage", "loss", "rollout")
"""The settings that a replay follows."""
Build = Callable[[str, Any], Any]
"""(dotted key, settings) -> the object that they describe."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print metrics of the rollouts that a run has recorded, as logged and as they are with these settings.

    Overrides are those of train.py, such as reward=[accuracy,length] or algorithm=dr_grpo. Without any, the logged
    values come out again.
    """
    parser = argparse.ArgumentParser(prog="python -m grpo_lightning.replay", description=main.__doc__)
    parser.add_argument("directory", type=Path, help="of a run, which has rollouts/ and .hydra/")
    parser.add_argument("overrides", nargs="*", help="settings that differ from the run's")
    parser.add_argument(
        "--steps", type=step_range, default=":", metavar="FIRST:LAST", help="both included; default: all"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_intermixed_args(arguments)
    logging.basicConfig(format="[%(levelname)s] %(message)s")
    try:
        replays = replay(options.directory, options.overrides, steps=options.steps)
    except (ValueError, OSError) as error:
        log_line(describe_error(error))
        sys.exit(1)
    if options.format == "json":
        page = {"overrides": options.overrides, "steps": [vars(one) for one in replays]}
        print(json.dumps(page, indent=2, allow_nan=False))
    else:
        print(replay_table(replays))


def step_range(text: str) -> range:
    """The steps of ``FIRST:LAST``, both included and both optional."""
    first, _, last = text.partition(":")
    return range(int(first or 0), int(last or sys.maxsize - 1) + 1)


def replay(directory: Path, overrides: Sequence[str] = (), *, steps: range | None = None) -> "list[ReplayedMetrics]":
    """Replay the rollouts that a run has recorded.

    Args:
        directory: The run's.
        overrides: Settings that differ from the run's.
        steps: Those to replay; default: all.

    Raises:
        ValueError: There are no recorded rollouts, they are damaged, or the settings cannot work.
    """
    place = recording.find_directory(directory)
    files = recording.recorded_steps(place)
    selected = [path for step, path in files.items() if steps is None or step in steps]
    if not selected:
        what = recording.format_steps(files)
        raise ValueError(f"{place} has no such recorded rollouts; there are {what} (callbacks=rollouts records them)")
    run = place.parent if place.name == recording.FOLDER else place
    config, build = load_run_config(run, overrides, PARTS)
    recorded = (from_lines(*recording.read(path), torch.device("cpu")) for path in selected)
    return [replay_rollout(one, config, build) for one in recorded]


@dataclass(frozen=True)
class ReplayedMetrics:
    """Metrics of a rollout as logged and as replayed."""

    step: int
    metrics: dict[str, dict[str, float | None]]  # name -> its value "recorded" and "replayed"
    approximate: dict[str, str]  # name -> why the two may differ even with the settings of the run
    computed_again: list[str]  # rewards that were called


def _no_tokens(ids: Sequence[int], end: int) -> int:
    """Stands in for the policy, which knows where the tokens of a text are."""
    raise ValueError(
        "a reward scores single steps, and replay loads no policy to find their tokens: use rollout=recorded "
        "rollout.rescore=true"
    )


def replay_rollout(recorded: RecordedRollout, config: Mapping[str, Any], build: Build) -> ReplayedMetrics:
    """Score and compare a recorded rollout and compute its loss as settings say; no policy is needed.

    Args:
        recorded: The rollout.
        config: Settings of `PARTS`.
        build: Makes objects of them.

    Raises:
        ValueError: The settings need something that was not recorded.
    """
    header, scored, step = recorded.header, recorded.scored, recorded.header["step"] - 1
    rewards, called = _rewards(recorded, config, build)
    names = {field.name for field in fields(Collector)} - {"reward", "advantage", "group_filter", "downsample"}
    options = {key: build(f"rollout.{key}", value) for key, value in config["rollout"].items() if key in names}
    loss: PolicyLoss = build("loss", config["loss"])
    scheduled, logged = {"loss": loss, "reward": rewards, "rollout": options}, header["updated"]
    state = schedule_state(scheduled)
    restore_schedules(scheduled, {path: logged.get(f"varying/{path}", value) for path, value in state.items()})
    loss, rewards = resolve_schedules(loss, step), resolve_schedules(rewards, step)
    options = resolve_schedules(options, step)
    collector = Collector(reward=rewards, advantage=build("advantage", config["advantage"]), **options)
    if not header["reference"] and (loss.kl_coef or collector.uses_reference):
        setting = next(f"{key}={value}" for key in REFERENCE_KEYS if (value := value_at(config, key)))
        raise ValueError(f"{setting} needs log-probabilities of a reference, which this run has not recorded")
    if called is not None:
        if _has_steps(scored):
            raise ValueError("reward: a reward of this run scores steps; only its own rewards can be replayed")
        openings = dict(zip(map(repr, scored.prompts.texts), header.get("openings", ()), strict=False))
        scored, _ = collector.scorer.score(
            *(_no_tokens, scored.prompts, scored.sampled),
            context=StepContext(seed=0),
            opening=lambda prompt: openings.get(repr(prompt), ""),
        )
    rollout = collector.compare(scored, recorded.ref_logprobs)
    computed = (
        sampled_metrics(scored) | advantage_metrics(rollout.completion_advantages) | losses(loss, rollout, recorded)
    )
    computed |= token_metrics(scored, recorded.ref_logprobs, has_reference=header["reference"])
    replayed = {name: float(value) for name, value in computed.items() if math.isfinite(float(value))}
    known = {name: value for name, value in (header["collected"] | logged).items() if value is not None}
    shown = {*replayed, *(name for name in known if name in computed or name.startswith(("reward/", "loss/")))}
    return ReplayedMetrics(
        step=header["step"],
        metrics={name: {"recorded": known.get(name), "replayed": replayed.get(name)} for name in sorted(shown)},
        approximate={name: why for name in computed if (why := _why_approximate(name, header, loss))},
        computed_again=called or [],
    )


def replay_table(replays: Sequence[ReplayedMetrics]) -> str:
    """A table of means over the rollouts, and how many of the values are as logged."""
    reasons = {name: why for one in replays for name, why in one.approximate.items()}
    lines = [f"{len(replays)} rollouts, steps {replays[0].step} to {replays[-1].step}"]
    if called := sorted({name for one in replays for name in one.computed_again}):
        lines.append(f"computed again: {', '.join(called)}")
    lines += ["", f"{'mean of metric':40} {'recorded':>14} {'replayed':>14}", "─" * 70]
    exact = []
    for name in sorted({name for one in replays for name in one.metrics}):
        pairs = [(of["recorded"], of["replayed"]) for one in replays if (of := one.metrics.get(name))]
        means = (
            fmean(known) if (known := [v for v in each if v is not None]) else None for each in zip(*pairs, strict=True)
        )
        cells = " ".join(f"{'-' if value is None else f'{value:.6g}':>14}" for value in means)
        lines.append(f"{single_line(name) + ' ~' * (name in reasons):40} {cells}")
        if name not in reasons:
            exact += [None not in (a, b) and math.isclose(a or 0, b or 0, rel_tol=1e-5, abs_tol=1e-6) for a, b in pairs]
    lines += ["", *(f"~ {why}" for why in dict.fromkeys(reasons.values()))]
    return "\n".join([*lines, f"{sum(exact)} of {len(exact)} values without ~ equal those logged, up to rounding"])


@torch.no_grad()
def losses(loss: PolicyLoss, rollout: Rollout, recorded: RecordedRollout) -> dict[str, Tensor]:
    """The parts of the loss at ratio 1, by name.

    Log-probabilities are those of the only optimizer step if it recorded them, else the sampler's.
    """
    factor = loss.correct(recorded.logprobs - rollout.old_logprobs, rollout.mask, on_policy=True)
    rows, weights = rollout.on_policy(recorded.logprobs), loss.weights(rollout.mask) * factor
    _, parts = loss(recorded.logprobs, recorded.scored.sampled.entropy, rows, weights)
    return {f"loss/{name}": value for name, value in parts.items()}


def _rewards(
    recorded: RecordedRollout, config: Mapping[str, Any], build: Build
) -> tuple[dict[str, RewardSpec], list[str] | None]:
    """The rewards as set, and the names of those that have to be called; None if nothing about scoring changed."""
    settings: Mapping[str, Any] = recorded.header["settings"]
    before, now = settings.get("reward") or {}, redact_config({"reward": config["reward"]})["reward"]
    rewards, called = {}, []
    for name, node in config["reward"].items():
        options = {
            key: build(f"reward.{name}.{key}", v) for key, v in node.items() if key not in ("_target_", "function")
        }
        is_same = name in before and all(
            now[name].get(key) == before[name].get(key) for key in ("function", "messages")
        )
        if is_same and name in recorded.header["rewards"]:
            values = recorded.scored.rewards[name].tolist()
            scores = [None if math.isnan(value) else value for value in values]
            options |= {"timeout": None, "retries": 0}
            rewards[name] = RewardSpec(lambda scores=scores: scores, **options)
        else:
            called.append(name)
            rewards[name] = RewardSpec(build(f"reward.{name}.function", node["function"]), **options)
    rollout = settings.get("rollout") or {}
    same_outcome = all(rollout.get(key) == config["rollout"].get(key) for key in ("outcome", "threshold"))
    return rewards, None if same_outcome and [*now.items()] == [*before.items()] else called


def _has_steps(scored: Scored) -> bool:
    """Whether a score stands anywhere but at the end of a completion."""
    last = torch.tensor([[spans[-1][1] - 1] for spans in turn_spans(scored.sampled)])
    return bool((~scored.steps.isnan() & (torch.arange(scored.steps.shape[1]) < last)).any())


def _why_approximate(name: str, header: Mapping[str, Any], loss: PolicyLoss) -> str | None:
    """Why a replayed metric may differ from the logged one even with the settings of the run."""
    if name.startswith(("reward/", "group/", "completion/")) and not header["complete"]:
        return "of the completions trained on; logged is that of all that were sampled"
    if not name.startswith("loss/"):
        return None
    if header["optimizer_steps"] > 1:
        return f"at ratio 1; logged is the mean of {header['optimizer_steps']} optimizer steps"
    if not header["fresh"]:
        return "at ratio 1; some groups are of a step before"
    is_of_entropy = loss.entropy_coef and name in ("loss/entropy", "loss/total")
    return "from the entropy that the sampler saw" if is_of_entropy else None


if __name__ == "__main__":
    main()
