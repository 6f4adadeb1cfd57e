"""Curves of a comparison: means over seeds, with a band for their interval."""

from pathlib import Path

from grpo_lightning.output.terminal import one_line
from grpo_lightning.report.comparison import Comparison, Line
from grpo_lightning.report.records import ReportError
from grpo_lightning.report.statistics import Estimate, estimate


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
            points = mean_curve(line)
            steps = [step for step, _ in points]
            [drawn] = axes.plot(steps, [one.mean for _, one in points], label=one_line(comparison.label(line.settings)))
            banded = [(step, one.low, one.high) for step, one in points if one.low is not None]
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


def mean_curve(line: Line) -> list[tuple[int, Estimate]]:
    """Step -> the estimate over the seeds that have a value there."""
    values: dict[int, list[float]] = {}
    for one in line.by_seed.values():
        for step, value in one.points or ():
            values.setdefault(step, []).append(value)
    return [(step, estimate(found)) for step, found in sorted(values.items())]
