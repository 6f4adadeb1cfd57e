"""Sweeps: ended by a kill and started again, several jobs at once, and a search."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo_lightning import sweep
from tests.support.composed import ROOT
from tests.support.running import SMALL

FAST = (*SMALL[:11], "trainer=cpu", "steps=4", "logger=csv", "validation.every=2", "callbacks.checkpoint.every=1")
KILLING = '''
import os
import signal
from pathlib import Path

calls = []


def vowels(prompts, completions, **columns):
    """As many calls as Path("calls") says end this process in the third job."""
    calls.append(1)
    limit, third = Path("limit"), Path("sweep/optimizer.lr=0.001,seed=1/checkpoints/last.ckpt")
    if limit.exists() and third.exists() and len(calls) > int(limit.read_text()):
        limit.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return [sum(text.count(vowel) for vowel in "aeiou") / 10 for text in completions]


def crashes_at_rate(prompts, completions, **columns):
    return [1 / 0 for _ in completions]
'''


def start(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (place / "mine.py").write_text(KILLING)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    own = ("reward=[custom]", "reward.custom.function._target_=mine.vowels")
    command = [sys.executable, str(ROOT / "train.py"), "-m", *FAST, *own, *words, "hydra.sweep.dir=sweep"]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=600)


def summary(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


def summaries(place: Path) -> list[dict]:
    return [summary(path.parent) for path in (place / "sweep").glob("*/summary.json")]


def times(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))}


@pytest.mark.slow
def test_a_killed_sweep_is_continued(tmp_path):
    words = ("seed=0,1", "optimizer.lr=1e-3,2e-3")
    (tmp_path / "limit").write_text("3")
    assert start(tmp_path, *words).returncode == -9
    place = tmp_path / "sweep"
    jobs = first, second, third, fourth = [
        f"optimizer.lr={rate},seed={seed}" for seed in (0, 1) for rate in (0.001, 0.002)
    ]
    assert [(place / job / "summary.json").exists() for job in jobs[:3]] == [True, True, False]
    report = [sys.executable, "-m", "grpo_lightning.report", str(place)]
    printed = subprocess.run(report, cwd=ROOT, capture_output=True, text=True).stdout
    assert "2 of 4 runs without a result:" in printed
    folded = "".join(printed.split())  # a path may be folded anywhere
    assert f"{third}(seed=1optimizer.lr=0.001):killed" in folded
    assert "(seed=1optimizer.lr=0.002):missing" in folded
    before = [times(place / job) for job in (first, second)]
    again = start(tmp_path, *words)
    assert again.returncode == 0, again.stderr[-2000:]
    assert [times(place / job) for job in (first, second)] == before
    printed = " ".join(again.stderr.split())
    for job in (first, second):
        assert f"sweep/{job}: finished already" in printed
    assert f"sweep/{third}: killed, goes on from its last checkpoint" in printed
    assert f"sweep/{fourth}: killed" not in printed
    for job in jobs:
        assert (summary(place / job)["status"], summary(place / job)["steps"]) == ("finished", 4)
    assert (place / third / "train.log").read_text().count("step 4/4") == 1
    assert "val/pass@1 by optimizer.lr" in again.stdout
    (command,) = re.findall(r"this table again: (.*)", again.stderr)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "val/pass@1 by optimizer.lr" in shown.stdout, shown.stderr


@pytest.mark.slow
def test_jobs_at_once_and_one_of_them_fails(tmp_path):
    functions = "reward.custom.function._target_=mine.vowels,mine.crashes_at_rate"
    done = start(tmp_path, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=0,1", "steps=1", functions)
    assert done.returncode == 1
    assert sorted(one["status"] for one in summaries(tmp_path)) == ["failed", "failed", "finished", "finished"]
    text = " ".join(done.stdout.split())
    assert "2 of 4 runs without a result:" in text
    assert "failed, “reward 'custom' raised ZeroDivisionError" in text
    assert "Traceback" not in done.stderr.replace("_RemoteTraceback", "")


@pytest.mark.slow
def test_a_search_maximizes_and_outlives_a_trial_that_fails(tmp_path):
    space = ("rollout.temperature=choice(0,1)", "optimizer.lr=tag(log, interval(1e-4, 1e-2))")
    done = start(tmp_path, "sweep=optuna", "hydra.sweeper.n_trials=4", *space, "steps=1", "sweep_metric=reward/custom")
    assert done.returncode == 1  # a temperature of 0 is refused
    found = summaries(tmp_path)
    assert len(found) == 4
    values = [one["metrics"]["reward/custom"] for one in found if one["status"] == "finished"]
    assert 0 < len(values) < 4
    assert all("rollout.temperature=0" in one["error"] for one in found if one["status"] == "failed")
    assert OmegaConf.load(tmp_path / "sweep" / "optimization_results.yaml").best_value == max(values)
    assert "reward/custom by optimizer.lr" in done.stdout


def config(*words: str, **sweeper):
    own = {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper", **sweeper}
    return OmegaConf.create({"hydra": {"sweeper": own, "overrides": {"task": list(words)}}})


def test_the_jobs_of_a_sweep_are_all_combinations():
    assert sweep.job_overrides(config("a=1,2", "b=x", params={"c": "range(2)"})) == [
        ["c=0", "a=1", "b=x"],
        ["c=0", "a=2", "b=x"],
        ["c=1", "a=1", "b=x"],
        ["c=1", "a=2", "b=x"],
    ]
    assert sweep.job_overrides(config("a=1", _target_="hydra_plugins.hydra_optuna_sweeper.OptunaSweeper")) is None
    assert sweep.job_overrides(config("hydra.verbose=true", "a=[1,2]")) == [["a=[1,2]"]]
    assert sweep.job_overrides(config("a='x ${oc.env:HOME}'")) == [["a='x ${oc.env:HOME}'"]]


def test_a_job_is_known_by_its_directory_and_its_overrides(tmp_path):
    def write(directory, *overrides, **facts):
        directory.mkdir(parents=True)
        text = {"overrides": list(overrides), "status": "finished", "steps": 4, "metrics": {"m": 0.5}} | facts
        (directory / "summary.json").write_text(json.dumps(text))

    assert sweep.find_job(tmp_path / "0", ["seed=0"]) is None
    write(tmp_path / "0", "seed=0", "steps=4")
    record = sweep.find_job(tmp_path / "0", ["steps=8", "seed=0"])
    assert (sweep.is_finished(record, 4), sweep.is_finished(record, 5)) == (True, False)
    assert sweep.skip(record, "m") == 0.5
    assert sweep.skip(record, "n") == -sys.float_info.max
    with pytest.raises(ValueError, match=r"0 holds another job \(seed=0 steps=4\)"):
        sweep.find_job(tmp_path / "0", ["seed=1"])
    write(tmp_path / "1", "seed=0", status="failed")
    assert not sweep.is_finished(sweep.find_job(tmp_path / "1", ["seed=0"]), 4)
    sweep.write_failure(tmp_path / "1", ["a=1"], "another")  # takes no other's place
    assert summary(tmp_path / "1")["status"] == "failed"
    (tmp_path / "2").mkdir()
    for error in ("a=1 is too large", "another"):
        sweep.write_failure(tmp_path / "2", ["a=1"], error)
    assert summary(tmp_path / "2")["error"] == "a=1 is too large"


def test_directories_of_jobs_are_named_by_what_differs():
    def named(*words: str) -> list[str]:
        hydra = {
            "overrides": {"task": list(words), "hydra": []},
            "job": {"config": {"override_dirname": {"exclude_keys": ["run_dir"]}}},
            "sweep": {"subdir": "${hydra.job.override_dirname}"},
        }
        made = OmegaConf.create({"hydra": hydra})
        sweep.name_by_differences(made)
        return list(OmegaConf.to_container(made.hydra.overrides.hydra, resolve=False))

    excluded = "hydra.job.config.override_dirname.exclude_keys=[algorithm,run_dir,steps]"
    assert named("seed=0,1", "algorithm=dapo", "steps=3") == [excluded]
    for no_name in ("policy.path=a/b,a/c", "+reward.judge.api_key=one,two", "seed=0"):
        assert named(no_name)[1:] == ["hydra.sweep.subdir=${hydra.job.num}"]


def test_a_total_is_no_objective_of_a_sweep_over_its_weights():
    words = ["reward.format.weight=0.1,1.0", "reward.format.timeout=1,2", "seed=0,1", "reward.accuracy.weight=2"]
    [problem] = sweep.objective_problems(words, "val/reward/total")
    assert problem.startswith(
        "reward.format.weight=0.1,1.0: val/reward/total changes with it; use sweep_metric=val/pass@1"
    )
    assert list(sweep.objective_problems(words, "val/pass@1")) == []
    assert len(list(sweep.objective_problems(["reward=[accuracy],[accuracy,format]"], "reward/total"))) == 1
