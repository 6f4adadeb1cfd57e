"""train.py as users start it: real processes, real kills, real files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import prepared
from tests.support.composed import ROOT
from tests.support.running import SMALL
from tests.test_callbacks import scalars

pytestmark = pytest.mark.slow
STEPS = ("steps=8", "validation.every=3", "callbacks.checkpoint.every=2", "optimizer.lr=0.01")


def train(*arguments: str, small: bool = True, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """What train.py does, in a Python of its own where ``fresh``."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    multirun = [argument for argument in arguments if argument == "-m"]  # Hydra wants its flags first
    words = ["train.py", *multirun, *(SMALL if small else ()), *(a for a in arguments if a != "-m")]
    if not fresh:
        return prepared.run(words, cwd=ROOT, env=environment, timeout=600)
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def finished(directory: Path) -> dict:
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "finished"
    return summary


def weights(directory: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return torch.load(directory / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"]


def asked(directory: Path) -> dict[int, list[str]]:
    """Step -> prompts; of a step that ran twice, the second time."""
    return dict(json.loads(line) for line in (directory / "asked.jsonl").read_text().splitlines())


def recorder(directory: Path) -> str:
    return f"+callbacks.asked={{_target_: tests.support.killing.Asked, path: {directory}/asked.jsonl}}"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("unbroken")
    result = train(*STEPS, f"hydra.run.dir={directory}", recorder(directory))
    assert result.returncode == 0, result.stderr[-3000:]
    return directory


def same_as_unbroken(directory: Path, unbroken: Path) -> None:
    expected, found = weights(unbroken), weights(directory)
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    assert asked(directory) == asked(unbroken)
    ours, theirs = scalars(directory / "tensorboard"), scalars(unbroken / "tensorboard")
    assert ours.keys() == theirs.keys()
    for tag, values in ours.items():
        assert [step for step, _ in values] == [step for step, _ in theirs[tag]], tag  # none twice, none missing
        if not tag.startswith(("time/", "perf/")):
            assert values == theirs[tag], tag


@pytest.mark.parametrize(
    "moment, step",
    [("validation", 4), ("update", 8), ("rollout", 1)],
    ids=["on an epoch border", "in the last update", "in the first rollout"],
)
def test_a_killed_run_continues_exactly(moment, step, unbroken, tmp_path):
    killer = f"+callbacks.kill={{_target_: tests.support.killing.Kill, step: {step}, moment: {moment}}}"
    killed = train(*STEPS, f"hydra.run.dir={tmp_path}", recorder(tmp_path), killer)
    assert killed.returncode == 1, killed.stderr[-3000:]
    told = json.loads((tmp_path / "summary.json").read_text())
    assert (told["status"], told["steps"]) == ("failed", step - 1)
    assert told["error"].startswith(f"the run was killed (SIGKILL) in step {step}")
    resumed = train(*STEPS, f"hydra.run.dir={tmp_path}", recorder(tmp_path), "checkpoint=last")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert finished(tmp_path)["steps"] == 8
    same_as_unbroken(tmp_path, unbroken)


def test_sigterm_saves_the_last_complete_step(unbroken, tmp_path):
    killer = "+callbacks.kill={_target_: tests.support.killing.Kill, step: 6, moment: rollout, signal_number: 15}"
    ended = train(*STEPS, f"hydra.run.dir={tmp_path}", recorder(tmp_path), killer)
    assert ended.returncode == 143, ended.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("preempted", 5)
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["step"]["completed"] == 5
    assert train(*STEPS, f"hydra.run.dir={tmp_path}", recorder(tmp_path), "checkpoint=last").returncode == 0
    same_as_unbroken(tmp_path, unbroken)


def test_a_finished_run_can_be_lengthened(unbroken, tmp_path):
    short = ("steps=4", *STEPS[1:], f"hydra.run.dir={tmp_path}", recorder(tmp_path))
    assert train(*short).returncode == 0
    refused = train(*STEPS, f"hydra.run.dir={tmp_path}")
    assert refused.returncode == 1
    assert "already holds a run: checkpoint=last continues it" in refused.stderr
    assert train(*STEPS, f"hydra.run.dir={tmp_path}", recorder(tmp_path), "checkpoint=last").returncode == 0
    expected, found = weights(unbroken), weights(tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_export_is_the_checkpoint_and_validates_alike(unbroken, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(unbroken / "export")
    tokenizer = AutoTokenizer.from_pretrained(unbroken / "export")
    ids = tokenizer("12 + 34 =", return_tensors="pt")["input_ids"]
    again = AutoModelForCausalLM.from_pretrained(unbroken / "export")
    again.load_state_dict(
        {name.removeprefix("policy.model."): value for name, value in weights(unbroken).items()}, strict=False
    )
    assert torch.equal(model(ids).logits, again(ids).logits)
    assert "val/pass@1" in (unbroken / "export" / "README.md").read_text()

    result = train(
        *(argument for argument in SMALL if not argument.startswith("policy")),
        "policy=hf",
        f"policy.path={unbroken}/export",
        "rollout.max_new_tokens=10",
        "mode=validate",
        f"hydra.run.dir={tmp_path}",
        small=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    then, now = finished(unbroken)["metrics"], finished(tmp_path)["metrics"]
    validated = {name for name in then if name.startswith("val/")}
    assert validated == set(now)
    for name in validated:
        assert now[name] == pytest.approx(then[name], abs=1e-6), name


def test_a_checkpoint_is_exported_and_validated_later(unbroken, tmp_path):
    best = f"checkpoint={unbroken}/checkpoints/best.ckpt"
    assert train("mode=export", best, f"hydra.run.dir={tmp_path}").returncode == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    for name, value in weights(unbroken, "best").items():
        assert torch.equal(exported[name.removeprefix("policy.model.")], value), name
    before = (unbroken / "summary.json").read_text()
    assert train("mode=validate", "checkpoint=last", f"hydra.run.dir={unbroken}").returncode == 0
    assert (unbroken / "summary.json").read_text() == before
    later = json.loads((unbroken / "summary_validate.json").read_text())
    assert later["metrics"]["val/reward/total"] == json.loads(before)["metrics"]["val/reward/total"]


def test_a_sweep_leaves_a_complete_directory_per_job(tmp_path):
    result = train("-m", "algorithm=grpo,dapo", "seed=0,1", "steps=5", f"hydra.sweep.dir={tmp_path}")
    assert result.returncode == 0, result.stderr[-3000:]
    jobs = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    names = [f"algorithm={algorithm},seed={seed}" for algorithm in ("dapo", "grpo") for seed in (0, 1)]
    assert [job.name for job in jobs] == names
    seen = set()
    for job in jobs:
        summary = finished(job)
        assert summary["steps"] == 5
        seen.add(tuple(o for o in summary["overrides"] if o.startswith(("algorithm", "seed"))))
        for part in (
            ".hydra/config.yaml",
            "checkpoints/last.ckpt",
            "checkpoints/best.ckpt",
            "export/model.safetensors",
        ):
            assert (job / part).exists(), (job, part)
        assert [step for step, _ in scalars(job / "tensorboard")["reward/total"]] == [1, 2, 3, 4, 5]
    assert seen == {(f"algorithm={a}", f"seed={s}") for a in ("grpo", "dapo") for s in (0, 1)}


def test_help_is_readable():
    result = train("--help", small=False, fresh=True)
    assert result.returncode == 0
    assert "python train.py algorithm=dapo" in result.stdout
    assert "algorithm: cispo, dapo, dr_grpo, gmpo, grpo" in result.stdout


def test_the_shipped_policy_learns(tmp_path):
    result = train(
        *("steps=20", "validation.every=20", "data.validation_size=100", f"hydra.run.dir={tmp_path}"),
        small=False,
        fresh=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    passes = [value for _, value in scalars(tmp_path / "tensorboard")["val/pass@1"]]
    assert passes[0] < 0.55
    assert passes[-1] > passes[0] + 0.15
    assert finished(tmp_path)["metrics"]["val/pass@1"] == pytest.approx(passes[-1])
