"""Runs of the same settings together: a line for each, over its seeds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_lightning.output.shell import shell_word
from grpo_lightning.report.curves import Course, course, names
from grpo_lightning.report.keys import UNSET, checked, given, order, seed_of, suggestion, swept, value_of
from grpo_lightning.report.records import ReportError, RunRecord
from grpo_lightning.report.statistics import Estimate, estimate, paired

DEFAULT_METRICS = ("val/pass@1", "reward/total")
ENDED_WELL = ("finished", "stopped")
_MORE_IS_BETTER = ("val/", "reward/")
_NEITHER = ("reward/std",)


@dataclass(frozen=True)
class Line:
    """A metric of all runs of the same settings."""

    settings: tuple[str, ...]
    """The values of the swept keys."""
    by_seed: Mapping[str, Course]
    last: Estimate
    first: Estimate | None
    mean: Estimate | None
    """Of each run's mean over its steps."""
    low: float | None
    high: float | None
    """The lowest and the highest value in any of the runs, at any step."""
    deviation: Estimate | None
    """Of each run's standard deviation over its steps."""
    at: Mapping[int, Estimate | None]
    """Step -> the values there."""
    difference: Estimate | None = None
    """Of the last value from the baseline's, over the seeds that both have."""
    is_baseline: bool = False
    is_best: bool = False


@dataclass(frozen=True)
class Comparison:
    """What there is to say of some runs."""

    keys: Sequence[str]
    """What the lines differ in."""
    lines: Mapping[str, Sequence[Line]]
    """Metric -> its lines."""
    runs: Sequence[RunRecord]
    others: Sequence[RunRecord]
    """Those that no number is of: failed, running, killed, missing."""
    baseline: tuple[str, str] | None = None
    notes: Sequence[str] = field(default_factory=list)

    def best(self, metric: str) -> Line | None:
        """The line with the highest last value, of several lines and where more is better."""
        return next((line for line in self.lines[metric] if line.is_best), None)

    def label(self, settings: Sequence[str]) -> str:
        """What a line's settings are, in words as on the command line."""
        return " ".join(f"{key}={value}" for key, value in zip(self.keys, settings, strict=True))


def compare(
    runs: Sequence[RunRecord],
    *,
    by: Sequence[str] = (),
    metrics: Sequence[str] = (),
    at: Sequence[int] = (),
    baseline: str | None = None,
    with_points: bool = False,
) -> Comparison:
    """Sort runs into lines and estimate their metrics.

    Args:
        runs: All of them, finished or not.
        by: The keys that lines differ in; none: those that the runs' overrides differ in, but for the seed.
        metrics: Their names; none: `DEFAULT_METRICS`, those that there are.
        at: Steps to give the values of.
        baseline: "KEY=VALUE" of the lines that others are compared with, all other keys being equal.
        with_points: Whether curves are needed in any case.

    Raises:
        ReportError: No run has a metric, a key or the baseline.
    """
    counted = [run for run in runs if run.status in ENDED_WELL]
    notes = []
    if not counted:
        counted = [run for run in runs if names(run)]
        if counted:
            notes.append("no run has finished: these are numbers of unfinished ones")
    others = [run for run in runs if run.status not in ENDED_WELL]
    metrics = _known(metrics, counted)
    columns = checked(by, counted) if by else swept(counted)
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in counted:
        settings = tuple(value_of(run, key) or UNSET for key in columns)
        groups.setdefault(settings, []).append(run)
    if not columns:
        columns = ["run"]
        groups = {(_name(found),): found for found in groups.values()}
    lines = {}
    for metric in metrics:
        listed = [
            line
            for settings, found in sorted(groups.items(), key=lambda pair: order(pair[0]))
            if (line := _line(settings, found, metric, at, with_points or bool(at)))
        ]
        lines[metric] = _with_best(metric, listed)
        notes += _without_steps(metric, listed, at)
    if twice := {seed for found in groups.values() for seed in _repeated(found)}:
        notes.append(
            f"several runs of seed {', '.join(sorted(twice))} with the same settings count once, by their mean"
        )
    pair = None
    if baseline is not None:
        pair = _baseline(baseline, columns, list(groups))
        lines = {metric: _with_differences(listed, columns, pair) for metric, listed in lines.items()}
    return Comparison(columns, lines, runs, others, pair, notes)


def _known(metrics: Sequence[str], runs: Sequence[RunRecord]) -> list[str]:
    found = set().union(*(names(run) for run in runs))
    for metric in metrics:
        if metric not in found and not any(course(run, metric, with_points=False) for run in runs):
            raise ReportError(f"--metric={metric}: no run has it{suggestion(metric, sorted(found))}")
    return list(metrics) or [name for name in DEFAULT_METRICS if name in found] or sorted(found)[:1]


