"""The default task as a user trains it: a run of ``train.py`` from start to end, and its continuation."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.progress import keep, seconds_left
from benchmarks.gpu.tools import device
from benchmarks.process import ROOT

STEPS, MORE, LEAST = 40, 2, 0.8
_RESERVE = 4.0
"""Seconds before its end in which a stage can still say what a run said."""


def trained(directory: Path, *settings: str) -> dict[str, Any]:
    """The summary of a run, with its seconds from the outside.

    Raises:
        RuntimeError: It ended otherwise than well, or not in time; the end of what it said.
    """
    started, command = time.perf_counter(), ["train.py", *settings, f"hydra.run.dir={directory}"]
    with tempfile.TemporaryFile() as said:  # a pipe would stay open as long as any process of the run
        try:
            status = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=min(3600.0, max(1.0, seconds_left() - _RESERVE)),
            ).returncode
        except subprocess.TimeoutExpired as late:
            status = f"nothing yet after {late.timeout:.0f} s"
        said.seek(max(0, said.seek(0, os.SEEK_END) - 1500))
        text = said.read().decode(errors="replace")
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with {status}: {text}")
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return {
        "status": summary["status"],
        "steps": summary["steps"],
        "metrics": summary["metrics"],
        "seconds": time.perf_counter() - started,
    }


def run(reduced: bool) -> dict[str, Any]:
    """The run and its continuation; reduced, one of two small steps."""
    steps, more = (2, 1) if reduced else (STEPS, MORE)
    settings = [f"trainer={'gpu' if device().type == 'cuda' else 'cpu'}"]
    if reduced:
        settings += ["data.prompts_per_step=2", "data.validation_size=4", "rollout.group_size=4"]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        first = trained(directory, *settings, f"steps={steps}")
        passed_at = first["metrics"]["val/pass@1"]
        keep(first=first, main=f"pass@1 {passed_at:.2f} after {steps} steps in {first['seconds']:.0f} s")
        second = trained(directory, *settings, f"steps={steps + more}", "checkpoint=last")
    goes_on = second["status"] == "finished" and second["steps"] == steps + more
    return {
        "passed": first["status"] == "finished" and goes_on and (reduced or passed_at > LEAST),
        "main": f"pass@1 {passed_at:.2f} after {steps} steps in {first['seconds']:.0f} s, "
        f"{'continued' if goes_on else 'not continued'} to {second['steps']}",
        "judged": not reduced,
        "second": second,
    }
