"""Command line of the replay: ``python -m grpo_lightning.replay DIR [overrides…]``."""

import argparse
import json
import logging
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch

from grpo_lightning import recording
from grpo_lightning.composition import load_run_config
from grpo_lightning.console import describe_error, log_line, single_line, survive_closed_pipes
from grpo_lightning.recording import from_lines
from grpo_lightning.replay import PARTS, ReplayedMetrics, replay_rollout

_MARKS = "*+°"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print metrics of the rollouts that a run has recorded, as logged and as they are with these settings.

    Overrides are those of train.py, such as reward=[accuracy,length] or algorithm=dr_grpo. Without any, the logged
    values come out again.
    """
    survive_closed_pipes()
    parser = argparse.ArgumentParser(prog="python -m grpo_lightning.replay", description=main.__doc__)
    parser.add_argument("directory", type=Path, help="of a run, which has rollouts/ and .hydra/")
    parser.add_argument("overrides", nargs="*", help="settings that differ from the run's")
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
    files = recording.recorded_steps(place)
    if not files:
        raise ValueError(f"{place} has no recorded rollouts; a run with callbacks=rollouts records them")
    selected = _select(steps, files)
    run = place.parent if place.name == recording.FOLDER else place
    config, build = load_run_config(run, overrides, PARTS)
    replays = [
        replay_rollout(from_lines(*recording.read(files[step]), torch.device("cpu")), config, build)
        for step in selected
    ]
    return (as_json if form == "json" else as_table)(replays, overrides)


def _select(steps: str, files: Mapping[int, Path]) -> list[int]:
    match = re.fullmatch(r"(\d*)(:?)(\d*)", steps)
    if not match or not steps:
        raise ValueError(f"--steps {steps}: needs FIRST:LAST, such as 10:50, or one step")
    first = int(match[1] or 0)
    last = int(match[3]) if match[3] else max(files) if match[2] else first
    selected = [step for step in files if first <= step <= last]
    if not selected:
        raise ValueError(f"--steps {steps}: recorded are {recording.format_steps(files)}")
    return selected


def as_table(replays: Sequence[ReplayedMetrics], overrides: Sequence[str]) -> str:
    """A table within 80 columns, of means over the rollouts, and what they do not tell."""
    reasons: dict[str, str] = {}
    for replayed in replays:
        reasons |= replayed.approximate
    marks = {why: _MARKS[number % len(_MARKS)] for number, why in enumerate(dict.fromkeys(reasons.values()))}
    steps = f"mean of {len(replays)} rollouts, steps {replays[0].step} to {replays[-1].step}"
    lines = [steps if len(replays) > 1 else f"the rollout of step {replays[0].step}"]
    if called := sorted({name for replayed in replays for name in replayed.called}):
        lines.append(f"computed again: {', '.join(called)}")
    lines += ["", f"{'metric':40} {'recorded':>14} {'replayed':>14}", "─" * 70]
    for name in sorted({name for replayed in replays for name in replayed.metrics}):
        columns = zip(*(replayed.metrics[name] for replayed in replays if name in replayed.metrics), strict=True)
        known = [[value for value in values if value is not None] for values in columns]
        label = single_line(name) + (f" {marks[reasons[name]]}" if name in reasons else "")
        lines.append(f"{label:40} " + " ".join(f"{f'{fmean(v):.6g}' if v else '-':>14}" for v in known))
    lines += ["", *(f"{mark} {why}" for why, mark in marks.items())]
    if not overrides:
        lines.append(_verdict(replays))
    return "\n".join(lines)


def _verdict(replays: Sequence[ReplayedMetrics]) -> str:
    """Whether the logged values came out again, but for those with a mark."""
    pairs = [pair for one in replays for name, pair in one.metrics.items() if name not in one.approximate]
    same = sum(
        logged is not None and now is not None and math.isclose(logged, now, rel_tol=1e-5, abs_tol=1e-6)
        for logged, now in pairs
    )
    if same < len(pairs):
        return f"{len(pairs) - same} of {len(pairs)} values without a mark differ from those logged"
    return f"all {len(pairs)} values without a mark equal those logged, up to rounding"


def as_json(replays: Sequence[ReplayedMetrics], overrides: Sequence[str]) -> str:
    """Everything, by rollout."""
    steps = [
        {
            "step": replayed.step,
            "metrics": {name: {"recorded": old, "replayed": new} for name, (old, new) in replayed.metrics.items()},
            "approximate": replayed.approximate,
            "computed_again": replayed.called,
        }
        for replayed in replays
    ]
    return json.dumps({"overrides": list(overrides), "steps": steps}, indent=2, allow_nan=False)


if __name__ == "__main__":
    main()
