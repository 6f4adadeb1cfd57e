"""Notebook display of a run: one line, or its newest metrics."""

from html import escape
from typing import TYPE_CHECKING

from grpo_lightning.console import format_number

if TYPE_CHECKING:
    from grpo_lightning.run import Run


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
    """A run as HTML: `describe`, and its newest metrics but for times."""
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td>{value:.4g}</td></tr>"
        for key, value in sorted(run.metrics.items())
        if not key.startswith(("time/", "perf/", "varying/"))
    )
    return f"<p><code>{escape(describe(run))}</code></p><table>{rows}</table>"
