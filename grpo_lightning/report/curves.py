"""The values of metrics over a run: from its CSV file, or else from TensorBoard's event files."""

import csv
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import pstdev
from typing import Any

from grpo_lightning.report.records import RunRecord

Points = list[tuple[int, float]]
"""(step, value), in the order of the steps."""


@dataclass(frozen=True)
class Course:
    """How a metric went in one run."""

    last: float
    first: float | None = None
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    deviation: float | None = None
    """Standard deviation over the steps."""
    points: Sequence[tuple[int, float]] = ()
    """Empty where only the summary tells of it."""


def curve(run: Path, metric: str) -> Points:
    """The (step, value) pairs of a metric, in the order of the steps; empty where it was never written."""
    return _curves(Path(run)).get(metric, [])


def names(run: RunRecord) -> set[str]:
    """The metrics that a run tells of."""
    listed = {name for part in ("metrics", "values") for name in run.summary.get(part, ())}
    return listed or set(_curves(run.directory))


def course(run: RunRecord, metric: str, *, with_points: bool) -> Course | None:
    """How a metric went in a run; None if it has none.

    With points all values are read; without them those of ``summary.json`` do, which is faster.
    """
    values: Mapping[str, float] = run.summary.get("values", {}).get(metric, {})
    if (with_points or not values) and (points := curve(run.directory, metric)):
        every = [value for _, value in points]
        mean = math.fsum(every) / len(every)
        return Course(every[-1], every[0], mean, min(every), max(every), pstdev(every), points)
    if values:
        return Course(values["last"], values.get("first"), values.get("mean"), values.get("min"), values.get("max"))
    last: float | None = run.summary.get("metrics", {}).get(metric)
    return None if last is None else Course(last)


def by_step(courses: Iterable[Course]) -> dict[int, list[float]]:
    """Step -> the values of the runs that have one there, in the order of the steps."""
    values: dict[int, list[float]] = {}
    for one in courses:
        for step, value in one.points:
            values.setdefault(step, []).append(value)
    return dict(sorted(values.items()))


@lru_cache(256)
def _curves(run: Path) -> Mapping[str, Points]:
    file = run / "csv" / "metrics.csv"
    return _of_csv(file) if file.is_file() else _of_events(run / "tensorboard")


def _of_csv(file: Path) -> dict[str, Points]:
    found: dict[str, dict[int, float]] = {}
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            step = _number(row.pop("step", None))
            for name, text in row.items():
                if step is not None and (value := _number(text)) is not None:
                    found.setdefault(name, {})[int(step)] = value
    return {name: sorted(points.items()) for name, points in found.items()}


def _of_events(directory: Path) -> dict[str, Points]:
    if not directory.is_dir():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.WARNING)
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
