"""Report on runs: tables with confidence intervals over seeds, differences from a baseline, and curves.

``python -m grpo_lightning.report DIR`` prints it.
"""

import csv
import json
import logging
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.checkpoint import lock

SWEEP_FILE = "sweep.json"
"""In a sweep's directory: its jobs, and the command that starts them."""
DEFAULT_METRICS = ("val/pass@1", "reward/total")
UNSET = "(default)"
"""Stands for the value of a setting that no file of the run holds."""
Points = list[tuple[int, float]]
"""(step, value), in the order of the steps."""
_RATE = re.compile(
    r"(val/)?(.+/)?(pass@|maj@|reward/(accuracy|exact|numeric|math|format)$)|.*_fraction$|group/(all_|mixed)|failure/"
)
"""Metrics that are fractions of completions, groups or prompts."""
_NOT_SWEPT = ("seed", "checkpoint", "run_dir", "tags", "task_name")
_T_95 = (12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216)
"""Student's t of a two-sided 95 % interval, for 1 to 9 degrees of freedom."""


# --- runs


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
        return {name for part in ("metrics", "values") for name in self.summary.get(part, ())} or set(self.curves)

    def metric(self, name: str) -> dict[str, float]:
        """How a metric developed: "last", and "first", "mean" and "max" where they are known; empty without it."""
        if values := self.summary.get("values", {}).get(name):
            return dict(values)
        if values := [value for _, value in self.curves.get(name, ())]:
            return {"first": values[0], "last": values[-1], "mean": statistics.fmean(values), "max": max(values)}
        last: float | None = self.summary.get("metrics", {}).get(name)
        return {} if last is None else {"last": last}

    def setting(self, key: str) -> str | None:
        """The value of a setting: as overridden, or else as chosen or composed; None if it is unknown."""
        if (value := parse_overrides(self.overrides).get(key)) is not None:
            return value
        node: Any = (self.summary.get("choices") or {}).get(key)
        if node is None:
            node = self.config
            for name in key.split("."):
                node = node.get(name) if isinstance(node, Mapping) else None
        if node is None or isinstance(node, Mapping) or "${" in str(node):
            return None
        return str(node).lower() if isinstance(node, bool) else str(node)

    @property
    def seed(self) -> str:
        """The seed, 0 by default."""
        return self.setting("seed") or "0"

    @property
    def is_counted(self) -> bool:
        """Whether the run has come to its end."""
        return self.status in ("finished", "stopped")


def find_runs(*directories: Path | str) -> list[RunRecord]:
    """All runs at or below some directories, and the jobs of sweeps there that have not begun; else `ValueError`."""
    places = [Path(directory) for directory in directories]
    for place in places:
        if not place.is_dir():
            raise ValueError(f"{place}: {'no directory' if place.exists() else 'there is no such directory'}")
    ended = {path.parent for place in places for path in place.rglob("summary.json")}
    begun = {path.parent.parent for place in places for path in place.rglob(".hydra/overrides.yaml")}
    preflights = {path.parent for place in places for path in place.rglob("summary_preflight.json")}
    records = [read_run(directory) for directory in sorted(ended | (begun - preflights))]
    for sweep in sorted({path.parent for place in places for path in place.rglob(SWEEP_FILE)}):
        left = Counter(tuple(sorted(one.overrides)) for one in records if sweep in one.directory.parents)
        for job in _json(sweep / SWEEP_FILE).get("jobs") or ():
            left[key := tuple(sorted(job))] -= 1
            if left[key] < 0:
                records.append(RunRecord(sweep, tuple(job), "missing", "a job of the sweep that has not begun"))
    if not records:
        raise ValueError(f"{', '.join(map(str, places))}: no summary.json at or below it, so no run")
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


# --- comparison


