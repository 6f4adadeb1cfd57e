"""Comparison of runs: those of equal settings make a line, whose metrics are estimated over seeds."""

import functools
import math
import os
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_lightning.report.runs import ReportError, RunRecord, parse_overrides

DEFAULT_METRICS = ("val/pass@1", "reward/total")
CONFIDENCE = 0.95
UNSET = "(default)"
"""Stands for the value of a setting that no file of the run holds."""
_COUNTED = ("finished", "stopped")
_NOT_SWEPT = ("seed", "checkpoint", "run_dir", "tags", "task_name")


@dataclass(frozen=True)
class Estimate:
    """The mean of n values with its confidence interval, which a single value does not have."""

    n: int
    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """A metric of all runs of the same settings; estimates are over seeds, several runs of one count by their mean."""

    settings: Mapping[str, str]
    seeds: Mapping[str, float]  # seed -> last value
    last: Estimate
    first: Estimate | None
    mean: Estimate | None
    deviation: Estimate | None  # of each run's values over its steps, like ``mean``
    lowest: float | None
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
    runs: Sequence[RunRecord]
    unfinished: Sequence[RunRecord]  # runs that do not count: failed, running, killed, missing
    at: Sequence[int]  # steps whose values are shown
    deviation: bool  # whether the standard deviation over a run's steps is shown
    baseline: str | None  # KEY=VALUE
    notes: Sequence[str]


