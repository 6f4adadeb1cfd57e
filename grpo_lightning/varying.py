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
from typing import Any, TypeVar

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


class Adaptive(Varying):
    """A number that follows a metric; its ``value`` is the only state, kept in checkpoints."""

    metric: str
    value: float

    def at(self, step: int) -> float:
        return self.value

    @abstractmethod
    def observe(self, measured: float) -> None:
        """Set the value for the next step, by what ``metric`` was in the step that just ended."""


@dataclass
class Proportional(Adaptive):
    """A number that grows while a metric is above its target and shrinks while it is below.

    value *= 1 + rate * clip(measured / target - 1, -0.2, 0.2)

    The adaptive KL coefficient of arXiv:1909.08593, section 2.2, where ``rate`` is 0.1.

    Raises:
        ValueError: On construction, if ``target`` is not positive.
    """

    start: float
    metric: str
    """The metric's name, such as policy/kl_divergence."""
    target: float
    rate: float
    value: float = field(init=False)

    def __post_init__(self) -> None:
        if self.target <= 0:
            raise ValueError(f"target={self.target}: allowed is a number > 0")
        self.value = self.start

    def observe(self, measured: float) -> None:
        self.value *= 1 + self.rate * min(max(measured / self.target - 1, -0.2), 0.2)


@dataclass
class Stepwise(Adaptive):
    """A number that grows by ``step`` while a metric is below its target, else shrinks, within [lowest, highest].

    The adaptive entropy coefficient of Skywork-OR1, arXiv:2505.22312, section 3.2.5; there the bonus is also switched
    off while the entropy is above the target, as a coefficient does here that has shrunk to ``lowest``.
    """

    start: float
    metric: str
    """The metric's name, such as policy/entropy."""
    target: float
    step: float
    lowest: float
    highest: float
    value: float = field(init=False)

    def __post_init__(self) -> None:
        self.value = self.start

    def observe(self, measured: float) -> None:
        moved = self.value + (self.step if measured < self.target else -self.step)
        self.value = min(max(moved, self.lowest), self.highest)


def at(part: Part, step: int) -> Part:
    """``part`` with every varying number in it replaced by its value; ``part`` itself where there is none.

    Args:
        part: A dataclass, `functools.partial`, mapping or sequence, however nested.
        step: Steps completed before the one that the values are for.
    """
    resolved: Part = _resolved(part, step)
    return resolved


def _resolved(part: Any, step: int) -> Any:
    if isinstance(part, Varying):
        return part.at(step)
    if isinstance(part, partial):
        keywords = _resolved(part.keywords, step)
        return part if keywords is part.keywords else partial(part.func, *part.args, **keywords)
    if isinstance(part, dict):
        values = {key: _resolved(value, step) for key, value in part.items()}
        return part if all(values[key] is part[key] for key in part) else values
    if isinstance(part, list | tuple) and not hasattr(part, "_fields"):
        items = [_resolved(value, step) for value in part]
        return part if all(new is old for new, old in zip(items, part, strict=True)) else type(part)(items)
    if is_dataclass(part) and not isinstance(part, type):
        changed = {
            name: new
            for name, value in ((f.name, getattr(part, f.name)) for f in fields(part) if f.init)
            if (new := _resolved(value, step)) is not value
        }
        return replace(part, **changed) if changed else part
    return part


def values(part: Any, step: int) -> dict[str, float]:
    """The value of every varying number in ``part``, by the dotted path to it; arguments are those of `at`."""
    return {path: number.at(step) for path, number in varying(part)}


def observe(part: Any, metrics: Mapping[str, float]) -> None:
    """Hand every adaptive number in ``part`` the metric it follows, if it was measured in the step that ended."""
    for _, number in adaptive(part):
        if number.metric in metrics:
            number.observe(float(metrics[number.metric]))


def state(part: Any) -> dict[str, float]:
    """The present value of every adaptive number in ``part``, by the dotted path to it, for a checkpoint."""
    return {path: number.value for path, number in adaptive(part)}


def restore(part: Any, values: Mapping[str, float]) -> None:
    """Set the adaptive numbers in ``part`` to the values that `state` returned, if they are finite numbers."""
    for path, number in adaptive(part):
        value = values.get(path)  # a checkpoint's, which may be a stranger's
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            number.value = value


def adaptive(part: Any) -> Iterator[tuple[str, Adaptive]]:
    """Every adaptive number in ``part`` with the dotted path to it."""
    for path, number in varying(part):
        if isinstance(number, Adaptive):
            yield path, number


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
