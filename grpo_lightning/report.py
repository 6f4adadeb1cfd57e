"""Table and plot of finished runs: ``python -m grpo_lightning.report runs/sweeps/DATE/TIME --plot curve.png``."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def find_runs(directory: Path) -> dict[Path, dict[str, Any]]:
    """The summary of every run at or below ``directory``, by the run's directory.

    Raises:
        ValueError: There is none.
    """
    summaries = {path.parent: json.loads(path.read_text("utf-8")) for path in sorted(directory.rglob("summary.json"))}
    if not summaries:
        raise ValueError(f"{directory}: no summary.json at or below it")
    return summaries


def labels(runs: dict[Path, dict[str, Any]]) -> dict[Path, str]:
    """What tells the runs apart: the overrides that not all of them have, or the directory's name."""
    common = set.intersection(*(set(run["overrides"]) for run in runs.values()))
    return {path: " ".join(o for o in run["overrides"] if o not in common) or path.name for path, run in runs.items()}


def curve(run: Path, metric: str) -> list[tuple[int, float]]:
    """The (step, value) pairs of a scalar, in the order of the steps; empty where it was never written."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    if metric not in events.Tags()["scalars"]:
        return []
    return [(event.step, event.value) for event in events.Scalars(metric)]


def table(runs: dict[Path, dict[str, Any]], metrics: Sequence[str]) -> Table:
    """A table with a row for each run: its label, status, steps and time, and each metric's first and last value."""
    rows = Table("run", "status", "steps", "seconds", *metrics)
    for path, label in labels(runs).items():
        run = runs[path]
        cells = []
        for metric in metrics:
            values = [value for _, value in curve(path, metric)]
            cells.append(f"{values[0]:.3f} → {values[-1]:.3f}" if values else "-")
        rows.add_row(label, run["status"], str(run["steps"]), f"{run['seconds']:.0f}", *cells)
    return rows


def plot(runs: dict[Path, dict[str, Any]], metric: str, file: Path) -> None:
    """Draw a metric of all runs over their steps; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=150)
    for path, label in labels(runs).items():
        points = curve(path, metric)
        axes.plot([step for step, _ in points], [value for _, value in points], marker="o", markersize=3, label=label)
    axes.set(xlabel="rollouts", ylabel=metric)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of the runs at or below a directory, and draw a metric if asked."""
    parser = argparse.ArgumentParser(prog="python -m grpo_lightning.report", description=main.__doc__)
    parser.add_argument("directory", type=Path, help="of a sweep or of one run")
    parser.add_argument("--metrics", nargs="+", default=["val/pass@1", "reward/total"], help="columns of the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the first metric into this picture")
    options = parser.parse_args(arguments)
    runs = find_runs(options.directory)
    Console().print(table(runs, options.metrics))
    if options.plot:
        plot(runs, options.metrics[0], options.plot)


if __name__ == "__main__":
    main()