def compare(
    runs: Sequence[RunRecord],
    *,
    by: Sequence[str] = (),
    metrics: Sequence[str] = (),
    at: Sequence[int] = (),
    deviation: bool = False,
    baseline: str | None = None,
    curves: bool = False,
) -> Comparison:
    """Sort runs into lines and estimate their metrics.

    Args:
        runs: Finished or not.
        by: Keys in which lines differ; default: those in which the runs' overrides differ, but for the seed.
        metrics: Default: those of `DEFAULT_METRICS` that were recorded.
        at: Steps whose values are wanted.
        deviation: Whether the standard deviation over a run's steps is wanted.
        baseline: "KEY=VALUE" of the lines that the others are compared with, all other keys being equal.
        curves: Whether curves are wanted, too.

    Raises:
        ReportError: No run has a metric, a key or the baseline.
    """
    curves |= bool(at) or deviation
    counted = [run for run in runs if run.status in _COUNTED]
    notes = []
    if not counted and (counted := [run for run in runs if run.metrics]):
        notes.append("no run has finished: these are numbers of unfinished ones")
    for key in by:
        if all(run.setting(key) is None for run in counted):
            raise ReportError(f"--by={key}: no run has this setting")
    keys = list(by) or _swept(counted)
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in counted:
        groups.setdefault(tuple(run.setting(key) or UNSET for key in keys), []).append(run)
    if counted and not keys:  # named by their common directory
        keys = ["run"]
        groups = {(Path(os.path.commonpath([run.directory.absolute() for run in counted])).name,): counted}
    lines: dict[str, list[Line]] = {}
    for metric in _metrics(metrics, counted):
        ordered = sorted(groups, key=lambda values: [*map(_order, values)])
        each = [_line(dict(zip(keys, values, strict=True)), groups[values], metric, curves) for values in ordered]
        lines[metric] = _mark_best(metric, [line for line in each if line])
        missing = [step for step in at if any(step not in line.curve for line in lines[metric])]
        notes += [f"{metric} has no value at step {step} in some runs" for step in missing]
    pairs = [(values, run.seed) for values, group in groups.items() for run in group]
    if repeated := sorted({seed for values, seed in pairs if pairs.count((values, seed)) > 1}):
        notes.append(f"several runs of seed {', '.join(repeated)} with the same settings count once, by their mean")
    if baseline is not None:
        key, value = _parse_baseline(baseline, keys, list(groups))
        lines = {metric: [_subtract(line, key, value, each) for line in each] for metric, each in lines.items()}
    unfinished = [run for run in runs if run.status not in _COUNTED]
    return Comparison(keys, lines, runs, unfinished, at, deviation, baseline, notes)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of n >= 1 values with its two-sided 95 % interval by Student's t: mean ± t · s / √n."""
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return Estimate(n, mean)
    half = t_quantile(CONFIDENCE, n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Estimate(n, mean, mean - half, mean + half)


@functools.lru_cache(64)
def t_quantile(confidence: float, degrees: int) -> float:
    """The t that a variable of Student's distribution exceeds in absolute value with probability 1 - ``confidence``.

    For whole degrees of freedom the distribution is a finite sum of powers of the cosine of θ = atan(t / √degrees)
    (Abramowitz and Stegun, 26.7.3 and 26.7.4), which grows with θ and is inverted by bisection.
    """

    def probability(angle: float) -> float:
        cosine, sine, is_odd = math.cos(angle), math.sin(angle), degrees % 2
        term, total = (cosine if is_odd else 1.0), 0.0
        for power in range(is_odd, degrees - 1, 2):
            total += term
            term *= cosine * cosine * (power + 1) / (power + 2)
        return 2 / math.pi * (angle + sine * total) if is_odd else sine * total

    low, high = 0.0, math.pi / 2
    for _ in range(60):  # more than the bits of a double
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _swept(runs: Sequence[RunRecord]) -> list[str]:
    """The keys whose overrides differ between the runs, in the order in which they are given; never the seed."""
    each = [parse_overrides(run.overrides) for run in runs]
    keys = dict.fromkeys(key for settings in each for key in settings if key not in _NOT_SWEPT)
    differing = [key for key in keys if len({settings.get(key) for settings in each}) > 1]
    return [key for key in differing if len({run.setting(key) for run in runs}) > 1]


def _order(value: str) -> tuple[int, float, str]:
    """Sort key of a setting's value: numbers by size, before texts."""
    try:
        return (0, float(value), "")
    except ValueError:
        return (1, 0.0, value)


def _metrics(metrics: Sequence[str], runs: Sequence[RunRecord]) -> list[str]:
    recorded = set().union(*(run.metrics for run in runs))
    for metric in metrics:
        if metric not in recorded and not any(run.metric(metric) for run in runs):
            raise ReportError(f"--metric={metric}: no run has it; there are {', '.join(sorted(recorded))}")
    return list(metrics) or [name for name in DEFAULT_METRICS if name in recorded] or sorted(recorded)[:1]


def _line(settings: Mapping[str, str], runs: Iterable[RunRecord], metric: str, curves: bool) -> Line | None:
    """A metric of runs; None if none of them has it."""
    each = [(run.seed, run.metric(metric, curve=curves)) for run in sorted(runs, key=lambda run: _order(run.seed))]
    known = [(seed, values) for seed, values in each if values]
    if not known:
        return None
    at_steps: dict[int, list[tuple[str, float]]] = {}
    for seed, values in known:
        for step, value in values.get("curve", ()):
            at_steps.setdefault(step, []).append((seed, value))

    def over_seeds(name: str) -> Estimate | None:
        each = _by_seed((seed, values.get(name)) for seed, values in known)
        return estimate([*each.values()]) if each else None

    last = _by_seed((seed, values["last"]) for seed, values in known)
    return Line(
        settings=settings,
        seeds=last,
        last=estimate([*last.values()]),
        first=over_seeds("first"),
        mean=over_seeds("mean"),
        deviation=over_seeds("deviation"),
        lowest=min((values["min"] for _, values in known if "min" in values), default=None),
        highest=max((values["max"] for _, values in known if "max" in values), default=None),
        curve={step: estimate([*_by_seed(pairs).values()]) for step, pairs in sorted(at_steps.items())},
    )


def _by_seed(pairs: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """Seed -> the mean of its values."""
    values: dict[str, list[float]] = {}
    for seed, value in pairs:
        if value is not None:
            values.setdefault(seed, []).append(value)
    return {seed: statistics.fmean(each) for seed, each in values.items()}


def _mark_best(metric: str, lines: list[Line]) -> list[Line]:
    if len(lines) < 2 or not metric.startswith(("val/", "reward/")) or metric == "reward/std":
        return lines  # of others more is not better
    highest = max(line.last.mean for line in lines)
    return [replace(line, best=line.last.mean == highest) for line in lines]


def _parse_baseline(text: str, keys: Sequence[str], groups: Sequence[tuple[str, ...]]) -> tuple[str, str]:
    key, sign, _ = text.partition("=")
    if not sign or key not in keys:
        listed = ", ".join(map(shlex.quote, keys))
        raise ReportError(f"--baseline={text}: needs KEY=VALUE with a key in which the lines differ: {listed}")
    value, values = parse_overrides([text])[key], sorted({group[keys.index(key)] for group in groups})
    if value not in values:
        raise ReportError(f"--baseline={text}: no run has this value; there are {', '.join(map(shlex.quote, values))}")
    return key, value


def _subtract(line: Line, key: str, value: str, lines: Sequence[Line]) -> Line:
    """A line with its difference from the line that has ``value`` for ``key`` and else the same settings."""
    base = next((other for other in lines if other.settings == {**line.settings, key: value}), None)
    if base is None or base is line or not (seeds := [seed for seed in line.seeds if seed in base.seeds]):
        return line
    # what a seed does to both alike cancels in each difference
    return replace(line, difference=estimate([line.seeds[seed] - base.seeds[seed] for seed in seeds]))