@dataclass(frozen=True)
class Estimate:
    """The mean of n values with its confidence interval, which a single value does not have."""

    n: int
    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """A metric of all runs of the same settings; of several runs of one seed the last counts."""

    settings: Mapping[str, str]
    seeds: Mapping[str, float]  # seed -> last value
    last: Estimate
    first: float | None
    mean: float | None
    highest: float | None
    curve: Mapping[int, Estimate]  # step -> the values there; empty unless curves were read
    best: bool = False
    difference: Estimate | None = None  # of the last value from the baseline's, paired by the seeds that both have

    @property
    def label(self) -> str:
        """The settings as overrides."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items())


@dataclass(frozen=True)
class Comparison:
    """Runs sorted into lines, by metric."""

    keys: Sequence[str]  # in which the lines differ
    lines: Mapping[str, Sequence[Line]]  # metric -> its lines
    runs: Sequence[RunRecord]  # finished or not
    at: Sequence[int]  # steps whose values are shown
    baseline: str | None  # KEY=VALUE
    notes: Sequence[str]


def compare(
    runs: Sequence[RunRecord],
    *,
    by: Sequence[str] = (),
    metrics: Sequence[str] = (),
    at: Sequence[int] = (),
    baseline: str | None = None,
    curves: bool = False,
) -> Comparison:
    """Sort runs into lines and estimate their metrics.

    Args:
        runs: Finished or not.
        by: Keys in which lines differ; default: those in which the runs' overrides differ, but for the seed.
        metrics: Default: those of `DEFAULT_METRICS` that were recorded.
        at: Steps whose values are wanted.
        baseline: "KEY=VALUE" of the lines that the others are compared with, all other keys being equal.
        curves: Whether curves are wanted, too.

    Raises:
        ValueError: No run has a metric, a key or the baseline.
    """
    counted, notes = [run for run in runs if run.is_counted], []
    if not counted and (counted := [run for run in runs if run.metrics]):
        notes.append("no run has finished: these are numbers of unfinished ones")
    recorded = set().union(*(run.metrics for run in counted))
    for key in by:
        if not any(run.setting(key) for run in counted):
            raise ValueError(f"--by={key}: no run has this setting")
    for name in metrics:
        if not any(run.metric(name) for run in counted):
            raise ValueError(f"--metric={name}: no run has it; there are {', '.join(sorted(recorded))}")
    keys = list(by) or _swept_keys(counted)
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in sorted(counted, key=lambda run: _order(run.seed)):
        groups.setdefault(tuple(run.setting(key) or UNSET for key in keys), []).append(run)
    if counted and not keys:  # named by their common directory
        keys = ["run"]
        groups = {(Path(os.path.commonpath([run.directory.absolute() for run in counted])).name,): counted}
    ordered = [(dict(zip(keys, v, strict=True)), groups[v]) for v in sorted(groups, key=lambda v: [*map(_order, v)])]
    lines = {}
    default = [name for name in DEFAULT_METRICS if name in recorded]
    default += sorted(name for name in recorded if re.fullmatch(r"val/.+/pass@1", name))  # of each source of a mixture
    if len({_definition(run, "reward/total") for run in counted}) > 1:  # each reward by itself does not change
        default += sorted(name for name in recorded if re.fullmatch(r"reward/(?!total$|std$).*", name))
    for metric in metrics or default or sorted(recorded)[:1]:
        each = [_line(settings, group, metric, curves or bool(at)) for settings, group in ordered]
        is_comparable = len({_definition(run, metric) for run in counted}) == 1
        lines[metric] = _mark_best(metric, [line for line in each if line]) if is_comparable else [*filter(None, each)]
        if not is_comparable:
            notes.append(f"{metric} names no best: the rewards, weights or thresholds that it is made of differ")
    if baseline is not None:
        base = parse_overrides([baseline])
        if not base or not any(base.items() <= settings.items() for settings, _ in ordered):
            listed = "; ".join(" ".join(f"{key}={value}" for key, value in settings.items()) for settings, _ in ordered)
            raise ValueError(f"--baseline={baseline}: no line has it; there are {listed}")
        lines = {metric: [_subtract(line, base, each) for line in each] for metric, each in lines.items()}
    return Comparison(keys, lines, runs, at, baseline, notes)


def estimate(values: Sequence[float], *, is_rate: bool = False) -> Estimate:
    """The mean of n >= 1 values with its two-sided 95 % interval by Student's t: mean ± t · s / √n.

    Of a rate it is Wilson's score interval, which stays in [0, 1]: all p with |mean - p| ≤ t · √(p (1 - p) / N), where
    N = mean (1 - mean) n / s² is the number of trials that would vary as the values do.
    """
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return Estimate(n, mean)
    t, error = student_t(n - 1), statistics.stdev(values) / math.sqrt(n)
    if not is_rate or error == 0:
        return Estimate(n, mean, mean - t * error, mean + t * error)
    shrink = (t * error) ** 2 / (mean * (1 - mean))  # t² / N
    center = (mean + shrink / 2) / (1 + shrink)
    half = math.sqrt(shrink * mean * (1 - mean) + shrink * shrink / 4) / (1 + shrink)
    return Estimate(n, mean, max(0.0, center - half), min(1.0, center + half))


def student_t(degrees: int) -> float:
    """Student's t of a two-sided 95 % interval; from 10 degrees on by Cornish and Fisher's series, to four digits."""
    if degrees <= len(_T_95):
        return _T_95[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, 1))


def _swept_keys(runs: Sequence[RunRecord]) -> list[str]:
    """The keys whose overrides differ between the runs, in the order in which they are given; never the seed."""
    each = [parse_overrides(run.overrides) for run in runs]
    keys = dict.fromkeys(key for settings in each for key in settings if key not in _NOT_SWEPT)
    differing = [key for key in keys if len({settings.get(key) for settings in each}) > 1]
    return [key for key in differing if len({run.setting(key) for run in runs}) > 1]


def _order(value: str) -> tuple[int, float, str]:
    """Sort key of a setting's value: numbers by size, before texts."""
    number = _finite(value)
    return (1, 0.0, value) if number is None else (0, number, "")


