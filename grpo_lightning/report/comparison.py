"""Runs of the same settings together: a line for each, over its seeds."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from grpo_lightning.config.shell import shell_quote
from grpo_lightning.report.curves import Course, by_step, course, names
from grpo_lightning.report.keys import UNSET, checked, given, order, seed_of, suggestion, swept, value_of
from grpo_lightning.report.records import ReportError, RunRecord
from grpo_lightning.report.statistics import Estimate, estimate

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
    is_best: bool = False
    is_baseline: bool = False
    difference: Estimate | None = None
    """Of the last value from the baseline's, over the seeds that both have."""

    @property
    def last(self) -> Estimate:
        """Of each run's last value."""
        return estimate([one.last for one in self.by_seed.values()])

    @property
    def curve(self) -> dict[int, Estimate]:
        """Step -> the values of the runs that have one there."""
        return {step: estimate(values) for step, values in by_step(self.by_seed.values()).items()}

    def estimate(self, name: str) -> Estimate | None:
        """Of each run's "first" value, or its "mean" or "deviation" over its steps; None if no run tells."""
        known = _known(self.by_seed.values(), name)
        return estimate(known) if known else None

    def extreme(self, name: str) -> float | None:
        """The lowest ("low") or the highest value ("high") in any of the runs, at any step; None if no run tells."""
        return (min if name == "low" else max)(_known(self.by_seed.values(), name), default=None)


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
    at: Sequence[int]
    """Steps to show the values of."""
    deviation: bool
    """Whether to show the standard deviation over a run's steps."""
    baseline: tuple[str, str] | None
    notes: Sequence[str]

    def label(self, settings: Sequence[str]) -> str:
        """What a line's settings are, in words as on the command line."""
        return " ".join(f"{key}={value}" for key, value in zip(self.keys, settings, strict=True))


def compare(
    runs: Sequence[RunRecord],
    *,
    by: Sequence[str] = (),
    metrics: Sequence[str] = (),
    at: Sequence[int] = (),
    deviation: bool = False,
    baseline: str | None = None,
    with_points: bool = False,
) -> Comparison:
    """Sort runs into lines and estimate their metrics.

    Args:
        runs: All of them, finished or not.
        by: The keys that lines differ in; none: those that the runs' overrides differ in, but for the seed.
        metrics: Their names; none: `DEFAULT_METRICS`, those that there are.
        at: Steps to give the values of.
        deviation: Whether to give the standard deviation over a run's steps.
        baseline: "KEY=VALUE" of the lines that others are compared with, all other keys being equal.
        with_points: Whether curves are needed in any case.

    Raises:
        ReportError: No run has a metric, a key or the baseline.
    """
    with_points |= bool(at) or deviation
    others = [run for run in runs if run.status not in ENDED_WELL]
    counted = [run for run in runs if run.status in ENDED_WELL]
    notes = []
    if not counted and (counted := [run for run in runs if names(run)]):
        notes.append("no run has finished: these are numbers of unfinished ones")
    columns = checked(by, counted) if by else swept(counted)
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in counted:
        groups.setdefault(tuple(value_of(run, key) or UNSET for key in columns), []).append(run)
    if counted and not columns:  # named by their directory, or by the one that all are in
        columns = ["run"]
        groups = {(Path(os.path.commonpath([run.directory.absolute() for run in counted])).name,): counted}
    lines = {}
    for metric in _metrics(metrics, counted):
        ordered = sorted(groups, key=lambda settings: [*map(order, settings)])
        listed = [Line(one, _by_seed(groups[one], metric, with_points)) for one in ordered]
        lines[metric] = _with_best(metric, [line for line in listed if line.by_seed])
        notes += _without_steps(metric, lines[metric], at)
    pairs = [(settings, seed_of(run)) for settings, group in groups.items() for run in group]
    if twice := sorted({pair[1] for pair in pairs if pairs.count(pair) > 1}):
        notes.append(f"several runs of seed {', '.join(twice)} with the same settings count once, by their mean")
    pair = None
    if baseline is not None:
        pair = _baseline(baseline, columns, list(groups))
        lines = {metric: _with_differences(listed, columns.index(pair[0]), pair[1]) for metric, listed in lines.items()}
    return Comparison(columns, lines, runs, others, at, deviation, pair, notes)


