"""The values of metrics over a run: from its CSV file, or else from TensorBoard's event files."""

import csv
import logging
import math
from collections.abc import Collection, Mapping
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
    points: Points | None = None
    """None where only the summary tells of it."""


def curve(run: Path, metric: str) -> Points:
    """The (step, value) pairs of a metric, in the order of the steps; empty where it was never written."""
    return _curves(Path(run)).get(metric, [])


def names(run: RunRecord) -> set[str]:
    """The metrics that a run tells of."""
    listed = {name for part in ("metrics", "values") for name in run.summary.get(part, ())}
    return listed or set(_curves(run.directory))


def course(run: RunRecord, metric: str, *, with_points: bool) -> Course | None:
    """How a metric went in a run; None if it has none.

    Args:
        run: The run.
        metric: Its name.
        with_points: Whether all values are needed; else those of ``summary.json`` do, which are read faster.
    """
    values: Mapping[str, float] = run.summary.get("values", {}).get(metric, {})
    if not with_points and "last" in values:
        return Course(values["last"], values.get("first"), values.get("mean"), values.get("min"), values.get("max"))
    if points := curve(run.directory, metric):
        every = [value for _, value in points]
        mean = math.fsum(every) / len(every)
        return Course(every[-1], every[0], mean, min(every), max(every), pstdev(every), points)
    if with_points and "last" in values:
        return course(run, metric, with_points=False)
    last: float | None = run.summary.get("metrics", {}).get(metric)
    return None if last is None else Course(last)


@lru_cache(256)
def _curves(run: Path) -> Mapping[str, Points]:
    file = run / "csv" / "metrics.csv"
    return _of_csv(file) if file.is_file() else _of_events(run / "tensorboard")


def _of_csv(file: Path) -> dict[str, Points]:
    found: dict[str, dict[int, float]] = {}
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                step = _number(row.pop("step", None))
                for name, text in row.items():
                    value = _number(text)
                    if step is not None and value is not None and isinstance(name, str):
                        found.setdefault(name, {})[int(step)] = value
    except (OSError, UnicodeDecodeError, csv.Error):
        return {}
    return {name: sorted(points.items()) for name, points in found.items()}


def _of_events(directory: Path) -> dict[str, Points]:
    if not directory.is_dir():
        return {}
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.WARNING)
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    try:
        events.Reload()
    except DecodeError:
        return {}
    scalars: Collection[str] = events.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in scalars}


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