def _line(settings: Mapping[str, str], runs: Iterable[RunRecord], metric: str, curves: bool) -> Line | None:
    """A metric of runs; None if none of them has it."""
    known = [(run, values) for run in runs if (values := run.metric(metric))]
    if not known:
        return None
    at_steps: dict[int, dict[str, float]] = {}
    for run, _ in known if curves else ():
        for step, value in run.curves.get(metric, ()):
            at_steps.setdefault(step, {})[run.seed] = value
    last, is_rate = {run.seed: values["last"] for run, values in known}, _RATE.match(metric) is not None
    whole = [values for _, values in known if "mean" in values]
    return Line(
        settings=settings,
        seeds=last,
        last=estimate([*last.values()], is_rate=is_rate),
        first=statistics.fmean(values["first"] for values in whole) if whole else None,
        mean=statistics.fmean(values["mean"] for values in whole) if whole else None,
        highest=max((values["max"] for values in whole), default=None),
        curve={step: estimate([*values.values()], is_rate=is_rate) for step, values in sorted(at_steps.items())},
    )


def _definition(run: RunRecord, metric: str) -> str:
    """The settings that a metric is made of: with others a higher value is no better one."""
    name = metric.removeprefix("val/").removeprefix("reward/")
    rewards = run.config.get("reward") or {}
    parts: Any = [run.setting(key) for key in ("rollout.outcome", "rollout.threshold", "validation.threshold")]
    if name == "total" and rewards:
        parts = {key: [one.get(part) for part in ("function", "weight", "clip")] for key, one in rewards.items()}
    elif name == "total":
        parts = [word for word in run.overrides if word.lstrip("+~").startswith("reward")]
    elif name in rewards:
        parts = rewards[name].get("function")
    return json.dumps(parts, sort_keys=True, default=str)


def _mark_best(metric: str, lines: list[Line]) -> list[Line]:
    if len(lines) < 2 or not metric.startswith(("val/", "reward/")) or metric == "reward/std":
        return lines  # of others more is not better
    highest = max(line.last.mean for line in lines)
    is_tie = all(line.last.mean == highest for line in lines)
    return [replace(line, best=line.last.mean == highest and not is_tie) for line in lines]


def _subtract(line: Line, base: Mapping[str, str], lines: Sequence[Line]) -> Line:
    """A line with its difference from the line that has the baseline's value and else the same settings."""
    other = next((other for other in lines if other.settings == {**line.settings, **base}), line)
    # What a seed does to both alike cancels in each difference.
    values = [line.seeds[seed] - other.seeds[seed] for seed in line.seeds if seed in other.seeds]
    return replace(line, difference=estimate(values)) if values and other is not line else line
