"""The same run in one process and in several, replicated (DDP) and sharded (FSDP2)."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch

from grpo_lightning.checkpoint.io import read, read_weights
from tests.support.composed import ROOT
from tests.support.processes import finish, running, start, wait_for

RUNS = {
    "grpo": ["algorithm=grpo", "module.ppo_epochs=2", "module.minibatch_size=12"],
    "dapo": ["algorithm=dapo", "rollout.max_tries=2", "rollout.max_new_tokens=24"],
    "dr_grpo": ["algorithm=dr_grpo", "rollout.temperature=2.2"],  # lengths differ: one process samples on alone
    "corrected": [
        *("rollout._target_=tests.support.mismatch.Disturbed", "module.self_check=false"),
        *("correction=sequence_mask", "correction.low=0.6", "correction.high=1.5"),
    ],
    "episodes": [
        *("environment=custom", "environment.function._target_=tests.support.games.again"),
        *("environment.max_turns=3", "rollout.max_new_tokens=100", "reward=[environment]", "advantage=to_go"),
    ],
    "mixture": [
        "data=mixture",
        "data.sources={words: {task: spell_backward, weight: 2}, sums: {task: simple_equations}}",
    ],
    "moved": ["callbacks=reference_refresh", "callbacks.reference.every=2", "callbacks.reference.alpha=0.5"],
}
SMALL = [
    *("steps=3", "data.prompts_per_step=6", "rollout.group_size=4", "module.microbatch_tokens=300"),
    *("data.validation_size=7", "validation.every=3", "validation.samples_per_prompt=2", "validation.ks=[1]"),
    "callbacks.checkpoint.every=3",
    "+optimizer.eps=1e-7",  # with Adam's 1e-8 an element whose gradient is rounding noise moves as far as any other
]
DOUBLE = ["+callbacks.record.double=true"]
"""Float32 rounds differently on other processors; here the sampler's log-probabilities alone are rounded to it."""


def outcome(directory, name):
    lines = [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
    checkpoint = torch.load(directory / name / "checkpoints" / "last.ckpt", weights_only=True)
    summary = json.loads((directory / name / "summary.json").read_text())
    return lines, checkpoint, summary


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    directory = tmp_path_factory.mktemp("alone")
    finish(start(1, directory, "cpu", {name: [*run, *SMALL, *DOUBLE] for name, run in RUNS.items()}))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "processes", "names"),
    [
        ("ddp", 2, RUNS),
        ("cpu", 2, ("grpo",)),  # Lightning chooses its own DDP, which averages unless told otherwise
        ("fsdp", 2, ("grpo", "dapo", "episodes", "moved")),
        ("ddp", 3, ("dapo", "episodes")),
    ],
    ids=lambda value: str(value) if isinstance(value, str | int) else "",
)
def test_results_do_not_depend_on_the_processes(alone, tmp_path, trainer, processes, names):
    finish(start(processes, tmp_path, trainer, {name: [*RUNS[name], *SMALL, *DOUBLE] for name in names}))
    dead = 0
    for name in names:
        lines, checkpoint, summary = outcome(tmp_path, name)
        expected, whole, told = outcome(alone, name)
        assert [line["texts"] for line in lines] == [line["texts"] for line in expected]
        for step, (line, other) in enumerate(zip(lines, expected, strict=True)):
            dead += line["dead"]
            assert len({len(text) for text in line["texts"]}) > 1
            for metric, value in other["metrics"].items():
                if not metric.startswith(("time/", "perf/")):
                    found = line["metrics"][metric]
                    assert found == pytest.approx(value, rel=1e-5, abs=5e-6), (name, step, metric)
        assert summary["metrics"]["val/pass@1"] == told["metrics"]["val/pass@1"]
        gaps = {n: (checkpoint["state_dict"][n] - value).norm() for n, value in whole["state_dict"].items()}
        sizes = {n: value.norm() for n, value in whole["state_dict"].items()}
        assert {n: float(gap / sizes[n]) for n, gap in gaps.items() if gap > 1e-7 * sizes[n]} == {}, name
    assert dead > 0