def _metrics(metrics: Sequence[str], runs: Sequence[RunRecord]) -> list[str]:
    found = set().union(*(names(run) for run in runs))
    for metric in metrics:
        if metric not in found and not any(course(run, metric, with_points=False) for run in runs):
            raise ReportError(f"--metric={metric}: no run has it{suggestion(metric, sorted(found))}")
    return list(metrics) or [name for name in DEFAULT_METRICS if name in found] or sorted(found)[:1]


def _by_seed(runs: Sequence[RunRecord], metric: str, with_points: bool) -> dict[str, Course]:
    """Seed -> how a metric went; several runs of one seed count once."""
    by_seed: dict[str, list[Course]] = {}
    for run in sorted(runs, key=lambda run: order(seed_of(run))):
        if found := course(run, metric, with_points=with_points):
            by_seed.setdefault(seed_of(run), []).append(found)
    return {seed: _together(found) for seed, found in by_seed.items()}


def _together(courses: Sequence[Course]) -> Course:
    """Several runs of the same seed, as one: their mean, and the lowest and highest of their values."""

    def merged(name: str, by: Callable[[Sequence[float]], float] = fmean) -> float | None:
        return by(known) if (known := _known(courses, name)) else None

    return Course(
        last=fmean(one.last for one in courses),
        first=merged("first"),
        mean=merged("mean"),
        low=merged("low", min),
        high=merged("high", max),
        deviation=merged("deviation"),
        points=[(step, fmean(values)) for step, values in by_step(courses).items()],
    )


def _known(courses: Iterable[Course], name: str) -> list[float]:
    return [value for one in courses if (value := getattr(one, name)) is not None]


def _with_best(metric: str, lines: Sequence[Line]) -> list[Line]:
    if len(lines) < 2 or not metric.startswith(_MORE_IS_BETTER) or metric in _NEITHER:
        return list(lines)
    highest = max(line.last.mean for line in lines)
    return [replace(line, is_best=line.last.mean == highest) for line in lines]


def _without_steps(metric: str, lines: Sequence[Line], at: Sequence[int]) -> list[str]:
    """Where a metric has no value at a step that is asked for, which steps are the nearest."""
    steps = {step for line in lines for step in line.curve}
    said = []
    for step in at:
        if any(step not in line.curve for line in lines):
            near = sorted(sorted(steps - {step}, key=lambda one: abs(one - step))[:2])
            where = f": it has at {' and '.join(map(str, near))}" if near else ""
            said.append(f"{metric} has not in every run a value at step {step}{where}")
    return said


def _baseline(text: str, columns: Sequence[str], groups: Sequence[tuple[str, ...]]) -> tuple[str, str]:
    key, sign, _ = text.partition("=")
    if not sign or key not in columns:
        listed = ", ".join(map(shell_quote, columns))
        raise ReportError(f"--baseline={text}: allowed is KEY=VALUE with a key that the lines differ in: {listed}")
    value, values = given([text])[key], sorted({group[columns.index(key)] for group in groups})
    if value not in values:
        raise ReportError(
            f"--baseline={text}: no run has this value; allowed are {', '.join(map(shell_quote, values))}"
        )
    return key, value


def _with_differences(lines: Sequence[Line], place: int, value: str) -> list[Line]:
    """Lines with their differences from those that have a value at a place of their settings, and are else the same."""
    by_settings = {line.settings: line for line in lines}
    compared = []
    for line in lines:
        base = by_settings.get((*line.settings[:place], value, *line.settings[place + 1 :]))
        if base is line:
            line = replace(line, is_baseline=True)
        elif base and (seeds := [seed for seed in line.by_seed if seed in base.by_seed]):
            # what a seed does to both of them alike cancels in each difference
            differences = [line.by_seed[seed].last - base.by_seed[seed].last for seed in seeds]
            line = replace(line, difference=estimate(differences))
        compared.append(line)
    return compared
