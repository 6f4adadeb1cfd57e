"""A run is a process of its own below the one that was started, so that a crash has a decent end."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.composed import ROOT
from tests.support.running import SMALL

pytestmark = pytest.mark.slow
OWN = ("reward=[format,custom]", "trainer=cpu", "steps=3")


def command(place: Path, *words: str) -> list[str]:
    rewards = "import ctypes\n\n\ndef ok(completions, **k):\n    return [1.0] * len(completions)\n\n\n"
    rewards += "def crash(completions, **k):\n    ctypes.string_at(0)\n\n\n"
    rewards += "def leave(completions, **k):\n    exit()\n"
    (place / "mine.py").write_text(rewards)
    flags = [word for word in words if word == "-m"]
    return [sys.executable, str(ROOT / "train.py"), *flags, *SMALL[:11], *OWN, *(w for w in words if w != "-m")]


def start(place: Path, *words: str, **options) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(command(place, *words), cwd=place, env=environment, **pipes)


def summary(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


def test_a_reward_that_crashes_is_named(tmp_path):
    run = start(tmp_path, "reward.custom.function._target_=mine.crash", "hydra.run.dir=run")
    errors = run.communicate(timeout=300)[1]
    assert run.returncode == 1
    assert "reward 'custom' crashed the run in step 1 (SIGSEGV)" in errors
    told = summary(tmp_path / "run")
    assert told["status"] == "failed"
    assert told["error"].startswith("reward 'custom' crashed the run in step 1")
    assert 'mine.py", line 9 in crash' in (tmp_path / "run" / "train.log").read_text()


def test_in_a_sweep_the_other_jobs_run(tmp_path):
    functions = "reward.custom.function._target_=mine.crash,mine.leave,mine.ok"
    run = start(tmp_path, "-m", functions, "hydra.sweep.dir=sweep")
    errors = run.communicate(timeout=300)[1]
    assert run.returncode == 1
    found = [
        summary(tmp_path / "sweep" / f"reward.custom.function._target_=mine.{name}")
        for name in ("crash", "leave", "ok")
    ]
    assert [one["status"] for one in found] == ["failed", "failed", "finished"]
    assert "reward 'custom'" in found[0]["error"]
    assert "reward 'custom'" in found[1]["error"]
    assert "Traceback" not in errors


def child_of(process: subprocess.Popen[str]) -> int:
    """The process of the run below the one that was started, once it is there."""
    for _ in range(1200):
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if int(status.read_text().rpartition(")")[2].split()[1]) == process.pid:
                    return int(status.parent.name)
        time.sleep(0.05)
    raise TimeoutError("no child")


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    raise TimeoutError(str(path))


LONG = ("reward.custom.function._target_=mine.ok", "steps=100000", "hydra.run.dir=run")


def test_a_killed_run_is_told_of(tmp_path):
    run = start(tmp_path, *LONG)
    child = child_of(run)
    wait_for(tmp_path / "run" / "checkpoints" / "last.ckpt")
    os.kill(child, signal.SIGKILL)
    errors = run.communicate(timeout=60)[1]
    assert run.returncode == 1
    assert "the run was killed (SIGKILL) in step" in errors
    told = summary(tmp_path / "run")
    assert told["status"] == "failed"
    assert "because memory ran out" in told["error"]


def test_a_run_does_not_outlive_what_started_it(tmp_path):
    run = start(tmp_path, *LONG, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    child = child_of(run)
    wait_for(tmp_path / "run" / "checkpoints" / "last.ckpt")
    run.kill()
    run.wait()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists():
            return
        time.sleep(0.05)
    raise AssertionError("the run goes on")


def test_a_reader_that_leaves_does_not_end_a_run(tmp_path):
    words = " ".join(f"'{word}'" for word in command(tmp_path, "reward.custom.function._target_=mine.ok"))
    line = f"{words} callbacks.progress.every=1 hydra.run.dir=run 2>&1 | head -2; echo ${{PIPESTATUS[0]}}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines()[-1] == "0"
    assert len(done.stdout.splitlines()) == 3
    assert summary(tmp_path / "run")["status"] == "finished"
    assert "step 3/3" in (tmp_path / "run" / "train.log").read_text()


def test_failures_leave_their_sentence_and_their_traceback(tmp_path):
    own = ("reward.custom.function._target_=mine.fails", "callbacks.progress.every=1", "hydra.run.dir=run")
    words = command(tmp_path, *own)
    with (tmp_path / "mine.py").open("a") as file:
        file.write(
            "\n\ncalls = []\n\n\ndef fails(completions, **k):\n    calls.append(1)\n"
            "    if len(calls) > 4:\n        raise KeyError('lost')\n    return [1.0] * len(completions)\n"
        )
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "reward 'custom' raised KeyError: 'lost'" in done.stderr
    assert summary(tmp_path / "run")["error"].startswith("reward 'custom' raised KeyError: 'lost'")
    logged = (tmp_path / "run" / "train.log").read_text()
    assert "step 1/3" in logged
    assert "Traceback (most recent call last)" in logged
    assert "in fails" in logged
