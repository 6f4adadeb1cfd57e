"""A comparison as text: for a terminal, as Markdown, CSV or JSON."""

import csv
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lightning.config.redaction import redact, single_line
from grpo_lightning.output.files import no_formula
from grpo_lightning.report.comparison import Comparison, Line
from grpo_lightning.report.records import RunRecord
from grpo_lightning.report.statistics import Estimate

_LINES = box.Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
_ARROW, _STAR = "\u00a0→\u00a0", "\u00a0*"
"""With spaces at which no cell is broken."""


def write(comparison: Comparison, form: str) -> str:
    """The comparison in one of `FORMS`."""
    return redact(FORMS[form](comparison).replace("\u00a0", " "))


def number(value: float | None) -> str:
    """Four digits at most of what is neither large nor tiny."""
    if value is None:
        return "-"
    size = abs(value)
    if value == 0 or 0.1 <= size < 1000:
        return f"{value:.3f}"
    return f"{value:.0f}" if 1000 <= size < 1e7 else f"{value:.4f}" if 0.001 <= size < 1 else f"{value:.2g}"


def _mean(value: Estimate | None) -> str:
    return number(value.mean if value else None)


def _interval(value: Estimate) -> str:
    return "-" if value.low is None else f"[{number(value.low)}, {number(value.high)}]"


def _grids(comparison: Comparison) -> Iterator[tuple[str, list[list[str]]]]:
    """The title and the rows, of which the first is the header, of two tables for each metric.

    The first has its values, the second how far they are from the baseline's, if there is one.
    """
    for metric, lines in comparison.lines.items():
        more = [f"at {step}" for step in comparison.at] + ["sd"] * comparison.deviation
        header = [*comparison.keys, "n", f"first{_ARROW}last", "95 % of last", "mean", "highest", *more]
        title = f"{metric} by {', '.join(comparison.keys)}"
        yield title, [header, *(_values(line, comparison) for line in lines)]
        if comparison.baseline:
            header = [*comparison.keys, "n", "difference", "95 % of it"]
            title = f"{metric}, last value less that of {'='.join(comparison.baseline)} with the same seed"
            yield title, [header, *(_differences(line) for line in lines if not line.is_baseline)]


def _values(line: Line, comparison: Comparison) -> list[str]:
    first, last, curve = line.estimate("first"), line.last, line.curve
    course = (f"{_mean(first)}{_ARROW}" if first else "") + _mean(last) + _STAR * line.is_best
    more = [_mean(curve.get(step)) for step in comparison.at]
    more += [_mean(line.estimate("deviation"))] * comparison.deviation
    highest = number(line.extreme("high"))
    return [*line.settings, str(last.n), course, _interval(last), _mean(line.estimate("mean")), highest, *more]


def _differences(line: Line) -> list[str]:
    if line.difference is None:
        return [*line.settings, "0", "-", "-"]
    sign = "+" if line.difference.mean > 0 else ""
    return [*line.settings, str(line.difference.n), f"{sign}{_mean(line.difference)}", _interval(line.difference)]


def _closing(comparison: Comparison) -> list[str]:
    """What stands below the tables: the best line of each metric, the runs that no number is of, and notes."""
    said = []
    for metric, lines in comparison.lines.items():
        for line in (line for line in lines if line.is_best):
            ends = "" if line.last.low is None else f" {_interval(line.last)}"
            said.append(f"* best {metric}: {comparison.label(line.settings)} with {_mean(line.last)}{ends}")
    said += comparison.notes
    if comparison.others:
        said.append(f"{len(comparison.others)} of {len(comparison.runs)} runs without a result:")
        for run in comparison.others:
            said.append(f"  {_name(run, comparison)}: {', '.join(filter(None, (run.status, run.reason)))}")
    if ailing := [run for run in comparison.runs if run.findings]:
        said.append(f"the doctor has findings in {len(ailing)} of {len(comparison.runs)} runs, see health.json there:")
        said += [f"  {_name(run, comparison)}: {', '.join(run.findings)}" for run in ailing]
    return [_shown(line) for line in said]


