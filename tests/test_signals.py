"""Ctrl-C and its like at every moment, in real processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from grpo_lightning.distributed.signals import Preempted, Signals, breaking_off
from tests.support.composed import ROOT
from tests.support.provocations import provocation
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


def naps(directory: Path, *, timeout: float | None, function: str = "marks_and_naps") -> list[str]:
    return [
        f"reward.custom.function._target_=tests.support.hostile.{function}",
        f"+reward.custom.function.path={directory}/begun",
        "+reward.custom.function.seconds=50",
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


MOMENTS = {
    "loading": (signal.SIGINT, None, "while the weights are loaded"),
    "rollout": (signal.SIGINT, 2, "in a rollout"),
    "validation": (signal.SIGINT, 2, "in a validation"),
    "update": (signal.SIGINT, 3, "in an update"),
    "export": (signal.SIGINT, 4, "while the policy is exported"),
}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(
            moment,
            marks=provocation(
                f"Ctrl-C {where}",
                "one sentence with the command that continues, status interrupted, exit 130; "
                + ("nothing was saved yet" if step is None else "the last complete step is saved"),
            ),
        )
        for moment, (_, step, where) in MOMENTS.items()
    ],
)
def test_ctrl_c_at_any_moment_saves_the_last_complete_step(moment, tmp_path):
    number, step, _ = MOMENTS[moment]
    told = ended(tmp_path, begin(tmp_path, kill(moment, number)), exit_status=130, status="interrupted")
    if step is None:
        assert told.endswith("interrupted: nothing was saved yet")
        assert not (tmp_path / "run" / "checkpoints").exists()
        return
    assert saved(tmp_path) == step
    assert f"interrupted: step {step} is saved; continue with: python train.py policy=scratch" in told
    assert told.endswith(f"hydra.run.dir={tmp_path}/run checkpoint=last")


@provocation("Ctrl-C while PyTorch is imported", "one word, no traceback, exit 130")
def test_ctrl_c_before_there_is_a_run(tmp_path):
    process = begin(tmp_path)
    mark = f"hydra.run.dir={tmp_path}/run"
    wait_for(lambda: any("libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text() for pid in running(mark)), process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert (tmp_path / "log").read_text().splitlines()[-1] == "interrupted"
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("number", "timeout", "function", "status"),
    [
        pytest.param(
            signal.SIGTERM,
            60,
            "marks_and_naps",
            "preempted",
            marks=provocation(
                "SIGTERM while rewards with a timeout are scored", "saved and ended without waiting for them, exit 143"
            ),
        ),
        pytest.param(
            signal.SIGINT,
            None,
            "marks_and_naps",
            "interrupted",
            marks=provocation(
                "Ctrl-C in a slow reward of this process", "saved and ended without waiting for it, exit 130"
            ),
        ),
        pytest.param(
            signal.SIGHUP,
            None,
            "marks_naps_and_swallows",
            "preempted",
            marks=provocation(
                "SIGHUP, as when the terminal is closed, in a reward that catches every exception",
                "saved and ended without waiting for it, exit 143",
            ),
        ),
        pytest.param(
            signal.SIGTERM,
            None,
            "marks_and_naps_each",
            "preempted",
            marks=provocation(
                "SIGTERM in a slow reward that catches every exception and goes on with the next completion",
                "each is broken off; saved and ended, exit 143",
            ),
        ),
    ],
)
def test_slow_rewards_hold_nobody_up(number, timeout, function, status, tmp_path):
    process = begin(tmp_path, *naps(tmp_path, timeout=timeout, function=function))
    wait_for((tmp_path / "begun").exists, process)
    os.killpg(process.pid, number)  # as a terminal does: workers get it, too
    exit_status = 130 if number == signal.SIGINT else 143
    told = ended(tmp_path, process, exit_status=exit_status, status=status, seconds=30)
    assert "step 0 is saved" in told


def test_a_run_under_nohup_stays(tmp_path):
    """A signal that is ignored when the run begins stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = begin(tmp_path, kill("rollout", signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.wait(timeout=120) == 0
    assert saved(tmp_path) == 4


@provocation("a second Ctrl-C", "ends all processes at once, exit 130")
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


def test_a_signal_just_before_foreign_code_runs_stops_it():
    """The moment between looking whether a signal has come and letting signals break off what runs."""

    class JustAfter(Signals):
        def check(self):
            super().check()
            if self._in_steps and self.heard is None:
                signal.raise_signal(signal.SIGTERM)

    has_run = []

    def reward():
        with signals.breaking_off():
            has_run.append(True)

    with JustAfter() as signals:
        signals.begin_steps(None)
        with pytest.raises(Preempted):
            reward()
    assert not has_run


def test_a_signal_just_before_a_wait_ends_it():
    """Here another thread gets it, which does not end a wait of the main thread either."""

    def reward():
        with signals.breaking_off():
            timer.start()
            time.sleep(20)

    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGHUP))
    with Signals() as signals:
        signals.begin_steps(None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # of this thread alone
        began = time.monotonic()
        with pytest.raises(Preempted):
            reward()
        assert time.monotonic() - began < 10
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def test_foreign_code_that_goes_on_is_broken_off_again(monkeypatch):
    """The first exception may be swallowed, or lost in C code; there it was meant to end the first of three waits."""
    monkeypatch.setattr("grpo_lightning.distributed.nudge._AGAIN", 1.0)
    ended = []

    def reward():
        with breaking_off():
            timer.start()
            for _ in range(3):
                try:
                    time.sleep(20)
                except Preempted:
                    ended.append(time.monotonic() - began)

    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGHUP))
    with Signals() as signals:
        signals.begin_steps(None)
        began = time.monotonic()
        with pytest.raises(Preempted):
            reward()
    first, second, third = ended
    assert first < 1.0 <= second - first < 5.0
    assert third - second < 0.9  # by now it is known for that


@pytest.mark.parametrize("is_left", [True, False])
def test_nothing_is_broken_off_after_foreign_code(is_left, monkeypatch):
    """What saves is left alone, also where the signal came before it was noted that the foreign code was left."""
    monkeypatch.setattr("grpo_lightning.distributed.nudge._AGAIN", 0.2)

    def reward():
        context.__enter__()
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            if is_left:
                context.__exit__(None, None, None)

    with Signals() as signals:
        signals.begin_steps(None)
        context = breaking_off()
        with pytest.raises(Preempted):
            reward()
        time.sleep(1.5)  # as what saves does
        if not is_left:
            with pytest.raises(Preempted):
                context.__exit__(None, None, None)
