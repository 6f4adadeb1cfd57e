"""A comparison as text: for a terminal, as Markdown, CSV or JSON."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lightning.output.files import no_formula
from grpo_lightning.output.redaction import hide
from grpo_lightning.output.terminal import one_line
from grpo_lightning.report.comparison import Comparison, Line
from grpo_lightning.report.records import RunRecord
from grpo_lightning.report.statistics import Estimate

PIPED = 80
"""Columns where the output is no terminal."""
STAR = "\u00a0*"
"""Marks the best line."""
_LINES = box.Box("    \n    \n ── \n    \n    \n    \n    \n    \n")


def number(value: float | None) -> str:
    """Four digits at most of what is neither large nor tiny."""
    if value is None:
        return "-"
    size = abs(value)
    if value == 0 or 0.1 <= size < 1000:
        return f"{value:.3f}"
    return f"{value:.0f}" if 1000 <= size < 1e7 else f"{value:.4f}" if 0.001 <= size < 1 else f"{value:.2g}"


def interval(value: Estimate | None) -> str:
    """The ends of an interval, or "-" where a single value gives none."""
    return "-" if value is None or value.low is None else f"[{number(value.low)}, {number(value.high)}]"


def _mean(value: Estimate | None) -> str:
    return number(value.mean if value else None)


def write(comparison: Comparison, form: str, *, deviation: bool = False) -> str:
    """The comparison in one of `FORMS`."""
    return hide(FORMS[form](comparison, deviation).replace("\u00a0", " "))


@dataclass(frozen=True)
class _Grid:
    """A table as texts."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    keys: int
    """How many of the first columns are settings."""


def _grids(comparison: Comparison, deviation: bool) -> Iterator[_Grid]:
    """Two tables for each metric: its values, and how far they are from the baseline's if there is one."""
    for metric, lines in comparison.lines.items():
        at = list(lines[0].at) if lines else []
        more = [f"at {step}" for step in at] + ["sd"] * deviation
        header = [*comparison.keys, "n", "first\u00a0→\u00a0last", "95 % of last", "mean", "highest", *more]
        title = f"{metric} by {', '.join(comparison.keys)}"
        yield _grid(title, header, [_values(line, deviation) for line in lines], len(comparison.keys))
        if comparison.baseline:
            header = [*comparison.keys, "n", "difference", "95 % of it"]
            title = f"{metric}, last value less that of {'='.join(comparison.baseline)} with the same seed"
            rows = [_differences(line) for line in lines if not line.is_baseline]
            yield _grid(title, header, rows, len(comparison.keys))


def _grid(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], keys: int) -> _Grid:
    safe = [[_shown(cell) for cell in row] for row in (header, *rows)]
    return _Grid(_shown(title), safe[0], safe[1:], keys)


def _shown(text: str) -> str:
    """A text in one line without secrets, which could no longer be told once it is folded."""
    return hide(one_line(text))


def _values(line: Line, deviation: bool) -> list[str]:
    first = f"{number(line.first.mean)}\u00a0→\u00a0" if line.first else ""
    last = f"{first}{number(line.last.mean)}{STAR * line.is_best}"
    more = [_mean(value) for value in line.at.values()] + [_mean(line.deviation)] * deviation
    return [*line.settings, str(line.last.n), last, interval(line.last), _mean(line.mean), number(line.high), *more]


def _differences(line: Line) -> list[str]:
    if line.difference is None:
        return [*line.settings, "0", "-", "-"]
    sign = "+" if line.difference.mean > 0 else ""
    told = f"{sign}{number(line.difference.mean)}"
    return [*line.settings, str(line.difference.n), told, interval(line.difference)]


def _closing(comparison: Comparison) -> list[str]:
    """What stands below the tables: the best line of each metric, the runs that no number is of, and notes."""
    said = []
    for metric in comparison.lines:
        if best := comparison.best(metric):
            ends = f" {interval(best.last)}" if best.last.low is not None else ""
            said.append(f"* best {metric}: {comparison.label(best.settings)} with {number(best.last.mean)}{ends}")
    said += comparison.notes
    if comparison.others:
        said.append(f"{len(comparison.others)} of {len(comparison.runs)} runs without a result:")
        said += [f"  {_name(run, comparison.runs)}: {_ended(run)}" for run in comparison.others]
    if ailing := [run for run in comparison.runs if run.findings]:
        said.append(f"the doctor has findings in {len(ailing)} of {len(comparison.runs)} runs, see health.json there:")
        said += [f"  {_name(run, comparison.runs)}: {', '.join(run.findings)}" for run in ailing]
    return [_shown(line) for line in said]


