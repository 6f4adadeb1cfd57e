"""A wrong setting's answer from the shell: without torch, in a sentence, whatever kind of mistake it is."""

import subprocess
import sys

import pytest

from tests.support.composed import ROOT
from tests.support.provocations import provocation

pytestmark = pytest.mark.slow
HEAVY = ("torch", "lightning", "transformers", "datasets", "numpy", "peft", "bitsandbytes", "reasoning_gym")
KINDS = {
    "a number out of range": ["steps=0"],
    "no number": ["optimizer.lr=fast"],
    "settings that contradict one another": ["reference=none"],
    "an argument that a target does not take": ["+loss.kl_coeff=1"],
    "a target that is not there": ["loss.kl._target_=grpo_lightning.loss.k9"],
    "a target that may not be named": ["loss.kl._target_=os.system"],
    "a mistyped choice": ["reward=[accuracy,formt]"],
    "a mistyped key": ["stepps=3"],
    "another project's name": ["num_generations=8"],
    "an option that would end the run": ["+trainer.max_time=00:00:01:00"],
    "an argument of the adapter": ["policy.adapter={bogus: 8}"],
    "a broken regular expression": ["reward=[accuracy,pattern]", "reward.pattern.function.expression='('"],
    "a metric that is never measured": ["sweep_metric=nonsense"],
    "a value that is missing": ["policy=hf"],
}


ANSWERED = "a sentence, in less than 3 s, without torch"


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(words, marks=provocation(f"{kind}: {' '.join(words)}", ANSWERED)) for kind, words in KINDS.items()],
)
def test_a_mistake_is_answered_without_torch(overrides, tmp_path):
    """Without torch, since a time measured beside other tests says little."""
    command = [sys.executable, "-X", "importtime", "train.py", f"hydra.run.dir={tmp_path}/run", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    imported = {line.split("|")[-1].strip().split(".")[0] for line in lines if line.startswith("import time:")}
    said = [line for line in lines if not line.startswith("import time:")]
    said = [line for line in said if line and "HYDRA_FULL_ERROR" not in line]
    assert done.returncode == 1
    assert not imported & {*HEAVY}
    assert "Traceback" not in done.stderr
    assert len(said) in (1, 2), said
    assert overrides[-1].lstrip("+").split("=")[0].split(".")[0] in said[-1]


@provocation("`python train.py --help`", "the parts and settings, without importing torch")
def test_help_needs_no_torch():
    command = [sys.executable, "-X", "importtime", "train.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "| torch" not in done.stderr
    assert "python train.py algorithm=dapo" in done.stdout
