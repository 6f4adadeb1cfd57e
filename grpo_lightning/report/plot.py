"""Curves of a comparison: means over seeds, with a band for their interval."""

import io
from pathlib import Path

from grpo_lightning import start
from grpo_lightning.output.files import replace
from grpo_lightning.output.terminal import one_line
from grpo_lightning.report.comparison import Comparison, Line
from grpo_lightning.report.records import ReportError
from grpo_lightning.report.statistics import Estimate, estimate

_PICTURES = (".jpg", ".pdf", ".png", ".svg")
"""Endings of pictures; matplotlib would hand the texts of others to TeX, which runs what stands in them."""


def plot(comparison: Comparison, file: Path) -> None:
    """Draw one panel for each metric into a picture, whose kind the file's ending says.

    Raises:
        ReportError: matplotlib is not installed, the ending is unknown, or the picture cannot be written.
    """
    if file.suffix.lower() not in _PICTURES:
        raise ReportError(f"--plot={file}: allowed are names that end in {', '.join(_PICTURES)}")
    start.pass_by_settings()
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ReportError("--plot needs matplotlib: pip install 'grpo-lightning[plot]'") from None
    matplotlib.use("Agg")
    # A dollar in a setting begins no formula, and no text goes to TeX, whatever the user's matplotlibrc says.
    matplotlib.rcParams.update({"text.parse_math": False, "text.usetex": False})
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
        drawing = io.BytesIO()
        figure.savefig(drawing, format=file.suffix.removeprefix(".").lower())
        replace(file, drawing.getvalue())  # not through a link that may lie there
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
