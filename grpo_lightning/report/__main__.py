"""Command line of the report: ``python -m grpo_lightning.report DIR``."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.console import redact, single_line
from grpo_lightning.report import DEFAULT_METRICS, Comparison, compare, find_runs
from grpo_lightning.report.table import FORMATS


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the comparison of the runs below some directories; exits with a sentence where there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_lightning.report",
        description="Compare runs: a line for each value of what was swept, averaged over seeds.",
    )
    add = parser.add_argument
    add("directories", type=Path, nargs="+", metavar="DIR", help="of sweeps or of single runs")
    add("--by", nargs="+", default=[], metavar="KEY", help="keys of the lines; default: swept keys")
    names = ", ".join(DEFAULT_METRICS)
    add("--metric", "--metrics", nargs="+", default=[], dest="metrics", metavar="NAME", help=f"default: {names}")
    add("--at", nargs="+", type=int, default=[], metavar="STEP", help="also the values at these steps")
    add("--baseline", metavar="KEY=VALUE", help="also the paired differences from these runs")
    add("--format", choices=list(FORMATS), default="table")
    add("--plot", type=Path, metavar="FILE", help="draw curves into this picture (needs matplotlib)")
    options = vars(parser.parse_args(arguments))
    directories, form, picture = (options.pop(name) for name in ("directories", "format", "plot"))
    try:
        comparison = compare(find_runs(*directories), **options, curves=bool(picture))
        if picture:
            plot(comparison, picture)
    except (ValueError, OSError) as error:
        sys.exit(redact(single_line(str(error))))
    print(FORMATS[form](comparison), end="")


def plot(comparison: Comparison, file: Path) -> None:
    """Draw one panel per metric into a picture whose format is the file's ending."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError("--plot needs matplotlib: pip install 'grpo-lightning[plot]'") from None
    panels = len(comparison.lines)
    figure = Figure(figsize=(7, 0.6 + 3 * panels), dpi=150, layout="tight")
    grid = figure.subplots(panels, squeeze=False, sharex=True)
    for axes, (metric, lines) in zip(grid[:, 0], comparison.lines.items(), strict=True):
        for line in lines:
            label = single_line(line.label).replace("$", r"\$")  # no formula
            [drawn] = axes.plot(list(line.curve), [value.mean for value in line.curve.values()], label=label)
            if band := [(step, value.low, value.high) for step, value in line.curve.items() if value.low is not None]:
                axes.fill_between(*zip(*band, strict=True), color=drawn.get_color(), alpha=0.2, linewidth=0)
        axes.set(ylabel=metric)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
    grid[-1, 0].set(xlabel="rollouts")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head ends it
    main()
