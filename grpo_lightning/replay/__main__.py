"""Score recorded rollouts anew, compare the advantages and losses of other settings, or repeat what was logged."""

import argparse
import io
import json
import logging
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lightning import recording
from grpo_lightning.config.redaction import single_line
from grpo_lightning.console import describe_error, log_line, survive_closed_pipes

if TYPE_CHECKING:
    from grpo_lightning.replay.step import Metrics

_MARKS = "*+°"
_PARTS = ("reward", "advantage", "loss", "rollout")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, for the rollouts that a run has recorded, what was logged and what comes out with these settings.

    Overrides are those of train.py, such as reward=[accuracy,length] or algorithm=dr_grpo. Without any, the values that
    were logged come out again.
    """
    parser = argparse.ArgumentParser(prog="python -m grpo_lightning.replay", description=main.__doc__)
    parser.add_argument("directory", type=Path, help="of a run, which has rollouts/ and .hydra/")
    parser.add_argument("overrides", nargs="*", help="settings that are to be others than they were")
    parser.add_argument("--steps", default=":", metavar="FIRST:LAST", help="both included; default: all")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_intermixed_args(arguments)
    logging.basicConfig(format="[%(levelname)s] %(message)s")
    try:
        text = replay(options.directory, options.overrides, steps=options.steps, form=options.format)
    except (ValueError, OSError) as error:
        log_line(describe_error(error))
        sys.exit(1)
    print(text)


def replay(directory: Path, overrides: Sequence[str], *, steps: str = ":", form: str = "table") -> str:
    """What `main` prints.

    Raises:
        ValueError: There are no recorded rollouts, they are damaged, or the settings cannot work.
    """
    place = recording.find_directory(directory)
    known = recording.recorded_steps(place)
    if not known:
        raise ValueError(f"{place} has no recorded rollouts; a run with callbacks=rollouts records them")
    chosen = _chosen(steps, known)
    from grpo_lightning.composition import load_run_config

    run = place.parent if place.name == recording.FOLDER else place
    config, build = load_run_config(run, overrides, _PARTS)
    import torch

    from grpo_lightning.recording.rows import from_lines
    from grpo_lightning.replay.step import replayed

    found = []
    for step in chosen:
        rollout = from_lines(*recording.read(known[step]), torch.device("cpu"))
        found.append(replayed(rollout, config, build))
    return (as_json if form == "json" else as_table)(found, overrides)


def _chosen(steps: str, known: dict[int, Path]) -> list[int]:
    asked = re.fullmatch(r"(\d*)(:?)(\d*)", steps)
    if not asked or steps == "":
        raise ValueError(f"--steps {steps}: allowed is FIRST:LAST, such as 10:50, or one step")
    first, several, last = asked.groups()
    low = int(first or 0)
    high = int(last) if last else low if not several else max(known)
    chosen = [step for step in known if low <= step <= high]
    if not chosen:
        raise ValueError(f"--steps {steps}: recorded are {recording.format_steps(known)}")
    return chosen


def as_table(found: "Sequence[Metrics]", overrides: Sequence[str]) -> str:
    """A table that fits 80 columns, of means over the rollouts, and what is to be said about them."""
    reasons: dict[str, str] = {}
    for one in found:
        reasons |= one.approximate
    marks = {why: _MARKS[number % len(_MARKS)] for number, why in enumerate(dict.fromkeys(reasons.values()))}
    table = Table("metric", box=box.SIMPLE, pad_edge=False)
    for column in ("recorded", "replayed"):
        table.add_column(column, justify="right")
    for name in sorted({name for one in found for name in one.pairs}):
        columns = zip(*(one.pairs[name] for one in found if name in one.pairs), strict=True)
        known = [[value for value in values if value is not None] for values in columns]
        mark = f" {marks[reasons[name]]}" if name in reasons else ""
        table.add_row(Text(single_line(name) + mark), *(f"{fmean(values):.6g}" if values else "-" for values in known))
    several = f"mean of {len(found)} rollouts, steps {found[0].step} to {found[-1].step}"
    lines = [several if len(found) > 1 else f"the rollout of step {found[0].step}"]
    if called := sorted({name for one in found for name in one.called}):
        lines.append(f"computed anew: {', '.join(called)}")
    buffer = io.StringIO()
    Console(file=buffer, width=80, color_system=None, markup=False).print(table)
    lines += [line.rstrip() for line in buffer.getvalue().strip("\n").splitlines()]
    lines += [f"{mark} {why}" for why, mark in marks.items()]
    if not overrides:
        lines.append(_verdict(found))
    return "\n".join(lines)


def _verdict(found: "Sequence[Metrics]") -> str:
    """Whether what was logged came out again, in words."""
    pairs = [pair for one in found for name, pair in one.pairs.items() if name not in one.approximate]
    same = sum(
        then is not None and now is not None and math.isclose(then, now, rel_tol=1e-5, abs_tol=1e-6)
        for then, now in pairs
    )
    if same < len(pairs):
        return f"{len(pairs) - same} of {len(pairs)} values without a mark are not what was logged"
    return f"all {len(pairs)} values without a mark are what was logged, but for rounding"


def as_json(found: "Sequence[Metrics]", overrides: Sequence[str]) -> str:
    """Everything, by rollout."""
    steps = [
        {
            "step": one.step,
            "metrics": {name: {"recorded": then, "replayed": now} for name, (then, now) in one.pairs.items()},
            "approximate": one.approximate,
            "computed_anew": one.called,
        }
        for one in found
    ]
    return json.dumps({"overrides": list(overrides), "steps": steps}, indent=2, allow_nan=False)


if __name__ == "__main__":
    survive_closed_pipes()
    main()
