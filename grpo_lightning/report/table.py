"""A comparison as text: for a terminal, as Markdown, CSV, JSON or HTML."""

import csv
import html
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lightning.output.redaction import hide
from grpo_lightning.output.terminal import printable
from grpo_lightning.report.comparison import Comparison, Line
from grpo_lightning.report.records import RunRecord
from grpo_lightning.report.statistics import Estimate

PIPED = 80
"""Columns where the output is no terminal."""


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


def _header(comparison: Comparison, at: Sequence[int], deviation: bool) -> list[str]:
    more = [f"at {step}" for step in at] + ["sd"] * deviation
    base = [f"last - {'='.join(comparison.baseline)}'s", "95 % of it"] if comparison.baseline else []
    return [*comparison.keys, "n", "first\u00a0→\u00a0last", "95 % of last", "mean", "highest", *more, *base]


def _cells(line: Line, at: Sequence[int], deviation: bool, has_baseline: bool) -> list[str]:
    first = f"{number(line.first.mean)}\u00a0→\u00a0" if line.first else ""
    star = "\u00a0*" if line.is_best else ""
    more = [_mean(line.at[step]) for step in at]
    if deviation:
        more.append(_mean(line.deviation))
    if has_baseline:
        sign = "+" if line.difference and line.difference.mean > 0 else ""
        told = f"{sign}{number(line.difference.mean)} (n={line.difference.n})" if line.difference else "-"
        more += ["baseline", ""] if line.is_baseline else [told, interval(line.difference)]
    last = f"{first}{number(line.last.mean)}{star}"
    return [*line.settings, str(line.last.n), last, interval(line.last), _mean(line.mean), number(line.high), *more]


def _title(comparison: Comparison, metric: str) -> str:
    return printable(f"{metric} by {', '.join(comparison.keys)}")


def _steps(lines: Sequence[Line]) -> list[int]:
    return list(lines[0].at) if lines else []


def _rows(comparison: Comparison, metric: str, deviation: bool) -> tuple[list[str], list[list[str]]]:
    lines, has_baseline = comparison.lines[metric], comparison.baseline is not None
    at = _steps(lines)
    rows = [[printable(cell) for cell in _cells(line, at, deviation, has_baseline)] for line in lines]
    return [printable(cell) for cell in _header(comparison, at, deviation)], rows


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
        said += [f"  {_described(run)}" for run in comparison.others]
    return [printable(line) for line in said]


def _described(run: RunRecord) -> str:
    words = " ".join(run.overrides[-4:]) if run.status == "missing" else ""
    place = f"{run.directory} {words}".strip()
    return f"{place}: {run.status}{f', {run.reason}' if run.reason else ''}"


def _text(comparison: Comparison, deviation: bool) -> str:
    console = Console(file=io.StringIO(), width=_width(), markup=False, highlight=False, emoji=False)
    for metric in comparison.lines:
        header, rows = _rows(comparison, metric, deviation)
        table = Table(
            title=Text(_title(comparison, metric)),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1),
            pad_edge=False,
        )
        for place, name in enumerate(header):
            is_key = place < len(comparison.keys)
            folded = Text(name.replace(".", ".\n") if is_key and len(name) > 12 else name)
            table.add_column(folded, overflow="fold", justify="left" if is_key else "right")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    for line in _closing(comparison):
        console.print(Text(line), overflow="fold")
    shown: Any = console.file
    return "\n".join(line.rstrip() for line in shown.getvalue().splitlines()) + "\n"


def _width() -> int:
    console = Console()
    return console.width if console.is_terminal else PIPED


def _markdown(comparison: Comparison, deviation: bool) -> str:
    said = []
    for metric in comparison.lines:
        header, rows = _rows(comparison, metric, deviation)
        said.append(f"**{_title(comparison, metric)}**\n")
        said += [
            "| " + " | ".join(_piped(cell) for cell in row) + " |" for row in (header, ["---"] * len(header), *rows)
        ]
        said.append("")
    return "\n".join([*said, *(f"- {line.strip()}" for line in _closing(comparison))]) + "\n"


def _piped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def _html(comparison: Comparison, deviation: bool) -> str:
    style = "body{font-family:sans-serif}td,th{padding:.2em .8em;text-align:right}td:first-child,th:first-child"
    said = [f'<!doctype html><meta charset="utf-8"><title>Report</title><style>{style}{{text-align:left}}</style>']
    for metric in comparison.lines:
        header, rows = _rows(comparison, metric, deviation)
        said.append(f"<h2>{html.escape(_title(comparison, metric))}</h2><table>")
        said.append("<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in header) + "</tr>")
        said += ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        said.append("</table>")
    return "\n".join([*said, *(f"<p>{html.escape(line.strip())}</p>" for line in _closing(comparison))]) + "\n"


def _csv(comparison: Comparison, deviation: bool) -> str:
    """A line for each metric and each line of its table, with all digits."""
    text = io.StringIO()
    rows = [_flat(row) for row in _plain(comparison)["lines"]]
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {key if name == "settings" else f"{name}.{key}": one for key, one in _flat(value).items()}
        else:
            flat[name] = printable(value) if isinstance(value, str) else value
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
    return {"by": list(comparison.keys), "baseline": baseline, "lines": lines, "unfinished": others}


def _estimated(value: Estimate | None) -> dict[str, float | int | None] | None:
    return None if value is None else {"n": value.n, "mean": value.mean, "low": value.low, "high": value.high}


FORMS: Mapping[str, Callable[[Comparison, bool], str]] = {
    "table": _text,
    "md": _markdown,
    "csv": _csv,
    "json": _json,
    "html": _html,
}
