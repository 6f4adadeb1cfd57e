"""The benchmarks run."""

import os
import subprocess
import sys

import pytest

from benchmarks.measure import ratio
from tests.support.composed import ROOT


def test_ratios_of_neighbours():
    assert ratio([4.0], [2.0]) == {"ratio": 2.0, "quartiles": [2.0, 2.0], "steps": 1}
    found = ratio([2.0, 6.0, 3.0], [2.0, 3.0, 1.0])
    assert (found["ratio"], found["quartiles"]) == (2.0, [1.0, 3.0])


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
