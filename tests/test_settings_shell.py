"""A wrong setting's answer from the shell: without torch, in a sentence, whatever kind of mistake it is."""

import subprocess
import sys

import pytest

from tests.support.composed import ROOT

pytestmark = pytest.mark.slow
HEAVY = ("torch", "lightning", "transformers", "datasets", "numpy", "peft", "bitsandbytes", "reasoning_gym")
WRONG = (
    "steps=0",
    "optimizer.lr=fast",
    "reference=none",
    "loss.kl._target_=os.system",
    "reward=[accuracy,formt]",
    "stepps=3",
    "num_generations=8",
    "+trainer.max_time=00:00:01:00",
    "sweep_metric=nonsense",
    "policy=hf",
)


def test_a_mistake_is_answered_without_torch(tmp_path):
    """Without torch, since a time measured beside other tests says little."""
    for override in WRONG:
        command = [sys.executable, "-X", "importtime", "train.py", f"hydra.run.dir={tmp_path}/run", override]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        lines = done.stderr.splitlines()
        imported = {line.split("|")[-1].strip().split(".")[0] for line in lines if line.startswith("import time:")}
        said = [line for line in lines if not line.startswith("import time:")]
        assert done.returncode == 1, override
        assert not imported & {*HEAVY}, override
        assert "Traceback" not in done.stderr, override
        assert len(said) in (1, 2), said
        assert override.lstrip("+").split("=")[0].split(".")[0] in said[-1]


def test_help_needs_no_torch():
    command = [sys.executable, "-X", "importtime", "train.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "| torch" not in done.stderr
    assert "python train.py algorithm=dapo" in done.stdout
