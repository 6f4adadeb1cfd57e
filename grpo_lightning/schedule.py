"""Learning-rate schedules, and scheduled numbers: settings that change during a run.

A learning-rate schedule is a function of the step that multiplies ``optimizer.lr``; it makes one step per rollout.
Where ``loss``, ``correction``, ``rollout`` or a reward has a number, a `Schedule` may stand in its place, in YAML or on
the command line:

    rollout.temperature: {_target_: grpo_lightning.schedule.Linear, start: 1.0, end: 0.7, steps: 100}
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

Part = TypeVar("Part")


def constant(step: int, *, total_steps: int, warmup_steps: int) -> float:
    """A linear warm-up, then the configured rate itself.

    Args:
        step: Steps completed before this one.
        total_steps: The number of steps in the run.
        warmup_steps: The rate rises linearly over these; 0 for none.

    Returns:
        The multiplier of ``optimizer.lr``; in the last step of the warm-up it is 1.
    """
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def linear(step: int, *, total_steps: int, warmup_steps: int) -> float:
    """A linear warm-up, then linearly down to 0 after the last step; arguments are those of `constant`."""
    rise = constant(step, total_steps=total_steps, warmup_steps=warmup_steps)
    return rise * (1 - _decay_fraction(step, total_steps, warmup_steps))


def cosine(step: int, *, total_steps: int, warmup_steps: int) -> float:
    """A linear warm-up, then half a cosine down to 0 after the last step; arguments are those of `constant`."""
    rise = constant(step, total_steps=total_steps, warmup_steps=warmup_steps)
    return rise * (1 + math.cos(math.pi * _decay_fraction(step, total_steps, warmup_steps))) / 2


def _decay_fraction(step: int, total_steps: int, warmup_steps: int) -> float:
    """The fraction of the steps after the warm-up that are completed, in [0, 1]."""
    return min(1.0, max(0, step - warmup_steps) / max(1, total_steps - warmup_steps))


class Schedule:
    """A number that depends on the step."""

    def value_at(self, step: int) -> float:
        """The value in the step before which ``step`` others are completed."""
        raise NotImplementedError


@dataclass(frozen=True)
class Linear(Schedule):
    """A number that goes from ``start`` to ``end`` in a straight line; integers stay integers, rounded.

    Raises:
        ValueError: On construction, if ``steps`` is less than 1.
    """

    start: float
    end: float
    steps: int
    """Steps from the last one with the value ``start`` to the first one with ``end``."""
    begin: int = 0
    """Steps with the value ``start`` before it begins to change."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: must be an integer >= 1")

    def value_at(self, step: int) -> float:
        value = self.start + (self.end - self.start) * self._fraction(min(max(step - self.begin, 0) / self.steps, 1.0))
        return round(value) if isinstance(self.start, int) and isinstance(self.end, int) else value

    def _fraction(self, elapsed: float) -> float:
        return elapsed


@dataclass(frozen=True)
class Cosine(Linear):
    """A number that goes from ``start`` to ``end`` along half a cosine: slow, fast, slow."""

    def _fraction(self, elapsed: float) -> float:
        return (1 - math.cos(math.pi * elapsed)) / 2


@dataclass
class Proportional(Schedule):
    """A number that grows while a metric is above its target and shrinks while it is below.

    value *= 1 + rate * clip(measured / target - 1, -0.2, 0.2)

    The adaptive KL coefficient of arXiv:1909.08593, section 2.2, where ``rate`` is 0.1. With a negative ``rate`` it
    grows while the metric is below its target, as a coefficient of the entropy has to.

    Raises:
        ValueError: On construction, if ``target`` is not positive.
    """

    start: float
    metric: str
    """The metric's name, such as policy/kl_divergence."""
    target: float
    rate: float
    value: float = field(init=False)
    """The only state, kept in checkpoints."""

    def __post_init__(self) -> None:
        if self.target <= 0:
            raise ValueError(f"target={self.target}: must be a number > 0")
        self.value = self.start

    def value_at(self, step: int) -> float:
        return self.value

    def update(self, measured: float) -> None:
        """Set the value for the next step, by what ``metric`` was in the step that just ended."""
        self.value *= 1 + self.rate * min(max(measured / self.target - 1, -0.2), 0.2)


def resolve_schedules(part: Part, step: int) -> Part:
    """``part`` with every `Schedule` in it replaced by its value; ``part`` itself where there is none.

    Args:
        part: A dataclass, `functools.partial`, mapping or sequence, however nested.
        step: Steps completed before the one that the values are for.
    """
    whole: Any = part
    if isinstance(whole, Schedule):
        whole = whole.value_at(step)
    elif any(True for _ in find_schedules(whole)):
        values = {name: resolve_schedules(child, step) for name, child in (_children(whole) or {}).items()}
        if isinstance(whole, partial):
            whole = partial(whole.func, *whole.args, **values)
        elif isinstance(whole, dict):
            whole = values
        elif isinstance(whole, list | tuple):
            whole = type(whole)(values.values())
        else:
            whole = replace(whole, **values)
    return cast(Part, whole)


def schedule_values(part: Any, step: int) -> dict[str, float]:
    """The value of every schedule in ``part``, by its dotted path; arguments are those of `resolve_schedules`."""
    return {path: schedule.value_at(step) for path, schedule in find_schedules(part)}


def update_schedules(part: Any, metrics: Mapping[str, float]) -> None:
    """Hand every adaptive schedule in ``part`` the metric it follows, if the step that ended has measured it."""
    for _, schedule in find_schedules(part):
        if isinstance(schedule, Proportional) and schedule.metric in metrics:
            schedule.update(float(metrics[schedule.metric]))


def schedule_state(part: Any) -> dict[str, float]:
    """The present value of every adaptive schedule in ``part``, by its dotted path, for a checkpoint."""
    return {path: found.value for path, found in find_schedules(part) if isinstance(found, Proportional)}


def restore_schedules(part: Any, values: Mapping[str, float]) -> None:
    """Set the adaptive schedules in ``part`` to the values that `schedule_state` returned."""
    for path, schedule in find_schedules(part):
        if isinstance(schedule, Proportional) and path in values:
            schedule.value = float(values[path])


def find_schedules(part: Any, path: str = "") -> Iterator[tuple[str, Schedule]]:
    """Every `Schedule` in ``part`` with the dotted path to it."""
    if isinstance(part, Schedule):
        yield path, part
        return
    for name, child in (_children(part) or {}).items():
        yield from find_schedules(child, f"{path}.{name}" if path else str(name))


def _children(part: Any) -> dict[Any, Any] | None:
    """What may hold schedules in a mapping, sequence, `functools.partial` or dataclass; None of anything else."""
    if isinstance(part, Mapping):
        return dict(part)
    if isinstance(part, list | tuple):
        return dict(enumerate(part))
    if isinstance(part, partial):
        return part.keywords
    if is_dataclass(part) and not isinstance(part, type):
        return {f.name: getattr(part, f.name) for f in fields(part)}
    return None
