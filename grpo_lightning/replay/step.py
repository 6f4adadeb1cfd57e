"""The metrics of one recorded rollout, computed again from what was recorded."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from grpo_lightning import varying
from grpo_lightning.batch import Rollout, Scored
from grpo_lightning.loss import PolicyLoss
from grpo_lightning.module.update import add_up
from grpo_lightning.output.redaction import redacted
from grpo_lightning.recording.rows import Restored
from grpo_lightning.reward import Weighted
from grpo_lightning.rollout import Collector
from grpo_lightning.rollout.episodes import turn_ends
from grpo_lightning.rollout.metrics import advantage_metrics, sampled_metrics, token_metrics
from grpo_lightning.rollout.selection import on_policy
from grpo_lightning.rollout.step_context import StepContext

Build = Callable[[str, Any], Any]

_OF_ALL_SAMPLED = ("reward/", "group/", "completion/")
_SHOWN = ("reward/", "loss/")


@dataclass(frozen=True)
class Metrics:
    """What was logged of a rollout and what comes out now, by name."""

    step: int
    recorded: dict[str, float]
    replayed: dict[str, float]
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


def replayed(found: Restored, config: Mapping[str, Any], build: Build) -> Metrics:
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
    varying.restore(numbers, {path: logged.get(f"varying/{path}", v) for path, v in varying.state(numbers).items()})
    loss, rewards, own = varying.at(loss, step), varying.at(rewards, step), varying.at(own, step)
    if not header["reference"] and (loss.kl_coef or own["kl_penalty"]):
        key, value = ("loss.kl_coef", loss.kl_coef) if loss.kl_coef else ("rollout.kl_penalty", own["kl_penalty"])
        raise ValueError(f"{key}={value}: allowed is 0: no log-probabilities of a reference were recorded")
    collector = Collector(reward=rewards, advantage=build("advantage", config["advantage"]), **own)
    scored = found.scored
    if called is not None:
        if _has_steps(scored):
            raise ValueError("reward: a reward of this run scores steps; allowed are the recorded rewards as they were")
        scored, _ = collector.judge.score_sampled(
            _NoTokens(), scored.prompts, scored.sampled, context=StepContext(seed=0)
        )
    rollout = collector.compared(scored, found.ref_logprobs)
    advantages = rollout.mean_advantages
    metrics = sampled_metrics(scored) | token_metrics(scored, found.ref_logprobs, has_reference=header["reference"])
    metrics |= advantage_metrics(advantages)
    metrics |= losses(loss, rollout, found)
    recorded = {name: value for name, value in (header["collected"] | logged).items() if value is not None}
    return Metrics(
        step=header["step"],
        recorded={name: value for name, value in recorded.items() if name in metrics or name.startswith(_SHOWN)},
        replayed={name: float(value) for name, value in metrics.items() if math.isfinite(float(value))},
        approximate=_approximate(found, metrics, loss),
        called=called or [],
    )


@torch.no_grad()
def losses(loss: PolicyLoss, rollout: Rollout, found: Restored) -> dict[str, Tensor]:
    """The parts of the loss at the ratio 1, by name, added up in the order in which the run did it.

    Log-probabilities are those of the only optimizer step where it computed them, else the sampler's.
    """
    weights, single = loss.weights(rollout.mask), found.microbatches
    scored = torch.zeros(len(rollout), dtype=torch.bool)
    for rows in (rows for own in single for rows in own):
        scored[rows] = True
    logprobs = torch.where(scored.unsqueeze(-1), found.logprobs, rollout.old_logprobs)
    teaching = loss.teaches(rollout)
    if not bool((scored == teaching).all()):  # other rows have a gradient than then
        single = [[teaching.nonzero().flatten()]]
    sums: list[dict[str, Tensor]] = []
    for own in single:
        parts: dict[str, Tensor] = {}
        for rows in own:
            drawn = rollout[rows]
            factor = loss.correct(logprobs[rows] - drawn.old_logprobs, drawn.mask, on_policy=True)
            taken = on_policy(drawn, logprobs[rows])
            _, part = loss(logprobs[rows], found.scored.sampled.entropy[rows], taken, weights[rows] * factor)
            add_up(parts, part)
        sums.append(parts)
    names = {name: value.dtype for parts in sums for name, value in parts.items()}
    # as `Ranks.add_up` does it: a single process's sums as they are, several processes' in float64
    total = {
        name: next(iter(sums))[name]
        if len(sums) == 1
        else torch.stack([parts[name].double() for parts in sums if name in parts]).sum().to(dtype)
        for name, dtype in names.items()
    }
    return {f"loss/{name}": value for name, value in total.items()}


def _rewards(found: Restored, config: Mapping[str, Any], build: Build) -> tuple[dict[str, Weighted], list[str] | None]:
    """The rewards as set, and the names of those that have to be called; None if all is as it was recorded."""
    then: Mapping[str, Any] = found.header["settings"].get("reward") or {}
    before: Mapping[str, Any] = found.header["settings"].get("rollout") or {}
    now = redacted({"reward": config["reward"]})["reward"]
    judged = ("outcome", "threshold")
    as_recorded = (
        now == then
        and list(now) == list(found.header["rewards"])
        and all(before.get(key) == config["rollout"].get(key) for key in judged)
    )
    made, called = {}, []
    for name, node in config["reward"].items():
        is_known = name in then and all(now[name].get(key) == then[name].get(key) for key in ("function", "messages"))
        own = {
            key: build(f"reward.{name}.{key}", value)
            for key, value in node.items()
            if key not in ("_target_", "function")
        }
        if is_known and name in found.header["rewards"]:
            made[name] = Weighted(_recalled(found.scored, name), **own | {"timeout": None, "retries": 0})
        else:
            called.append(name)
            made[name] = Weighted(build(f"reward.{name}.function", node["function"]), **own)
    return made, None if as_recorded else called


def _recalled(scored: Scored, name: str) -> Callable[..., list[float | None]]:
    """A reward that gives the recorded scores."""
    scores = [None if math.isnan(value) else value for value in scored.rewards[name].tolist()]
    return lambda: scores


def _has_steps(scored: Scored) -> bool:
    """Whether a score stands anywhere but at the end of a completion."""
    last = torch.tensor([ends[-1:] for ends in turn_ends(scored.sampled)])
    inside = torch.arange(scored.steps.shape[1]) < last
    return bool((~scored.steps.isnan() & inside).any())


def _approximate(found: Restored, names: Mapping[str, Any], loss: PolicyLoss) -> dict[str, str]:
    header, why = found.header, dict[str, str]()
    for name in names:
        if name.startswith(_OF_ALL_SAMPLED) and not header["complete"]:
            why[name] = "of the completions trained on; logged is that of all that were sampled"
        if name.startswith("loss/") and header["microbatches"] is None:
            steps = header["optimizer_steps"]
            told = f"logged is the mean of {steps} optimizer steps" if steps > 1 else "some groups are of a step before"
            why[name] = f"at ratio 1; {told}"
        elif name in ("loss/entropy", "loss/total") and loss.entropy_coef:
            why[name] = "from the entropy that the sampler saw"
    return why
