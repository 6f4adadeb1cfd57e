"""A comparison as text: for a terminal, as Markdown, CSV or JSON."""

import csv
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lightning.console import escape_formula, redact, single_line
from grpo_lightning.report.comparison import DEFAULT_METRICS, Comparison, Estimate, Line, compare
from grpo_lightning.report.runs import RunRecord

_LINES = box.Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
_SPACE = "\u00a0"
"""At which no cell is broken."""


def render(comparison: Comparison, form: str = "table") -> str:
    """The comparison in one of `FORMATS`."""
    return redact(FORMATS[form](comparison).replace(_SPACE, " "))


def sweep_table(runs: Sequence[RunRecord], metric: str) -> str:
    """The table of a sweep's jobs: the metric that it maximizes and the mean reward, where they were measured."""
    measured = {name for run in runs for name in run.summary.get("metrics") or ()}
    return render(compare(runs, metrics=[name for name in {metric: 0, DEFAULT_METRICS[1]: 0} if name in measured]))


def format_number(value: float | None) -> str:
    """Up to four digits; a dash for None."""
    if value is None:
        return "-"
    size = abs(value)
    if value == 0 or 0.1 <= size < 1000:
        return f"{value:.3f}"
    return f"{value:.0f}" if 1000 <= size < 1e7 else f"{value:.4f}" if 0.001 <= size < 1 else f"{value:.2g}"


def _mean(value: Estimate | None) -> str:
    return format_number(value.mean if value else None)


def _interval(value: Estimate | None) -> str:
    if value is None or value.low is None:
        return "-"
    return f"[{format_number(value.low)}, {format_number(value.high)}]"


def _grids(comparison: Comparison) -> Iterator[tuple[str, list[list[str]]]]:
    """The title and rows, header first, of each metric's table, and of that of its differences from the baseline."""
    keys = comparison.keys
    more = [f"at {step}" for step in comparison.at] + ["sd"] * comparison.deviation
    for metric, lines in comparison.lines.items():
        header = [*keys, "n", f"first{_SPACE}→{_SPACE}last", "95 % of last", "mean", "highest", *more]
        yield f"{metric} by {', '.join(keys)}", [header, *(_values(line, comparison) for line in lines)]
        if comparison.baseline:
            rows = [_difference(line) for line in lines if comparison.baseline not in line.label.split()]
            title = f"{metric}, last value less that of {comparison.baseline} with the same seed"
            yield title, [[*keys, "n", "difference", "95 % of it"], *rows]


def _values(line: Line, comparison: Comparison) -> list[str]:
    ends = (f"{_mean(line.first)}{_SPACE}→{_SPACE}" if line.first else "") + _mean(line.last)
    more = [_mean(line.curve.get(step)) for step in comparison.at] + [_mean(line.deviation)] * comparison.deviation
    values = [ends + f"{_SPACE}*" * line.best, _interval(line.last), _mean(line.mean), format_number(line.highest)]
    return [*line.settings.values(), str(line.last.n), *values, *more]


def _difference(line: Line) -> list[str]:
    difference = line.difference
    sign = "+" if difference and difference.mean > 0 else ""
    count = str(difference.n if difference else 0)
    return [*line.settings.values(), count, sign + _mean(difference), _interval(difference)]


def _footer(comparison: Comparison) -> list[str]:
    """The best line of each metric, notes, unfinished runs, and runs in which the health checks found something."""
    lines = []
    for metric, each in comparison.lines.items():
        for line in each:
            if line.best:
                interval = f" {_interval(line.last)}" if line.last.n > 1 else ""
                lines.append(f"* best {metric}: {line.label} with {_mean(line.last)}{interval}")
    lines += comparison.notes
    runs = comparison.runs
    common = set.intersection(*(set(run.overrides) for run in runs))

    def name(run: RunRecord) -> str:
        differing = " ".join(word for word in run.overrides if word not in common)
        return f"  {run.directory}{f' ({differing})' if differing else ''}"

    if comparison.unfinished:
        lines.append(f"{len(comparison.unfinished)} of {len(runs)} runs without a result:")
        lines += [f"{name(run)}: {', '.join(filter(None, (run.status, run.reason)))}" for run in comparison.unfinished]
    if unhealthy := [run for run in runs if run.findings]:
        lines.append(f"health checks found something in {len(unhealthy)} of {len(runs)} runs, see health.json there:")
        lines += [f"{name(run)}: {', '.join(run.findings)}" for run in unhealthy]
    return [_safe(line) for line in lines]


def _safe(text: str) -> str:
    """A text in one line, without secrets, which could not be recognized once it is folded."""
    return redact(single_line(text))


def _terminal(comparison: Comparison) -> str:
    text = io.StringIO()
    width = shutil.get_terminal_size().columns  # 80 where the output is no terminal
    console = Console(file=text, width=width, markup=False, highlight=False, emoji=False)
    for title, (header, *rows) in _grids(comparison):
        console.print(Text(_safe(title)), overflow="fold")
        table = Table(box=_LINES, padding=(0, 1, 0, 0), pad_edge=False)
        for place, name in enumerate(map(_safe, header)):
            is_key = place < len(comparison.keys)
            folded = Text(name.replace(".", ".\n") if is_key and len(name) > 16 else name)
            table.add_column(folded, overflow="fold", justify="left" if is_key else "right")
        for row in rows:
            table.add_row(*(Text(_safe(cell)) for cell in row))
        console.print(table)
    for line in _footer(comparison):
        console.print(Text(line), overflow="ignore", crop=False)  # paths stay whole, to be copied
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _markdown(comparison: Comparison) -> str:
    def cell(text: str) -> str:
        return re.sub(r"([\\|*[])", r"\\\1", _safe(text)).replace("<", "&lt;")

    lines = []
    for title, (header, *rows) in _grids(comparison):
        lines += [f"**{cell(title)}**\n", f"| {' | '.join(map(cell, header))} |", "|---" * len(header) + "|"]
        lines += [*(f"| {' | '.join(map(cell, row))} |" for row in rows), ""]
    return "\n".join([*lines, *(f"- {cell(line.strip())}" for line in _footer(comparison))]) + "\n"


def _rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Every line of every metric with all digits, for programs."""
    rows = []
    for metric, lines in comparison.lines.items():
        for line in lines:
            row: dict[str, Any] = {"metric": metric, "n": line.last.n} | asdict(line)
            curve = row.pop("curve")
            if not comparison.baseline:
                row.pop("difference")
            rows.append(row | {"at": {str(step): curve.get(step) for step in comparison.at}})
    return rows


def _json(comparison: Comparison) -> str:
    unfinished = [
        {"directory": str(run.directory), "overrides": run.overrides, "status": run.status, "reason": run.reason}
        for run in comparison.unfinished
    ]
    unhealthy = [{"directory": str(run.directory), "findings": run.findings} for run in comparison.runs if run.findings]
    page = {"by": comparison.keys, "baseline": comparison.baseline, "lines": _rows(comparison)}
    return json.dumps(page | {"unfinished": unfinished, "unhealthy": unhealthy}, indent=2, allow_nan=False) + "\n"


def _csv(comparison: Comparison) -> str:
    """A row for each line of each metric, with all digits."""
    rows = [dict(_flatten(row.pop("settings") | row)) for row in _rows(comparison)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flatten(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, escape_formula(single_line(value)) if isinstance(value, str) else value


FORMATS: Mapping[str, Callable[[Comparison], str]] = {
    "table": _terminal,
    "md": _markdown,
    "csv": _csv,
    "json": _json,
}
