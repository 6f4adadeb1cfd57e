"""Numbers that change during a run: where ``loss``, ``rollout`` or a reward has a number, it may have one of these.

In YAML or on the command line:

    rollout.temperature: {_target_: grpo_lightning.varying.Linear, start: 1.0, end: 0.7, steps: 100}

The module asks for a step's values with `at` and hands measured metrics to adaptive ones with `observe`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

Part = TypeVar("Part")


class Varying(ABC):
    """A number that depends on the step."""

    @abstractmethod
    def at(self, step: int) -> float:
        """The value in a step.

        Args:
            step: Steps completed before this one.
        """


@dataclass(frozen=True)
class Linear(Varying):
    """A number that goes from ``start`` to ``end`` in a straight line; whole numbers stay whole, rounded.

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
            raise ValueError(f"steps={self.steps}: allowed is an integer >= 1")

    def at(self, step: int) -> float:
        return self._between(self._elapsed(step))

    def _elapsed(self, step: int) -> float:
        return min(max(step - self.begin, 0) / self.steps, 1.0)

    def _between(self, fraction: float) -> float:
        value = self.start + (self.end - self.start) * fraction
        return round(value) if isinstance(self.start, int) and isinstance(self.end, int) else value


@dataclass(frozen=True)
class Cosine(Linear):
    """A number that goes from ``start`` to ``end`` along half a cosine: slow, fast, slow.

    Fields and errors are those of ``Linear``.
    """

    def at(self, step: int) -> float:
        return self._between((1 - math.cos(math.pi * self._elapsed(step))) / 2)


@dataclass(frozen=True)
class Piecewise(Varying):
    """A number that jumps: ``values[i]`` from the step ``borders[i - 1]`` on, ``values[0]`` before all of them.

    Raises:
        ValueError: On construction, if there is not one value more than borders or the borders do not increase.
    """

    values: Sequence[float]
    borders: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.borders) + 1 or list(self.borders) != sorted(set(self.borders)):
            raise ValueError(
                f"values={list(self.values)}, borders={list(self.borders)}: allowed are increasing steps as borders, "
                "and one value more than there are borders"
            )

    def at(self, step: int) -> float:
        return self.values[sum(step >= border for border in self.borders)]


@dataclass
class Proportional(Varying):
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
            raise ValueError(f"target={self.target}: allowed is a number > 0")
        self.value = self.start

    def at(self, step: int) -> float:
        return self.value

    def observe(self, measured: float) -> None:
        """Set the value for the next step, by what ``metric`` was in the step that just ended."""
        self.value *= 1 + self.rate * min(max(measured / self.target - 1, -0.2), 0.2)


def at(part: Part, step: int) -> Part:
    """``part`` with every varying number in it replaced by its value; ``part`` itself where there is none.

    Args:
        part: A dataclass, `functools.partial`, mapping or sequence, however nested.
        step: Steps completed before the one that the values are for.
    """
    whole: Any = part
    if isinstance(whole, Varying):
        whole = whole.at(step)
    elif next(varying(whole), None) is None:
        return part
    elif isinstance(whole, partial):
        whole = partial(whole.func, *whole.args, **at(whole.keywords, step))
    elif isinstance(whole, dict):
        whole = {key: at(value, step) for key, value in whole.items()}
    elif isinstance(whole, list | tuple):
        whole = type(whole)(at(value, step) for value in whole)
    else:
        whole = replace(whole, **{f.name: at(getattr(whole, f.name), step) for f in fields(whole) if f.init})
    return cast(Part, whole)


def values(part: Any, step: int) -> dict[str, float]:
    """The value of every varying number in ``part``, by the dotted path to it; arguments are those of `at`."""
    return {path: number.at(step) for path, number in varying(part)}


def observe(part: Any, metrics: Mapping[str, float]) -> None:
    """Hand every adaptive number in ``part`` the metric it follows, if it was measured in the step that ended."""
    for _, number in _adaptive(part):
        if number.metric in metrics:
            number.observe(float(metrics[number.metric]))


def state(part: Any) -> dict[str, float]:
    """The present value of every adaptive number in ``part``, by the dotted path to it, for a checkpoint."""
    return {path: number.value for path, number in _adaptive(part)}


def restore(part: Any, values: Mapping[str, float]) -> None:
    """Set the adaptive numbers in ``part`` to the values that `state` returned, if they are finite numbers."""
    for path, number in _adaptive(part):
        value = values.get(path)  # a checkpoint's, which may be a stranger's
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            number.value = value


def _adaptive(part: Any) -> list[tuple[str, Proportional]]:
    return [(path, number) for path, number in varying(part) if isinstance(number, Proportional)]


def varying(part: Any, path: str = "") -> Iterator[tuple[str, Varying]]:
    """Every varying number in ``part`` with the dotted path to it."""
    if isinstance(part, Varying):
        yield path, part
        return
    children: Mapping[str, Any] = {}
    if isinstance(part, partial):
        children = part.keywords
    elif isinstance(part, dict):
        children = part
    elif isinstance(part, list | tuple):
        children = {str(index): value for index, value in enumerate(part)}
    elif is_dataclass(part) and not isinstance(part, type):
        children = {f.name: getattr(part, f.name) for f in fields(part)}
    for name, child in children.items():
        yield from varying(child, f"{path}.{name}" if path else str(name))
