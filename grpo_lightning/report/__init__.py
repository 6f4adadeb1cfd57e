"""What runs have come to: tables, intervals over seeds, differences from a baseline, and curves.

``python -m grpo_lightning.report DIR`` prints it; here is what it is made of.
"""

from grpo_lightning.report.command import main
from grpo_lightning.report.curves import curve
from grpo_lightning.report.records import ReportError, RunRecord, find_runs
from grpo_lightning.report.statistics import Estimate, estimate

__all__ = ["Estimate", "ReportError", "RunRecord", "curve", "estimate", "find_runs", "main"]
