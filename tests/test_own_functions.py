"""Functions in a file of the current directory are found, wherever train.py is, in worker processes too."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.composed import ROOT
from tests.support.running import SMALL

REWARDS = """import my_words


def here(completions, **columns):
    return [float(my_words.count(text)) for text in completions]
"""
OWN = ("reward=[custom]", "reward.custom.function._target_=my_rewards.here", "steps=1")


@pytest.mark.slow
def test_a_file_of_the_current_directory_is_found(tmp_path):
    words = ["seed=0,1", "reward.custom.timeout=30", "hydra.sweep.dir=sweep"]
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "my_words.py").write_text("def count(text):\n    return len(text.split())\n")
    small = [word for word in SMALL if not word.startswith(("reward", "steps"))]
    command = [sys.executable, str(ROOT / "train.py"), "-m", *small, *OWN, *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for run in ("sweep/seed=0", "sweep/seed=1"):
        summary = json.loads((tmp_path / run / "summary.json").read_text())
        assert summary["status"] == "finished"
        assert summary["metrics"]["reward/custom"] > 0
        assert summary["metrics"].get("failure/custom", 0) == 0
