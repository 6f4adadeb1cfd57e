"""What every metric was over a whole run, however often the run was interrupted and continued."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_VALIDATION = "val/"
"""Begins the names of what is measured on held-out prompts, where larger is better."""


@dataclass
class Course:
    """One metric's values so far."""

    first: float
    first_step: int
    last: float
    last_step: int
    count: int
    total: float
    min: float
    max: float
    max_step: int
    """The first step at which it was largest."""

    def add(self, value: float, step: int) -> None:
        """Count one more value."""
        self.last, self.last_step = value, step
        self.count += 1
        self.total += value
        self.min = min(self.min, value)
        if value > self.max:
            self.max, self.max_step = value, step

    @property
    def mean(self) -> float:
        """The mean, which rounding and overflow do not carry beyond the smallest and the largest value."""
        return min(self.max, max(self.min, self.total / self.count))


class Values:
    """The course of every metric, from the run's first step on."""

    def __init__(self) -> None:
        self._courses: dict[str, Course] = {}

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Count what was measured at a step, finite numbers by name."""
        for name, value in metrics.items():
            if name in self._courses:
                self._courses[name].add(value, step)
            else:
                self._courses[name] = Course(value, step, value, step, 1, value, value, value, step)

    def summary(self) -> dict[str, dict[str, float]]:
        """By name, each metric's "first", "last", "mean", "min" and "max".

        Those of validation also have "best", the largest, with "best_step", and "first_step" and "last_step".
        """
        return {name: _summed_up(name, course) for name, course in sorted(self._courses.items())}

    def state(self) -> dict[str, dict[str, Any]]:
        """What `restore` takes, as plain values for a checkpoint."""
        return {name: asdict(course) for name, course in self._courses.items()}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from an earlier `state`."""
        self._courses = {name: Course(**course) for name, course in state.items()}


def _summed_up(name: str, course: Course) -> dict[str, float]:
    told = {"first": course.first, "last": course.last, "mean": course.mean, "min": course.min, "max": course.max}
    if name.startswith(_VALIDATION):
        told |= {"best": course.max, "best_step": course.max_step}
        told |= {"first_step": course.first_step, "last_step": course.last_step}
    return told
