"""Command line of the report: ``python -m grpo_lightning.report DIR``."""

import argparse
import math
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
    """Draw one panel per metric into a picture whose format is the file's ending; a line has one color in all."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError("--plot needs matplotlib: pip install 'grpo-lightning[plot]'") from None
    for metric, lines in comparison.lines.items():
        if not any(line.curve for line in lines):
            raise ValueError(f"--plot: no run has a curve of {metric}: these are kept by logger=tensorboard or csv")
    labels = list(dict.fromkeys(line.label for lines in comparison.lines.values() for line in lines))
    columns = 1 if len(comparison.lines) < 4 else 2
    rows = math.ceil(len(comparison.lines) / columns)
    figure = Figure(figsize=(7 * columns, 0.8 + 3 * rows + 0.2 * len(labels)), dpi=150, layout="constrained")
    drawn = {}
    for number, (metric, lines) in enumerate(comparison.lines.items(), 1):
        axes = figure.add_subplot(rows, columns, number, sharex=figure.axes[0] if figure.axes else None)
        for line in lines:
            color = f"C{labels.index(line.label)}"
            label = single_line(line.label).replace("$", r"\$")  # no formula
            [drawn[label]] = axes.plot(list(line.curve), [value.mean for value in line.curve.values()], color=color)
            if band := [(step, value.low, value.high) for step, value in line.curve.items() if value.low is not None]:
                steps, low, high = zip(*band, strict=True)
                axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        axes.set(xlabel="rollouts", ylabel=metric)
        axes.grid(alpha=0.3)
    title = "mean over seeds, and its 95 % interval"
    figure.legend(drawn.values(), drawn, loc="outside lower center", title=title, frameon=False, fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head ends it
    main()
