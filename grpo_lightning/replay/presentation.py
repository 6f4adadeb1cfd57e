"""What was logged and what comes out now, side by side: a table for people, JSON and CSV for programs."""

import csv
import io
import json
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lightning.output.files import no_formula
from grpo_lightning.output.terminal import one_line
from grpo_lightning.replay.step import Metrics

_MARKS = "*+°"


def _names(found: Sequence[Metrics]) -> list[str]:
    return sorted({name for one in found for name in (*one.recorded, *one.replayed)})


def as_table(found: Sequence[Metrics], overrides: Sequence[str]) -> str:
    """A table that fits 80 columns, of means over the rollouts, and what is to be said about them."""
    reasons: dict[str, str] = {}
    for one in found:
        reasons |= one.approximate
    marks = {why: _MARKS[number % len(_MARKS)] for number, why in enumerate(dict.fromkeys(reasons.values()))}
    several = f"mean of {len(found)} rollouts, steps {found[0].step} to {found[-1].step}"
    table = Table("metric", box=box.SIMPLE, caption=None, pad_edge=False)
    for column in ("recorded", "replayed"):
        table.add_column(column, justify="right")
    for name in _names(found):
        cells = [_mean([one.recorded.get(name) for one in found]), _mean([one.replayed.get(name) for one in found])]
        shown = ["-" if value is None else f"{value:.6g}" for value in cells]
        told = one_line(name)
        table.add_row(Text(f"{told} {marks[reasons[name]]}" if name in reasons else told), *shown)
    lines = [several if len(found) > 1 else f"the rollout of step {found[0].step}"]
    if called := sorted({name for one in found for name in one.called}):
        lines.append(f"computed anew: {', '.join(called)}")
    buffer = io.StringIO()
    Console(file=buffer, width=80, color_system=None, markup=False).print(table)
    lines.append("\n".join(line.rstrip() for line in buffer.getvalue().strip("\n").splitlines()))
    lines += [f"{mark} {why}" for why, mark in marks.items()]
    if not overrides:
        lines.append(_verdict(found))
    return "\n".join(lines)


def _verdict(found: Sequence[Metrics]) -> str:
    """Whether what was logged came out again, in words."""
    pairs = [
        (one.recorded.get(name), one.replayed.get(name))
        for one in found
        for name in {*one.recorded, *one.replayed} - one.approximate.keys()
    ]
    if all(then == now for then, now in pairs):
        return f"all {len(pairs)} values without a mark are what was logged, bit for bit"
    gaps = [abs(then - now) for then, now in pairs if then is not None and now is not None]
    other = sum(then != now for then, now in pairs)
    return f"{other} of {len(pairs)} values without a mark are not what was logged, by up to {max(gaps):.2g}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def as_json(found: Sequence[Metrics], overrides: Sequence[str]) -> str:
    """Everything, by rollout."""
    steps = [
        {
            "step": one.step,
            "metrics": {
                name: {"recorded": one.recorded.get(name), "replayed": one.replayed.get(name)} for name in _names([one])
            },
            "approximate": one.approximate,
            "computed_anew": one.called,
        }
        for one in found
    ]
    return json.dumps({"overrides": list(overrides), "steps": steps}, indent=2, allow_nan=False)


def as_csv(found: Sequence[Metrics], overrides: Sequence[str]) -> str:
    """A line for each metric of each rollout."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(["step", "metric", "recorded", "replayed"])
    for one in found:
        for name in _names([one]):
            writer.writerow(
                [
                    one.step,
                    no_formula(one_line(name)),
                    *("" if v is None else v for v in (one.recorded.get(name), one.replayed.get(name))),
                ]
            )
    return buffer.getvalue().rstrip("\n")


FORMS = {"table": as_table, "json": as_json, "csv": as_csv}
"""Name of a format -> (metrics of each rollout, overrides) -> text."""
