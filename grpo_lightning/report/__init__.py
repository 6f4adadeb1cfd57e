"""Report on runs: tables with confidence intervals over seeds, differences from a baseline, and curves.

``python -m grpo_lightning.report DIR`` prints it.
"""

from grpo_lightning.report.comparison import Estimate, compare, estimate
from grpo_lightning.report.runs import ReportError, RunRecord, curve, find_runs
from grpo_lightning.report.table import render

__all__ = ["Estimate", "ReportError", "RunRecord", "compare", "curve", "estimate", "find_runs", "render"]
