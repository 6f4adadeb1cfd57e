"""Notebook display of a run: one line, or its newest metrics with a small curve."""

from html import escape
from typing import TYPE_CHECKING

from grpo_lightning.console import format_number

if TYPE_CHECKING:
    from grpo_lightning.run import Run

CURVES = ("val/pass@1", "reward/total")
"""The metrics of which a curve is drawn: the first that was measured more than once."""
_WIDTH, _HEIGHT = 240, 60


def describe(run: "Run") -> str:
    """A run in one line: its state, its steps, the newest pass@1, and its directory."""
    module = vars(run).get("module")
    steps, metrics = run.config["steps"], run.metrics
    made = module.completed_steps if module is not None else None
    state = "not loaded" if made is None and not metrics else "finished" if made in (None, steps) else f"step {made}"
    parts = [state, f"{steps} steps"]
    if "val/pass@1" in metrics:
        parts.append(f"pass@1 {format_number(metrics['val/pass@1'], 3)}")
    return f"Run({', '.join(parts)}, {run.directory})"


def to_html(run: "Run") -> str:
    """A run as HTML: `describe`, a curve, and its newest metrics but for times."""
    module = vars(run).get("module")
    curves = {} if module is None else module.curves
    name = next((name for name in CURVES if len(curves.get(name, ())) > 1), None)
    drawing = "" if name is None else f"<p>{escape(name)}<br>{_curve(curves[name])}</p>"
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td>{value:.4g}</td></tr>"
        for key, value in sorted(run.metrics.items())
        if not key.startswith(("time/", "perf/", "varying/"))
    )
    return f"<p><code>{escape(describe(run))}</code></p>{drawing}<table>{rows}</table>"


def _curve(points: list[tuple[int, float]]) -> str:
    """(step, value) pairs as an SVG line from corner to corner."""
    steps, values = zip(*points, strict=True)
    low, spread, length = min(values), max(values) - min(values) or 1.0, max(steps) - min(steps) or 1
    places = " ".join(
        f"{_WIDTH * (step - min(steps)) / length:.1f},{_HEIGHT * (1 - (value - low) / spread):.1f}"
        for step, value in points
    )
    line = f'<polyline points="{places}" fill="none" stroke="currentColor"/>'
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="-2 -2 {_WIDTH + 4} {_HEIGHT + 4}">{line}</svg>'
