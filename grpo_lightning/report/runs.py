"""Run records: what each run below a directory was asked for, how it ended, and how its metrics developed."""

import csv
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import yaml

from grpo_lightning.checkpoint import lock

SWEEP_FILE = "sweep.json"
"""In a sweep's directory: its jobs, and the command that starts them."""
Points = list[tuple[int, float]]
"""(step, value), in the order of the steps."""


class ReportError(ValueError):
    """There is nothing to report; the message is one sentence."""


@dataclass(frozen=True)
class RunRecord:
    """A run, read from its files."""

    directory: Path  # of a missing job: its sweep's directory
    overrides: tuple[str, ...]
    status: str
    """finished, stopped (by a callback), failed, interrupted, preempted, running, killed (no end was recorded) or
    missing (a sweep's job without a directory)."""
    reason: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The composed settings, from ``.hydra/config.yaml``; empty where that cannot be read."""
        return _yaml(self.directory / ".hydra" / "config.yaml") or {}

    @cached_property
    def findings(self) -> list[str]:
        """Findings of the health checks, from ``health.json``: each rule with its step, metric and value."""
        listed = _json(self.directory / "health.json").get("findings", ())
        return [f"{found['rule']} at step {found['step']} ({found['metric']} {found['value']:.3g})" for found in listed]

    @cached_property
    def curves(self) -> Mapping[str, Points]:
        """Metric -> its values, from the CSV file or else from TensorBoard's event files."""
        file = self.directory / "csv" / "metrics.csv"
        return _read_csv(file) if file.is_file() else _read_events(self.directory / "tensorboard")

    @cached_property
    def metrics(self) -> set[str]:
        """Names of the metrics that were recorded."""
        listed = {name for part in ("metrics", "values") for name in self.summary.get(part, ())}
        return listed or set(self.curves)

    def metric(self, name: str, *, curve: bool = False) -> dict[str, Any]:
        """How a metric developed: "last", and "first", "mean", "min" and "max" where they are known; empty without it.

        With ``curve`` all values are read instead of ``summary.json``, for "deviation" over the steps and "curve", too.
        """
        values: dict[str, Any] = self.summary.get("values", {}).get(name, {})
        if (curve or not values) and (points := self.curves.get(name)):
            each = [value for _, value in points]
            values = {"first": each[0], "last": each[-1], "mean": fmean(each), "min": min(each), "max": max(each)}
            return values | {"deviation": pstdev(each), "curve": points}
        last: float | None = self.summary.get("metrics", {}).get(name)
        return values or ({} if last is None else {"last": last})

    def setting(self, key: str) -> str | None:
        """The value of a setting: as overridden, or else as chosen or composed; None if it is unknown."""
        if (value := parse_overrides(self.overrides).get(key)) is not None:
            return value
        if (choice := (self.summary.get("choices") or {}).get(key)) is not None:
            return str(choice)
        node: Any = self.config
        for name in key.split("."):
            node = node.get(name) if isinstance(node, Mapping) else None
        if node is None or isinstance(node, Mapping) or "${" in str(node):
            return None
        return str(node).lower() if isinstance(node, bool) else str(node)

    @property
    def seed(self) -> str:
        """The seed, 0 by default."""
        return self.setting("seed") or "0"


def find_runs(*directories: Path | str) -> list[RunRecord]:
    """All runs at or below some directories, and the jobs of sweeps there that have not begun; else `ReportError`."""
    places = [Path(directory) for directory in directories]
    for place in places:
        if not place.is_dir():
            raise ReportError(f"{place}: {'no directory' if place.exists() else 'there is no such directory'}")
    ended = {path.parent for place in places for path in place.rglob("summary.json")}
    begun = {path.parent.parent for place in places for path in place.rglob(".hydra/overrides.yaml")}
    preflights = {path.parent for place in places for path in place.rglob("summary_preflight.json")}
    records = [read_run(directory) for directory in sorted(ended | (begun - preflights))]
    for sweep in sorted({path.parent for place in places for path in place.rglob(SWEEP_FILE)}):
        records += _missing_jobs(sweep, [record for record in records if sweep in record.directory.parents])
    if not records:
        raise ReportError(f"{', '.join(map(str, places))}: no summary.json at or below it, so no run")
    return records


def read_run(directory: Path) -> RunRecord:
    """The run in a directory."""
    summary = _json(directory / "summary.json")
    overrides = tuple(summary.get("overrides") or _yaml(directory / ".hydra" / "overrides.yaml") or ())
    if lock.is_locked(directory):
        return RunRecord(directory, overrides, "running", "a process trains in it", summary)
    if not summary:
        return RunRecord(directory, overrides, "killed", "it has begun, but has no readable summary.json")
    error = " ".join(str(summary.get("error") or "").split())
    return RunRecord(directory, overrides, str(summary.get("status")), f"“{error}”" if error else "", summary)


def curve(run: Path, metric: str) -> Points:
    """The (step, value) pairs of a metric in a run directory, by step; empty where it was never recorded."""
    return RunRecord(Path(run), (), "").curves.get(metric, [])


def parse_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Key -> value of overrides such as ``+trainer.max_time=1``; of a removed key (``~key``) "removed"."""
    settings = {}
    for word in overrides:
        key, sign, value = word.partition("=")
        if word.startswith("~"):
            settings[key[1:]] = "removed"
        elif sign:
            settings[key.lstrip("+")] = value.strip("'\"") if value[:1] == value[-1:] else value
    return settings


def _missing_jobs(sweep: Path, records: Sequence[RunRecord]) -> list[RunRecord]:
    """The jobs of a sweep that have no directory."""
    left = Counter(tuple(sorted(record.overrides)) for record in records)
    missing = []
    for job in _json(sweep / SWEEP_FILE).get("jobs") or ():
        left[key := tuple(sorted(job))] -= 1
        if left[key] < 0:
            missing.append(RunRecord(sweep, tuple(job), "missing", "a job of the sweep that has not begun"))
    return missing


def _read_csv(file: Path) -> dict[str, Points]:
    curves: dict[str, dict[int, float]] = {}
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            step = _finite(row.pop("step", None))
            for name, text in row.items():
                if step is not None and (value := _finite(text)) is not None:
                    curves.setdefault(name, {})[int(step)] = value
    return {name: sorted(points.items()) for name, points in curves.items()}


def _read_events(directory: Path) -> dict[str, Points]:
    if not directory.is_dir():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.WARNING)
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def _finite(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where it does not exist or cannot be read."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _yaml(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return None
