"""Ctrl-C and its like at every moment, in real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from grpo_lightning.distributed.signals import Preempted, Signals
from tests.support.composed import ROOT
from tests.support.running import SMALL
from tests.test_processes import running, wait_for

pytestmark = pytest.mark.slow
RUN = (*SMALL, "steps=4", "validation.every=2", "callbacks.checkpoint.every=1")


def begin(directory: Path, *overrides: str, **environment: str) -> subprocess.Popen:
    """train.py in its own process group, as a shell starts it."""
    command = [sys.executable, "train.py", *RUN, *overrides, f"hydra.run.dir={directory}/run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **environment}
    with (directory / "log").open("a") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)


def kill(moment: str, number: int, step: int = 3) -> str:
    return (
        f"+callbacks.kill={{_target_: tests.support.killing.Kill, step: {step}, moment: {moment}, "
        f"signal_number: {int(number)}}}"
    )


def naps(directory: Path, *, timeout: float | None, function: str = "marks_and_naps", seconds: float = 50) -> list[str]:
    return [
        f"reward.custom.function._target_=tests.support.hostile.{function}",
        f"+reward.custom.function.path={directory}/begun",
        f"+reward.custom.function.seconds={seconds}",
        f"reward.custom.timeout={'null' if timeout is None else timeout}",
    ]


def saved(directory: Path) -> int:
    path = directory / "run" / "checkpoints" / "last.ckpt"
    return torch.load(path, weights_only=True)["step"]["completed"]


def ended(directory: Path, process: subprocess.Popen, *, exit_status: int, status: str, seconds: float = 120) -> str:
    """What a run that was ended has printed: one sentence and no traceback; nothing of it still runs."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        for pid in running(f"hydra.run.dir={directory}/run"):
            if int(pid) != process.pid:
                os.kill(int(pid), signal.SIGABRT)  # so that each of its threads says where it is
        process.wait(timeout=30)
    printed = (directory / "log").read_text()
    assert process.returncode == exit_status, printed[-6000:]
    assert "Traceback" not in printed, printed
    assert json.loads((directory / "run" / "summary.json").read_text())["status"] == status
    wait_for(lambda: not running(f"hydra.run.dir={directory}/run"), seconds=10)
    told = [line for line in printed.splitlines() if "interrupted" in line or "asked to end" in line]
    assert len(told) == 1, printed
    return told[0]


MOMENTS = {"loading": None, "rollout": 2, "validation": 2, "update": 3, "export": 4}
"""Moment -> the step that is saved."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_at_any_moment_saves_the_last_complete_step(moment, tmp_path):
    step = MOMENTS[moment]
    told = ended(tmp_path, begin(tmp_path, kill(moment, signal.SIGINT)), exit_status=130, status="interrupted")
    if step is None:
        assert told.endswith("interrupted: nothing was saved yet")
        assert not (tmp_path / "run" / "checkpoints").exists()
        return
    assert saved(tmp_path) == step
    assert f"interrupted: step {step} is saved; continue with: python train.py policy=scratch" in told
    assert told.endswith(f"hydra.run.dir={tmp_path}/run checkpoint=last")


def test_ctrl_c_before_there_is_a_run(tmp_path):
    process = begin(tmp_path)
    mark = f"hydra.run.dir={tmp_path}/run"
    wait_for(lambda: any("libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text() for pid in running(mark)), process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert (tmp_path / "log").read_text().splitlines()[-1] == "interrupted"
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("number", "timeout", "seconds"), [(signal.SIGTERM, 60, 50), (signal.SIGHUP, None, 3)], ids=["workers", "here"]
)
def test_a_signal_while_rewards_are_scored(number, timeout, seconds, tmp_path):
    """Workers are not waited for; a reward of this process is."""
    process = begin(tmp_path, *naps(tmp_path, timeout=timeout, seconds=seconds))
    wait_for((tmp_path / "begun").exists, process)
    os.killpg(process.pid, number)  # as a terminal does: workers get it, too
    assert "step 0 is saved" in ended(tmp_path, process, exit_status=143, status="preempted", seconds=60)


def test_a_run_under_nohup_stays(tmp_path):
    """A signal that is ignored when the run begins stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = begin(tmp_path, kill("rollout", signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.wait(timeout=120) == 0
    assert saved(tmp_path) == 4


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    process = begin(tmp_path, *naps(tmp_path, timeout=None, function="marks_and_naps_on"))
    wait_for((tmp_path / "begun").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # the same press, handed on by a launcher
    time.sleep(1.0)
    assert process.poll() is None
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert time.monotonic() - began < 15
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_trainer_of_ones_own_hears_sigterm_in_its_steps():
    before = signal.getsignal(signal.SIGTERM)
    signals = Signals()
    try:
        signals.begin_steps(None)
        signals.check()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Preempted, match="asked to end by SIGTERM") as error:
            signals.check()
        assert error.value.between_steps
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_before_the_steps_raises_and_during_them_waits():
    with Signals() as signals:
        with pytest.raises(Preempted) as early:
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # while that one is handled
    assert not early.value.between_steps
    with Signals() as signals:
        signals.begin_steps(None)
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(Preempted) as late:
            signals.end_steps()
    assert late.value.between_steps