def _ended(run: RunRecord) -> str:
    return f"{run.status}, {run.reason}" if run.reason else run.status


def _name(run: RunRecord, runs: Sequence[RunRecord]) -> str:
    common = set.intersection(*(set(other.overrides) for other in runs))
    words = " ".join(word for word in run.overrides if word not in common)
    return f"{run.directory}{f' ({words})' if words else ''}"


def _text(comparison: Comparison, deviation: bool) -> str:
    console = Console(file=io.StringIO(), width=_width(), markup=False, highlight=False, emoji=False)
    for grid in _grids(comparison, deviation):
        console.print(Text(grid.title), overflow="fold")
        table = Table(box=_LINES, padding=(0, 1, 0, 0), pad_edge=False)
        for place, name in enumerate(grid.header):
            is_key = place < grid.keys
            folded = Text(name.replace(".", ".\n") if is_key and len(name) > 16 else name)
            table.add_column(folded, overflow="fold", justify="left" if is_key else "right")
        for row in grid.rows:
            table.add_row(*map(Text, row))
        console.print(table)
    for line in _closing(comparison):
        console.print(Text(line), overflow="ignore", crop=False)  # paths stay whole, to be copied
    shown: Any = console.file
    return "\n".join(line.rstrip() for line in shown.getvalue().splitlines()) + "\n"


def _width() -> int:
    console = Console()
    return console.width if console.is_terminal else PIPED


def _markdown(comparison: Comparison, deviation: bool) -> str:
    said = []
    for grid in _grids(comparison, deviation):
        rows = (grid.header, ["---"] * len(grid.header), *grid.rows)
        said += [f"**{_piped(grid.title)}**\n", *("| " + " | ".join(map(_piped, row)) + " |" for row in rows), ""]
    closing = (_piped(" ".join(line.split())) for line in _closing(comparison))
    return "\n".join([*said, *(f"- {line}" for line in closing)]) + "\n"


def _piped(cell: str) -> str:
    return re.sub(r"([\\|*]|(?<=\])\()", r"\\\1", one_line(cell)).replace("<", "&lt;")


def _csv(comparison: Comparison, deviation: bool) -> str:
    """A line for each metric and each line of its table, with all digits."""
    text = io.StringIO()
    rows = [
        {no_formula(name): no_formula(value) for name, value in _flat(row).items()}
        for row in _plain(comparison)["lines"]
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            own = _flat(value)
            flat |= {one_line(key if name == "settings" else f"{name}.{key}"): one for key, one in own.items()}
        else:
            flat[name] = one_line(value) if isinstance(value, str) else value
    return flat


def _json(comparison: Comparison, deviation: bool) -> str:
    return json.dumps(_plain(comparison), indent=2, allow_nan=False) + "\n"


def _plain(comparison: Comparison) -> dict[str, Any]:
    """Everything with all digits, as plain values."""
    lines = [
        {
            "metric": metric,
            "settings": dict(zip(comparison.keys, line.settings, strict=True)),
            "n": line.last.n,
            **{name: _estimated(getattr(line, name)) for name in ("first", "last", "mean", "deviation")},
            "lowest": line.low,
            "highest": line.high,
            "at": {str(step): _estimated(value) for step, value in line.at.items()},
            **({"difference": _estimated(line.difference)} if comparison.baseline else {}),
            "best": line.is_best,
            "seeds": {seed: one.last for seed, one in line.by_seed.items()},
        }
        for metric, found in comparison.lines.items()
        for line in found
    ]
    others = [
        {"directory": str(run.directory), "overrides": list(run.overrides), "status": run.status, "reason": run.reason}
        for run in comparison.others
    ]
    baseline = "=".join(comparison.baseline) if comparison.baseline else None
    ailing = [{"directory": str(run.directory), "findings": run.findings} for run in comparison.runs if run.findings]
    told = {"by": list(comparison.keys), "baseline": baseline, "lines": lines}
    return told | {"unfinished": others, "ailing": ailing}


def _estimated(value: Estimate | None) -> dict[str, float | int | None] | None:
    return None if value is None else {"n": value.n, "mean": value.mean, "low": value.low, "high": value.high}


FORMS: Mapping[str, Callable[[Comparison, bool], str]] = {
    "table": _text,
    "md": _markdown,
    "csv": _csv,
    "json": _json,
}
