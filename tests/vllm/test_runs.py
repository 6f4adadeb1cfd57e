"""Whole runs with a real engine: kills, several processes, and learning."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.composed import ROOT

SMALL = [
    *("sampler=vllm", "sampler.enforce_eager=true", "sampler.kv_cache_gib=0.1", "trainer=cpu", "logger=none"),
    *("steps=4", "data.prompts_per_step=4", "rollout.group_size=4", "data.validation_size=8", "validation.every=2"),
    *("validation.samples_per_prompt=2", "validation.ks=[1]", "callbacks.checkpoint.every=1", "~callbacks.rollouts"),
    "trusted=[tests]",
]


def train(directory, *words, check=True, **environment):
    command = [sys.executable, str(ROOT / "train.py"), *SMALL, f"hydra.run.dir={directory}", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=check, timeout=600)


def weights(directory):
    return torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def summary(directory):
    return json.loads((directory / "summary.json").read_text())


def alive(word):
    """Processes whose command or environment names a directory."""
    found = []
    for process in (one for one in os.listdir("/proc") if one.isdigit() and int(one) != os.getpid()):
        try:
            told = b"".join(Path(f"/proc/{process}/{name}").read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue
        if word.encode() in told:
            found.append(int(process))
    return found


def test_a_run_that_was_killed_continues_as_one_that_was_not(tmp_path):
    train(tmp_path / "whole")
    assert summary(tmp_path / "whole")["metrics"]["sampler/weight_version"] == 3
    mark = {"GRPO_TEST_MARK": str(tmp_path / "mark")}
    kill = "+callbacks.kill={_target_: tests.support.killing.Kill, step: 3, moment: rollout}"
    killed = train(tmp_path / "killed", kill, check=False, **mark)
    assert killed.returncode != 0
    time.sleep(1)
    assert alive(str(tmp_path / "mark")) == []  # nothing of the engine is left
    assert torch.load(tmp_path / "killed" / "checkpoints" / "last.ckpt", weights_only=True)["step"]["completed"] == 2
    train(tmp_path / "killed", "~callbacks.kill", "checkpoint=last")
    assert summary(tmp_path / "killed")["steps"] == 4
    for (name, one), other in zip(weights(tmp_path / "whole").items(), weights(tmp_path / "killed").values()):
        assert torch.allclose(one, other, atol=1e-5), name


@pytest.mark.parametrize("words", [[], ["trainer=fsdp"]])
def test_two_processes_make_the_run_of_one(tmp_path, words):
    train(tmp_path / "one", "steps=2")
    train(tmp_path / "two", "steps=2", *words, "trainer.accelerator=cpu", "trainer.devices=2")
    one, two = (summary(tmp_path / name)["metrics"] for name in ("one", "two"))
    for name in ("reward/total", "completion/length_mean", "val/pass@1", "group/mixed"):
        assert two[name] == pytest.approx(one[name], abs=1e-6), name
    assert two["optim/grad_norm"] == pytest.approx(one["optim/grad_norm"], rel=1e-3)
    assert two["sampler/weight_version"] == 1
