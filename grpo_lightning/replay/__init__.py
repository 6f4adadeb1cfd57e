"""Replay of recorded rollouts without a model: what other rewards, advantages and losses would have made of them.

``python -m grpo_lightning.replay DIR [overrides…]`` prints it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.console import redact_config
from grpo_lightning.loss import PolicyLoss
from grpo_lightning.recording import RecordedRollout
from grpo_lightning.reward import RewardSpec
from grpo_lightning.rollout import Collector
from grpo_lightning.rollout.collector import advantage_metrics, sampled_metrics, token_metrics
from grpo_lightning.rollout.scoring import StepContext, turn_ends
from grpo_lightning.schedule import resolve_schedules, restore_schedules, schedule_state
from grpo_lightning.types import Rollout, Scored

PARTS = ("reward", "advantage", "loss", "rollout")
"""The settings that a replay follows."""
Build = Callable[[str, Any], Any]
"""(dotted key, settings) -> the object that they describe."""


@dataclass(frozen=True)
class ReplayedMetrics:
    """Metrics of a rollout as logged and as replayed."""

    step: int
    metrics: dict[str, tuple[float | None, float | None]]  # name -> (logged, replayed)
    approximate: dict[str, str]  # name -> why the two may differ even with the settings of the run
    called: list[str]  # the rewards that were computed again


class _NoTokens:
    """Stands in for the policy, which knows where the tokens of a text are."""

    def token_at(self, ids: Sequence[int], end: int) -> int:
        raise ValueError(
            "a reward scores steps, whose tokens only a policy knows: use rollout=recorded rollout.rescore=true"
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
    if not header["reference"] and (loss.kl_coef or options["kl_penalty"]):
        setting = f"loss.kl_coef={loss.kl_coef}" if loss.kl_coef else f"rollout.kl_penalty={options['kl_penalty']}"
        raise ValueError(f"{setting} needs log-probabilities of a reference, which this run has not recorded")
    collector = Collector(reward=rewards, advantage=build("advantage", config["advantage"]), **options)
    if called is not None:
        if _has_steps(scored):
            raise ValueError("reward: a reward of this run scores steps; only its own rewards can be replayed")
        scored, _ = collector.scorer.score(_NoTokens(), scored.prompts, scored.sampled, context=StepContext(seed=0))
    rollout = collector.compare(scored, recorded.ref_logprobs)
    computed = sampled_metrics(scored) | advantage_metrics(rollout.mean_advantages) | losses(loss, rollout, recorded)
    computed |= token_metrics(scored, recorded.ref_logprobs, has_reference=header["reference"])
    replayed = {name: float(value) for name, value in computed.items() if math.isfinite(float(value))}
    known = {name: value for name, value in (header["collected"] | logged).items() if value is not None}
    shown = {*replayed, *(name for name in known if name in computed or name.startswith(("reward/", "loss/")))}
    return ReplayedMetrics(
        step=header["step"],
        metrics={name: (known.get(name), replayed.get(name)) for name in sorted(shown)},
        approximate={name: why for name in computed if (why := _why_approximate(name, header, loss))},
        called=called or [],
    )


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
    last = torch.tensor([ends[-1:] for ends in turn_ends(scored.sampled)])
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
