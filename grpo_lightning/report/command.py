"""The command line of the report."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.config.redaction import redact, single_line
from grpo_lightning.output.terminal import last_through_closed_pipes
from grpo_lightning.report.comparison import DEFAULT_METRICS, Comparison, compare
from grpo_lightning.report.records import ReportError, RunRecord, find_runs
from grpo_lightning.report.table import FORMS, write


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the runs below some directories: each metric by what their settings differ in, averaged over seeds.

    Raises:
        SystemExit: There is nothing to compare; its text is one sentence.
    """
    last_through_closed_pipes()
    parser = argparse.ArgumentParser(
        prog="python -m grpo_lightning.report",
        description="Compare runs: a line for each value of what was swept, averaged over seeds.",
    )
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="of sweeps or of single runs")
    parser.add_argument(
        "--by", nargs="+", default=[], metavar="KEY", help="what lines differ in; else what was swept, but the seed"
    )
    parser.add_argument(
        "--metric", "--metrics", nargs="+", default=[], metavar="NAME", help=f"else {' and '.join(DEFAULT_METRICS)}"
    )
    parser.add_argument("--at", nargs="+", type=int, default=[], metavar="STEP", help="also the values at these steps")
    parser.add_argument(
        "--baseline", metavar="KEY=VALUE", help="also the differences from these runs, over the seeds of both"
    )
    parser.add_argument("--deviation", action="store_true", help="also the standard deviation over a run's steps")
    parser.add_argument("--format", choices=list(FORMS), default="table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw curves into this picture: needs matplotlib")
    options = parser.parse_args(arguments)
    try:
        comparison = compare(
            find_runs(*options.directories),
            by=options.by,
            metrics=options.metric,
            at=options.at,
            deviation=options.deviation,
            baseline=options.baseline,
            with_points=bool(options.plot),
        )
        if options.plot:
            plot(comparison, options.plot)
    except ReportError as error:
        sys.exit(redact(single_line(str(error))))
    print(write(comparison, options.format), end="")


def of_sweep(runs: Sequence[RunRecord], metric: str) -> str:
    """The table of a sweep's jobs: the metric that it maximizes, and the mean reward, as far as they were measured."""
    told = {name for run in runs for name in run.summary.get("metrics") or ()}
    wanted = [name for name in dict.fromkeys((metric, *DEFAULT_METRICS[1:])) if name in told]
    return write(compare(runs, metrics=wanted), "table")


def plot(comparison: Comparison, file: Path) -> None:
    """Draw one panel for each metric into a picture, whose kind the file's ending says.

    Raises:
        ReportError: matplotlib is not installed, does not know the ending, or the picture cannot be written.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ReportError("--plot needs matplotlib: pip install 'grpo-lightning[plot]'") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # a dollar in a setting begins no formula
    from matplotlib import pyplot

    panels = len(comparison.lines)
    figure, grid = pyplot.subplots(panels, figsize=(7, 0.6 + 3 * panels), dpi=150, squeeze=False, sharex=True)
    for axes, (metric, lines) in zip(grid[:, 0], comparison.lines.items(), strict=True):
        for line in lines:
            curve, label = line.curve, single_line(comparison.label(line.settings))
            [drawn] = axes.plot(list(curve), [one.mean for one in curve.values()], label=label)
            banded = [(step, one.low, one.high) for step, one in curve.items() if one.low is not None]
            if banded:
                axes.fill_between(*zip(*banded, strict=True), color=drawn.get_color(), alpha=0.2, linewidth=0)
        axes.set(ylabel=metric)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if lines:
            axes.legend(frameon=False, fontsize="small")
    grid[-1, 0].set(xlabel="rollouts")
    figure.tight_layout()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ReportError(f"--plot={file}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        pyplot.close(figure)