def _name(run: RunRecord, comparison: Comparison) -> str:
    common = set.intersection(*(set(other.overrides) for other in comparison.runs))
    words = " ".join(word for word in run.overrides if word not in common)
    return f"{run.directory}{f' ({words})' if words else ''}"


def _shown(text: str) -> str:
    """A text in one line without secrets, which could no longer be told once it is folded."""
    return redact(single_line(text))


def _text(comparison: Comparison) -> str:
    text = io.StringIO()
    width = shutil.get_terminal_size().columns  # 80 where the output is no terminal
    console = Console(file=text, width=width, markup=False, highlight=False, emoji=False)
    for title, (header, *rows) in _grids(comparison):
        console.print(Text(_shown(title)), overflow="fold")
        table = Table(box=_LINES, padding=(0, 1, 0, 0), pad_edge=False)
        for place, name in enumerate(map(_shown, header)):
            is_key = place < len(comparison.keys)
            folded = Text(name.replace(".", ".\n") if is_key and len(name) > 16 else name)
            table.add_column(folded, overflow="fold", justify="left" if is_key else "right")
        for row in rows:
            table.add_row(*(Text(_shown(cell)) for cell in row))
        console.print(table)
    for line in _closing(comparison):
        console.print(Text(line), overflow="ignore", crop=False)  # paths stay whole, to be copied
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _markdown(comparison: Comparison) -> str:
    said = []
    for title, (header, *rows) in _grids(comparison):
        listed = (header, ["---"] * len(header), *rows)
        said += [f"**{_piped(title)}**\n", *("| " + " | ".join(map(_piped, row)) + " |" for row in listed), ""]
    closing = (f"- {_piped(' '.join(line.split()))}" for line in _closing(comparison))
    return "\n".join([*said, *closing]) + "\n"


def _piped(cell: str) -> str:
    return re.sub(r"([\\|*]|(?<=\])\()", r"\\\1", _shown(cell)).replace("<", "&lt;")


def _plain(comparison: Comparison) -> dict[str, Any]:
    """Everything with all digits."""

    def plain(value: Estimate | None) -> dict[str, Any] | None:
        return asdict(value) if value else None

    lines = [
        {
            "metric": metric,
            "settings": dict(zip(comparison.keys, line.settings, strict=True)),
            "n": line.last.n,
            "first": plain(line.estimate("first")),
            "last": plain(line.last),
            "mean": plain(line.estimate("mean")),
            "deviation": plain(line.estimate("deviation")),
            "lowest": line.extreme("low"),
            "highest": line.extreme("high"),
            "at": {str(step): plain(line.curve.get(step)) for step in comparison.at},
            **({"difference": plain(line.difference)} if comparison.baseline else {}),
            "best": line.is_best,
            "seeds": {seed: one.last for seed, one in line.by_seed.items()},
        }
        for metric, found in comparison.lines.items()
        for line in found
    ]
    return {
        "by": list(comparison.keys),
        "baseline": "=".join(comparison.baseline) if comparison.baseline else None,
        "lines": lines,
        "unfinished": [
            {"directory": str(run.directory), "overrides": run.overrides, "status": run.status, "reason": run.reason}
            for run in comparison.others
        ],
        "ailing": [{"directory": str(o.directory), "findings": o.findings} for o in comparison.runs if o.findings],
    }


def _json(comparison: Comparison) -> str:
    return json.dumps(_plain(comparison), indent=2, allow_nan=False) + "\n"


def _csv(comparison: Comparison) -> str:
    """A line for each metric and each line of its table, with all digits."""
    text = io.StringIO()
    rows = [_flat(line.pop("settings") | line) for line in _plain(comparison)["lines"]]
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flat({f"{name}.{key}": one for key, one in value.items()})
        else:
            flat[no_formula(single_line(name))] = no_formula(single_line(value) if isinstance(value, str) else value)
    return flat


FORMS: Mapping[str, Callable[[Comparison], str]] = {"table": _text, "md": _markdown, "csv": _csv, "json": _json}
