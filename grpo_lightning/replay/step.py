"""The metrics of one recorded rollout, computed again from what was recorded."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.config.redaction import redact_config
from grpo_lightning.loss import PolicyLoss
from grpo_lightning.recording.rows import RecordedRollout
from grpo_lightning.reward import RewardSpec
from grpo_lightning.rollout import Collector
from grpo_lightning.rollout.metrics import advantage_metrics, sampled_metrics, token_metrics
from grpo_lightning.rollout.scoring import StepContext
from grpo_lightning.rollout.selection import on_policy
from grpo_lightning.rollout.turns import turn_ends
from grpo_lightning.schedule import resolve_schedules, restore_schedules, schedule_state
from grpo_lightning.types import Rollout, Scored

Build = Callable[[str, Any], Any]

_OF_ALL_SAMPLED = ("reward/", "group/", "completion/")
_SHOWN = ("reward/", "loss/")


@dataclass(frozen=True)
class Metrics:
    """What was logged of a rollout and what comes out now."""

    step: int
    pairs: dict[str, tuple[float | None, float | None]]
    """Name -> what was logged and what comes out."""
    approximate: dict[str, str]
    """Name -> why the two need not be equal though nothing is changed."""
    called: list[str]
    """The rewards that were computed anew."""


class _NoTokens:
    """Stands where a policy would say which token a place in a text belongs to."""

    def token_at(self, ids: Sequence[int], end: int) -> int:
        raise ValueError(
            "a reward scores steps, whose tokens only a policy knows: rollout=recorded rollout.rescore=true"
        )


def replayed(found: RecordedRollout, config: Mapping[str, Any], build: Build) -> Metrics:
    """Score, compare and weigh a recorded rollout as settings say; no policy is asked.

    Args:
        found: The rollout.
        config: Settings of reward, advantage, loss and rollout.
        build: (key, settings) -> the object that they describe.

    Raises:
        ValueError: Something is asked for that was not recorded.
    """
    header, step = found.header, found.header["step"] - 1
    rewards, called = _rewards(found, config, build)
    known = {field.name for field in fields(Collector)} - {"reward", "advantage", "group_filter", "downsample"}
    own = {key: build(f"rollout.{key}", value) for key, value in config["rollout"].items() if key in known}
    loss: PolicyLoss = build("loss", config["loss"])
    numbers = {"loss": loss, "reward": rewards, "rollout": own}
    logged = header["updated"]
    restore_schedules(numbers, {path: logged.get(f"varying/{path}", v) for path, v in schedule_state(numbers).items()})
    loss, rewards, own = resolve_schedules(loss, step), resolve_schedules(rewards, step), resolve_schedules(own, step)
    if not header["reference"] and (loss.kl_coef or own["kl_penalty"]):
        key, value = ("loss.kl_coef", loss.kl_coef) if loss.kl_coef else ("rollout.kl_penalty", own["kl_penalty"])
        raise ValueError(f"{key}={value}: allowed is 0: no log-probabilities of a reference were recorded")
    collector = Collector(reward=rewards, advantage=build("advantage", config["advantage"]), **own)
    scored = found.scored
    if called is not None:
        if _has_steps(scored):
            raise ValueError("reward: a reward of this run scores steps; allowed are the recorded rewards as they were")
        scored, _ = collector.scorer.score(_NoTokens(), scored.prompts, scored.sampled, context=StepContext(seed=0))
    rollout = collector.compare(scored, found.ref_logprobs)
    metrics = sampled_metrics(scored) | token_metrics(scored, found.ref_logprobs, has_reference=header["reference"])
    metrics |= advantage_metrics(rollout.mean_advantages) | losses(loss, rollout, found)
    now = {name: float(value) for name, value in metrics.items() if math.isfinite(float(value))}
    then = {name: value for name, value in (header["collected"] | logged).items() if value is not None}
    names = {*now, *(name for name in then if name in metrics or name.startswith(_SHOWN))}
    return Metrics(
        step=header["step"],
        pairs={name: (then.get(name), now.get(name)) for name in sorted(names)},
        approximate=_approximate(found, metrics, loss),
        called=called or [],
    )


@torch.no_grad()
def losses(loss: PolicyLoss, rollout: Rollout, found: RecordedRollout) -> dict[str, Tensor]:
    """The parts of the loss at the ratio 1, by name; those that were logged are sums in another order.

    Log-probabilities are those of the only optimizer step where it computed them, else the sampler's.
    """
    factor = loss.correct(found.logprobs - rollout.old_logprobs, rollout.mask, on_policy=True)
    rows, weights = on_policy(rollout, found.logprobs), loss.weights(rollout.mask) * factor
    _, parts = loss(found.logprobs, found.scored.sampled.entropy, rows, weights)
    return {f"loss/{name}": value for name, value in parts.items()}


def _rewards(
    found: RecordedRollout, config: Mapping[str, Any], build: Build
) -> tuple[dict[str, RewardSpec], list[str] | None]:
    """The rewards as set, and the names of those that have to be called; None if all is as it was recorded."""
    then: Mapping[str, Any] = found.header["settings"].get("reward") or {}
    before: Mapping[str, Any] = found.header["settings"].get("rollout") or {}
    now = redact_config({"reward": config["reward"]})["reward"]
    is_judged_alike = all(before.get(key) == config["rollout"].get(key) for key in ("outcome", "threshold"))
    made, called = {}, []
    for name, node in config["reward"].items():
        is_known = name in then and all(now[name].get(key) == then[name].get(key) for key in ("function", "messages"))
        own = {
            key: build(f"reward.{name}.{key}", value)
            for key, value in node.items()
            if key not in ("_target_", "function")
        }
        if is_known and name in found.header["rewards"]:
            made[name] = RewardSpec(_recalled(found.scored, name), **own | {"timeout": None, "retries": 0})
        else:
            called.append(name)
            made[name] = RewardSpec(build(f"reward.{name}.function", node["function"]), **own)
    return made, None if is_judged_alike and list(now.items()) == list(then.items()) else called


def _recalled(scored: Scored, name: str) -> Callable[..., list[float | None]]:
    """A reward that gives the recorded scores."""
    scores = [None if math.isnan(value) else value for value in scored.rewards[name].tolist()]
    return lambda: scores


def _has_steps(scored: Scored) -> bool:
    """Whether a score stands anywhere but at the end of a completion."""
    last = torch.tensor([ends[-1:] for ends in turn_ends(scored.sampled)])
    return bool((~scored.steps.isnan() & (torch.arange(scored.steps.shape[1]) < last)).any())


def _approximate(found: RecordedRollout, names: Mapping[str, Any], loss: PolicyLoss) -> dict[str, str]:
    header, why = found.header, dict[str, str]()
    for name in names:
        if name.startswith(_OF_ALL_SAMPLED) and not header["complete"]:
            why[name] = "of the completions trained on; logged is that of all that were sampled"
        if name.startswith("loss/") and (steps := header["optimizer_steps"]) > 1:
            why[name] = f"at ratio 1; logged is the mean of {steps} optimizer steps"
        elif name.startswith("loss/") and not header["fresh"]:
            why[name] = "at ratio 1; some groups are of a step before"
        elif name in ("loss/entropy", "loss/total") and loss.entropy_coef:
            why[name] = "from the entropy that the sampler saw"
    return why
