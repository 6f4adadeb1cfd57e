"""A comparison as text: Markdown tables with aligned columns, CSV or JSON."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from grpo_lightning.console import escape_formula, format_number, redact, single_line
from grpo_lightning.report import DEFAULT_METRICS, Comparison, Estimate, Line, RunRecord, compare

Rows = list[list[str]]
"""Cells by row, header first."""


def render_table(comparison: Comparison) -> str:
    """Tables of all metrics, and below them the best lines, unfinished runs and findings of health checks."""
    lines = []
    for title, rows in _tables(comparison):
        cells = [[_safe_line(cell).replace("|", "\\|") for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        cells.insert(1, ["-" * width for width in widths])
        lines += [f"**{_safe_line(title)}**", ""]
        lines += [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in cells]
        lines.append("")
    return "\n".join([*lines, *map(_safe_line, _footer(comparison))]) + "\n"


def render_json(comparison: Comparison) -> str:
    """Every line of every metric with all digits, and all runs, for programs."""
    keys = ("directory", "overrides", "status", "reason", "findings")
    page = {
        "by": comparison.keys,
        "baseline": comparison.baseline,
        "lines": _rows(comparison),
        "notes": comparison.notes,
        "runs": [{key: getattr(run, key) for key in keys} for run in comparison.runs],
    }
    return redact(json.dumps(page, indent=2, allow_nan=False, default=str)) + "\n"


def render_csv(comparison: Comparison) -> str:
    """A row for each line of each metric, with all digits."""
    rows = [dict(_flatten(row.pop("settings") | row)) for row in _rows(comparison)]
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return redact(text.getvalue())


def _rows(comparison: Comparison) -> list[dict[str, Any]]:
    return [{"metric": metric} | asdict(line) for metric, lines in comparison.lines.items() for line in lines]


def _flatten(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", escape_formula(single_line(value)) if isinstance(value, str) else value


def sweep_table(runs: Sequence[RunRecord], metric: str) -> str:
    """The table of a sweep's jobs: the metric that it maximizes and the mean reward, where they were measured."""
    measured = {name for run in runs for name in run.summary.get("metrics") or ()}
    names = dict.fromkeys((metric, DEFAULT_METRICS[1]))
    return render_table(compare(runs, metrics=[name for name in names if name in measured]))


def _number(value: float | None) -> str:
    return "-" if value is None else format_number(value, 3)


def _safe_line(text: str) -> str:
    """A text in one line, without secrets."""
    return redact(single_line(text))


def _interval(value: Estimate) -> str:
    return "-" if value.low is None else f"[{_number(value.low)}, {_number(value.high)}]"


def _tables(comparison: Comparison) -> Iterator[tuple[str, Rows]]:
    """The title and rows of each metric's table, and of that of its differences from the baseline."""
    keys, at = comparison.keys, comparison.at
    for metric, lines in comparison.lines.items():
        header = [*keys, "n", "first → last", "95 % of last", "mean", "highest", *(f"at {step}" for step in at)]
        yield f"{metric} by {', '.join(keys)}", [header, *(_cells(line, at) for line in lines)]
        if comparison.baseline:
            title = f"{metric}, last value less that of {comparison.baseline} with the same seed"
            rows = [
                [*line.settings.values(), str(each.n), f"{each.mean:+.4f}", _interval(each)]
                for line in lines
                if (each := line.difference)
            ]
            yield title, [[*keys, "n", "difference", "95 % of it"], *rows]


def _cells(line: Line, at: Sequence[int]) -> list[str]:
    ends = [_number(value) for value in (line.first, line.last.mean) if value is not None]
    numbers = [line.mean, line.highest, *(line.curve[step].mean if step in line.curve else None for step in at)]
    last = " → ".join(ends) + " *" * line.best
    return [*line.settings.values(), str(line.last.n), last, _interval(line.last), *map(_number, numbers)]


def _footer(comparison: Comparison) -> Iterator[str]:
    """The best line of each metric, notes, unfinished runs, and runs in which the health checks found something."""
    for metric, lines in comparison.lines.items():
        for line in lines:
            if line.best:
                yield f"* best {metric}: {line.label} with {_number(line.last.mean)} {_interval(line.last)}"
    yield from comparison.notes
    runs = comparison.runs
    common = set.intersection(*(set(run.overrides) for run in runs))
    unfinished = [(run, [run.status, run.reason]) for run in runs if not run.is_counted]
    unhealthy = [(run, run.findings) for run in runs if run.findings]
    for listed, title in (
        (unfinished, f"{len(unfinished)} of {len(runs)} runs without a result:"),
        (unhealthy, f"health checks found something in {len(unhealthy)} of {len(runs)} runs, see health.json there:"),
    ):
        for number, (run, words) in enumerate(listed):
            differing = " ".join(word for word in run.overrides if word not in common)
            yield from [title] * (number == 0)
            yield f"  {run.directory}{differing and f' ({differing})'}: {', '.join(filter(None, words))}"


FORMATS = {"table": render_table, "csv": render_csv, "json": render_json}
