"""Episodes with real engines: the calculator is learned, and a run that was killed learns on."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.support.composed import ROOT


def train(directory, *words, check=True):
    command = [sys.executable, str(ROOT / "train.py"), f"hydra.run.dir={directory}", "trusted=[tests]", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=check, timeout=900)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    directory = tmp_path_factory.mktemp("taught")
    train(directory, "experiment=calculator_taught")
    return directory / "export"


@pytest.mark.parametrize("sampler", ["vllm", "vllm_server"])
def test_a_calculator_is_learned_by_a_run_that_was_killed(sampler, taught, url, tmp_path):
    engine = {
        "vllm": ["sampler.enforce_eager=true", "sampler.kv_cache_gib=0.1"],
        "vllm_server": [f"sampler.url={url}", f"sampler.directory={tmp_path / 'weights'}"],
    }[sampler]
    run = tmp_path / "run"
    words = [f"sampler={sampler}", *engine, "experiment=calculator", f"policy.path={taught}", "steps=20"]
    kill = "+callbacks.kill={_target_: tests.support.killing.Kill, step: 8, moment: update}"
    words.append("callbacks.checkpoint.every=1")
    killed = train(run, *words, kill, check=False)
    assert killed.returncode == -9, killed.stderr[-3000:]
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["step"]["completed"] == 7
    # its first rollout's log-probabilities are compared with recomputed ones
    train(run, *words, "~callbacks.kill", "checkpoint=last")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 20
    assert summary["metrics"]["val/pass@1"] >= 0.95
    assert summary["metrics"]["episode/reply_tokens"] > 1
