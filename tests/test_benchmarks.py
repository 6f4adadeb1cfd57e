"""The benchmarks run."""

import os
import subprocess
import sys

import pytest

from tests.support.composed import ROOT


@pytest.mark.slow
def test_every_benchmark_takes_a_step_also_against_another_checkout(tmp_path):
    names = ["compare", "rollout", "head", "learning", "memory", "episodes", "gpu"]
    for words in (names, ["rollout", "--against", str(ROOT)]):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", *words, "--smoke", "--out", str(tmp_path / "figures.json")],
            cwd=ROOT,
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert (tmp_path / "figures.json").exists()