@pytest.mark.slow
def test_environments_in_workers_give_the_same_run(alone, tmp_path):
    name = "episodes"
    finish(start(1, tmp_path, "cpu", {name: [*RUNS[name], *SMALL, *DOUBLE, "environment.timeout=60"]}))
    (lines, checkpoint, _), (expected, whole, _) = outcome(tmp_path, name), outcome(alone, name)
    assert [line["texts"] for line in lines] == [line["texts"] for line in expected]
    assert max(line["metrics"]["episode/turns"] for line in lines) > 1.5
    assert all(torch.equal(checkpoint["state_dict"][key], value) for key, value in whole["state_dict"].items())


KILL = ["+callbacks.kill._target_=tests.support.killing.Kill", "+callbacks.kill.step=3", "+callbacks.kill.rank=1"]
SHORT = ["steps=4", "callbacks.checkpoint.every=1", "validation.every=4"]


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "moment"), [("ddp", "update"), ("fsdp", "rollout")])
def test_the_death_of_one_process_ends_all_and_the_run_continues_exactly(tmp_path, trainer, moment):
    settings = [*RUNS["grpo"], *SMALL, *SHORT]
    began = time.monotonic()
    killed = start(2, tmp_path, trainer, {"broken": [*settings, *KILL, f"+callbacks.kill.moment={moment}"]})
    printed = [process.communicate(timeout=120)[0] for process in killed]
    assert time.monotonic() - began < 90
    assert killed[1].returncode == -9
    assert killed[0].returncode not in (0, -9), printed[0][-2000:]
    assert "lost contact with another process of the run" in printed[0]
    assert json.loads((tmp_path / "broken" / "summary.json").read_text())["status"] == "failed"
    finish(start(2, tmp_path, trainer, {"broken": [*settings, "checkpoint=last"], "whole": settings}))
    expected, found = (outcome(tmp_path, part) for part in ("whole", "broken"))
    assert [line["texts"] for line in found[0][-2:]] == [line["texts"] for line in expected[0][-2:]]
    for name, value in expected[1]["state_dict"].items():
        assert torch.equal(found[1]["state_dict"][name], value), name


@pytest.mark.slow
def test_an_error_in_one_process_is_told_by_all(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "ask {n}"}}\n' for n in range(40)))
    settings = [
        *RUNS["grpo"],
        *SMALL,
        "reward=[custom]",
        "reward.custom.function._target_=tests.support.rewards.fails_in_process_1",
        "data=jsonl",
        f"data.path={tmp_path}/rows.jsonl",
    ]
    failed = start(2, tmp_path, "ddp", {"run": settings})
    printed = [process.communicate(timeout=120)[0] for process in failed]
    assert all(process.returncode == 1 for process in failed)
    assert re.search(r"rows.jsonl, line \d+: process 1 of 2: RewardError", printed[0])
    assert "no disk in process 1" in printed[0]


@pytest.mark.slow
def test_sharded_checkpoints_hold_the_same_weights_and_continue_exactly(tmp_path):
    settings = [*RUNS["dr_grpo"], *SMALL, "schedule=constant", "validation.every=3", "callbacks.checkpoint.every=1"]
    parts = [*settings, "trainer.strategy.sharded_checkpoints=true", f"run_dir={tmp_path}/parts"]
    runs = {
        "whole": [*settings, "steps=3"],
        "parts": [*parts, "steps=2"],
        "more": [*parts, "steps=3", "checkpoint=last"],
    }
    finish(start(2, tmp_path, "fsdp", runs))
    last = tmp_path / "parts" / "checkpoints" / "last.ckpt"
    assert last.is_dir()
    assert read(last)["step"]["completed"] == 3
    assert {path.resolve().name for path in last.parent.iterdir()} == {path.name for path in last.parent.glob("*_*")}
    expected = outcome(tmp_path, "whole")[1]["state_dict"]
    found = read_weights(last)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
def test_no_process_outlives_the_first_one(tmp_path):
    """Started by the command line: Lightning starts the others."""
    mark = f"hydra.run.dir={tmp_path}/run"
    settings = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "steps=1000", mark]
    command = [sys.executable, "train.py", *settings, "data.prompts_per_step=4", "rollout.group_size=2"]
    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    wait_for(lambda: "step 10/" in (tmp_path / "log").read_text(), first)
    assert len(running(mark)) == 2  # what was started, and the one of Lightning
    first.kill()
    first.wait()
    wait_for(lambda: not running(mark))
    assert "lost contact with another process of the run" in (tmp_path / "log").read_text()
