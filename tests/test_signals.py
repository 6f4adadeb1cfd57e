"""Ctrl-C and its like at every moment, in real processes: one, several, and below a launcher."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from grpo_lightning.distributed.signals import Preempted, Signals
from tests.support.composed import ROOT
from tests.support.processes import running, wait_for
from tests.support.running import SMALL

RUN = (*SMALL, "steps=4", "validation.every=2", "callbacks.checkpoint.every=1")
TWO = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")
TRAIN = (sys.executable, "train.py")


def begin(directory: Path, *overrides: str, program: tuple[str, ...] = TRAIN, **environment: str) -> subprocess.Popen:
    """train.py in its own process group, as a shell starts it."""
    command = [*program, *RUN, *overrides, f"hydra.run.dir={directory}/run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **environment}
    with (directory / "log").open("a") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)


def kill(moment: str, number: int, step: int = 3) -> str:
    number = int(number)
    where = f"step: {step}, moment: {moment}, signal_number: {number}"
    return f"+callbacks.kill={{_target_: tests.support.killing.Kill, {where}}}"


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


def printed(directory: Path, process: subprocess.Popen, exit_status: int, seconds: float = 120) -> str:
    """What a run that has ended has printed: no traceback; nothing of it still runs."""
    process.wait(timeout=seconds)
    text = (directory / "log").read_text()
    assert process.returncode == exit_status, text[-6000:]
    assert "Traceback" not in text, text
    wait_for(lambda: not running(f"hydra.run.dir={directory}/run"), seconds=20)
    return text


def ended(directory: Path, process: subprocess.Popen, exit_status: int, status: str, seconds: float = 120) -> str:
    """The one sentence about the end of a run."""
    text = printed(directory, process, exit_status, seconds)
    assert json.loads((directory / "run" / "summary.json").read_text())["status"] == status
    [sentence] = [line for line in text.splitlines() if "interrupted" in line or "asked to end" in line]
    return sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "step"), [("loading", None), ("rollout", 2), ("validation", 2), ("update", 3), ("export", 4)]
)
def test_ctrl_c_at_any_moment_saves_the_last_complete_step(moment, step, tmp_path):
    sentence = ended(tmp_path, begin(tmp_path, kill(moment, signal.SIGINT)), 130, "interrupted")
    if step is None:
        assert sentence.endswith("interrupted: nothing was saved yet")
        assert not (tmp_path / "run" / "checkpoints").exists()
        return
    assert saved(tmp_path) == step
    assert f"interrupted: step {step} is saved; continue with: python train.py policy=scratch" in sentence
    assert sentence.endswith(f"hydra.run.dir={tmp_path}/run checkpoint=last")


@pytest.mark.slow
def test_ctrl_c_before_there_is_a_run(tmp_path):
    process = begin(tmp_path, *TWO)
    wait_for(lambda: len(running(f"hydra.run.dir={tmp_path}/run")) == 2, process)
    time.sleep(1)  # the second one is being imported
    os.killpg(process.pid, signal.SIGINT)
    assert printed(tmp_path, process, 130, seconds=60).count("interrupted") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "timeout", "seconds"), [(signal.SIGTERM, 60, 50), (signal.SIGHUP, None, 3)], ids=["workers", "here"]
)
def test_a_signal_while_rewards_are_scored(number, timeout, seconds, tmp_path):
    """Workers are not waited for; a reward of this process is."""
    process = begin(tmp_path, *naps(tmp_path, timeout=timeout, seconds=seconds))
    wait_for((tmp_path / "begun").exists, process)
    os.killpg(process.pid, number)  # as a terminal does: workers get it, too
    assert "step 0 is saved" in ended(tmp_path, process, 143, "preempted", seconds=60)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path):
    process = begin(tmp_path, *TWO, *naps(tmp_path, timeout=None, function="naps_on_in_process_1"))
    wait_for((tmp_path / "begun").exists, process)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # the same press, handed on by a launcher
    time.sleep(1)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    printed(tmp_path, process, 130, seconds=30)


@pytest.mark.slow
def test_two_processes_end_together(tmp_path):
    process = begin(tmp_path, *TWO, *naps(tmp_path, timeout=None, seconds=3))
    wait_for(lambda: all((tmp_path / f"begun.{rank}").exists() for rank in (0, 1)), process)
    process.terminate()  # the first one only
    sentence = ended(tmp_path, process, 143, "preempted", seconds=60)
    assert "step 0 is saved; continue with: python train.py" in sentence
    assert saved(tmp_path) == 0


@pytest.mark.slow
def test_torchrun_passes_sigterm_on(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}", "train.py")
    process = begin(tmp_path, *TWO, *naps(tmp_path, timeout=None, seconds=5), program=program)
    wait_for((tmp_path / "begun").exists, process)
    time.sleep(1)
    process.terminate()
    assert process.wait(timeout=60) == 1
    text = (tmp_path / "log").read_text()
    assert text.count("asked to end by SIGTERM: step 0 is saved; continue with: ") == 1, text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "preempted"
    assert saved(tmp_path) == 0


@pytest.mark.slow
def test_sigusr1_saves_a_task_of_slurm(tmp_path):
    # SLURM_NTASKS and SLURM_JOB_NAME make Lightning take the process for a task of SLURM's
    environment = {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "grpo", "SLURM_PROCID": "0"}
    environment |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    process = begin(tmp_path, kill("rollout", signal.SIGUSR1), **environment)
    assert "asked to end by SIGUSR1: step 2 is saved" in ended(tmp_path, process, 143, "preempted")
    assert saved(tmp_path) == 2
    assert not list((tmp_path / "run").rglob("hpc_ckpt*"))


def test_a_signal_before_the_steps_raises_and_during_them_waits():
    with Signals() as signals:
        with pytest.raises(Preempted) as early:
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # while that one is handled
    assert not early.value.between_steps
    with Signals() as signals:
        signals.on_steps_start(None)
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(Preempted) as late:
            signals.end_steps()
    assert late.value.between_steps
    before = signal.getsignal(signal.SIGTERM)
    signals = Signals()  # of a trainer of one's own, which no run listens for
    try:
        signals.on_steps_start(None)
        signals.check()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Preempted, match="asked to end by SIGTERM") as error:
            signals.check()
        assert error.value.between_steps
    finally:
        signal.signal(signal.SIGTERM, before)