def _name(runs: Sequence[RunRecord]) -> str:
    """What to call runs that nothing but the seed tells apart: their directory, or the one that they are in."""
    places = {run.directory.absolute() for run in runs}
    return (places.pop() if len(places) == 1 else runs[0].directory.absolute().parent).name


def _repeated(runs: Sequence[RunRecord]) -> set[str]:
    seeds = [seed_of(run) for run in runs]
    return {seed for seed in seeds if seeds.count(seed) > 1}


def _line(
    settings: tuple[str, ...], runs: Sequence[RunRecord], metric: str, at: Sequence[int], with_points: bool
) -> Line | None:
    by_seed: dict[str, list[Course]] = {}
    for run in runs:
        if found := course(run, metric, with_points=with_points):
            by_seed.setdefault(seed_of(run), []).append(found)
    if not by_seed:
        return None
    seeds = {seed: _together(found) for seed, found in sorted(by_seed.items(), key=lambda pair: order((pair[0],)))}
    courses = list(seeds.values())
    lows, highs = ([getattr(one, name) for one in courses] for name in ("low", "high"))
    values = {step: [_at(one, step) for one in courses] for step in at}
    return Line(
        settings,
        seeds,
        estimate([one.last for one in courses]),
        _estimate([one.first for one in courses]),
        _estimate([one.mean for one in courses]),
        min((low for low in lows if low is not None), default=None),
        max((high for high in highs if high is not None), default=None),
        _estimate([one.deviation for one in courses]),
        {step: _estimate(found) for step, found in values.items()},
    )


def _together(courses: Sequence[Course]) -> Course:
    """Several runs of the same seed, as one."""
    if len(courses) == 1:
        return courses[0]

    points: dict[int, list[float]] = {}
    for one in courses:
        for step, value in one.points or ():
            points.setdefault(step, []).append(value)
    how = {"low": min, "high": max}
    known: dict[str, list[Any]] = {
        name: [value for one in courses if (value := getattr(one, name)) is not None]
        for name in ("last", "first", "mean", "low", "high", "deviation")
    }
    means: dict[str, Any] = {n: how.get(n, statistics.fmean)(v) if v else None for n, v in known.items()}
    return Course(
        **means,
        points=[(step, statistics.fmean(values)) for step, values in sorted(points.items())] or None,
    )


def _at(one: Course, step: int) -> float | None:
    return dict(one.points or ()).get(step)


def _estimate(values: Sequence[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return estimate(known) if known else None


def _with_best(metric: str, lines: Sequence[Line]) -> list[Line]:
    if len(lines) < 2 or not metric.startswith(_MORE_IS_BETTER) or metric in _NEITHER:
        return list(lines)
    highest = max(line.last.mean for line in lines)
    is_shared = sum(line.last.mean == highest for line in lines) > 1
    return [replace(line, is_best=line.last.mean == highest and not is_shared) for line in lines]


def _without_steps(metric: str, lines: Sequence[Line], at: Sequence[int]) -> list[str]:
    """Where a metric has no value at a step that is asked for, which steps are the nearest."""
    steps = sorted({step for line in lines for one in line.by_seed.values() for step, _ in one.points or ()})
    said = []
    for step in at:
        if any(line.at[step] is None for line in lines):
            near = [one for one in steps if one < step][-1:] + [one for one in steps if one > step][:1]
            where = f": it has at {' and '.join(map(str, near))}" if near else ""
            said.append(f"{metric} has not in every run a value at step {step}{where}")
    return said


def _baseline(text: str, columns: Sequence[str], groups: Sequence[tuple[str, ...]]) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or key not in columns:
        listed = ", ".join(map(shell_word, columns))
        raise ReportError(f"--baseline={text}: allowed is KEY=VALUE with a key that the lines differ in: {listed}")
    values = sorted({group[columns.index(key)] for group in groups})
    value = next(iter(given([text]).values()))
    if value not in values:
        raise ReportError(f"--baseline={text}: no run has this value; allowed are {', '.join(map(shell_word, values))}")
    return key, value


def _with_differences(lines: Sequence[Line], columns: Sequence[str], baseline: tuple[str, str]) -> list[Line]:
    place = columns.index(baseline[0])
    by_settings = {line.settings: line for line in lines}
    compared = []
    for line in lines:
        if line.settings[place] == baseline[1]:
            compared.append(replace(line, is_baseline=True))
            continue
        base = by_settings.get((*line.settings[:place], baseline[1], *line.settings[place + 1 :]))
        seeds = [seed for seed in line.by_seed if base and seed in base.by_seed]
        if base and seeds:
            pairs = [(line.by_seed[seed].last, base.by_seed[seed].last) for seed in seeds]
            line = replace(line, difference=paired([one for one, _ in pairs], [other for _, other in pairs]))
        compared.append(line)
    return compared
