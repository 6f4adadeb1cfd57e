"""train.py as users start it: real processes, real kills, real files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.kills import difference, main
from tests.support import prepared
from tests.support.board import scalars
from tests.support.composed import ROOT
from tests.support.running import SMALL

STEPS = ("steps=8", "validation.every=3", "callbacks.checkpoint.every=2", "optimizer.lr=0.01")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def train(*words: str, small: tuple[str, ...] = SMALL) -> subprocess.CompletedProcess[str]:
    done = prepared.run(["train.py", *small, *words], cwd=ROOT, env=ENVIRONMENT, timeout=600)
    if done.returncode == 0 and "mode=" not in " ".join(words):
        [place] = [word.partition("=")[2] for word in words if word.startswith("hydra.run.dir=")]
        assert summary(Path(place))["status"] == "finished"
    return done


def summary(directory: Path, name: str = "summary") -> dict:
    return json.loads((directory / f"{name}.json").read_text())


def weights(directory: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return torch.load(directory / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"]


def asked(directory: Path) -> dict[int, list[str]]:
    """Step -> prompts; of a step that ran twice, the second time."""
    return dict(json.loads(line) for line in (directory / "asked.jsonl").read_text().splitlines())


def into(directory: Path) -> tuple[str, ...]:
    return (
        f"hydra.run.dir={directory}",
        f"+callbacks.asked={{_target_: tests.support.killing.Asked, path: {directory}/asked.jsonl}}",
    )


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("unbroken")
    result = train(*STEPS, *into(directory))
    assert result.returncode == 0, result.stderr[-3000:]
    return directory


def same_as_unbroken(directory: Path, unbroken: Path) -> None:
    assert difference(weights(unbroken), weights(directory)) is None
    assert asked(directory) == asked(unbroken)
    ours, theirs = scalars(directory / "tensorboard"), scalars(unbroken / "tensorboard")
    assert ours.keys() == theirs.keys()
    for tag, values in ours.items():
        assert [step for step, _ in values] == [step for step, _ in theirs[tag]], tag  # none twice, none missing
        if not tag.startswith(("time/", "perf/")):
            assert values == theirs[tag], tag


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment, step, number",
    [("validation", 4, 9), ("update", 8, 9), ("rollout", 6, 15)],
    ids=["on an epoch border", "in the last update", "by SIGTERM"],
)
def test_a_killed_run_continues_exactly(moment, step, number, unbroken, tmp_path):
    kill = f"step: {step}, moment: {moment}, signal_number: {number}"
    killed = train(*STEPS, *into(tmp_path), f"+callbacks.kill={{_target_: tests.support.killing.Kill, {kill}}}")
    assert killed.returncode == (-9 if number == 9 else 143), killed.stderr[-3000:]
    if number == 9:
        assert not (tmp_path / "summary.json").exists()
    else:  # the last complete step is saved
        assert (summary(tmp_path)["status"], summary(tmp_path)["steps"]) == ("preempted", step - 1)
        assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["step"]["completed"] == step - 1
    resumed = train(f"hydra.run.dir={tmp_path}", "checkpoint=last", "~callbacks.kill", small=())
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "settings that have changed" not in resumed.stderr
    assert summary(tmp_path)["steps"] == 8
    same_as_unbroken(tmp_path, unbroken)


@pytest.mark.slow
def test_the_export_is_the_checkpoint_and_validates_alike(unbroken, tmp_path):
    model, again = (AutoModelForCausalLM.from_pretrained(unbroken / "export") for _ in range(2))
    ids = AutoTokenizer.from_pretrained(unbroken / "export")("12 + 34 =", return_tensors="pt")["input_ids"]
    own = {name.removeprefix("policy.model."): value for name, value in weights(unbroken).items()}
    again.load_state_dict(own, strict=False)
    assert torch.equal(model(ids).logits, again(ids).logits)
    card = (unbroken / "export" / "README.md").read_text()
    assert "val/pass@1" in card
    assert f"transformers {transformers.__version__};" in card
    words = [word for word in SMALL if not word.startswith("policy")]
    words += ["policy=hf", f"policy.path={unbroken}/export", "rollout.max_new_tokens=10", "mode=validate"]
    done = prepared.run(["train.py", *words, f"hydra.run.dir={tmp_path}"], cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    validated = {name: value for name, value in summary(unbroken)["metrics"].items() if name.startswith("val/")}
    assert summary(tmp_path)["metrics"] == pytest.approx(validated, abs=1e-6)


@pytest.mark.slow
def test_a_checkpoint_is_exported_and_validated_later(unbroken, tmp_path):
    best = f"checkpoint={unbroken}/checkpoints/best.ckpt"
    assert train("mode=export", best, f"hydra.run.dir={tmp_path}").returncode == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    for name, value in weights(unbroken, "best").items():
        assert torch.equal(exported[name.removeprefix("policy.model.")], value), name
    before = (unbroken / "summary.json").read_text()
    assert train("mode=validate", "checkpoint=last", f"hydra.run.dir={unbroken}").returncode == 0
    assert (unbroken / "summary.json").read_text() == before
    later = summary(unbroken, "summary_validate")
    assert later["metrics"]["val/reward/total"] == json.loads(before)["metrics"]["val/reward/total"]


@pytest.mark.slow
def test_the_shipped_policy_learns(tmp_path):
    words = ("steps=20", "validation.every=20", "data.validation_size=100", f"hydra.run.dir={tmp_path}")
    command = [sys.executable, "train.py", *words]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    passes = [value for _, value in scalars(tmp_path / "tensorboard")["val/pass@1"]]
    assert passes[0] < 0.55
    assert passes[-1] > passes[0] + 0.15
    assert summary(tmp_path)["metrics"]["val/pass@1"] == pytest.approx(passes[-1])


@pytest.mark.slow
def test_runs_killed_at_random_moments_continue_exactly_and_leave_nothing(tmp_path):
    assert main(count=2, seed=5, place=tmp_path, most=1) == 0


def test_two_checkpoints_differ_where_one_bit_does():
    one = {"state": [{"a": torch.tensor([1.0, 2.0]), "rate": 0.5}]}
    same = {"state": ({"a": torch.tensor([1.0, 2.0]), "rate": 0.5},)}
    assert difference(one, same, "x") is None
    same["state"][0]["a"][1] += 2.4e-7
    assert difference(one, same, "x") == "x.state.0.a"
    assert difference(one, {"state": [{"a": torch.tensor([1.0, 2.0]), "rate": 0.4}]}, "x") == "x.state.0.rate"
    assert difference(one, {}, "x") == "x: the keys ['state']"
