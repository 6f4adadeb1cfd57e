"""Ctrl-C and its like where several processes train together, and on SLURM."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.support.composed import ROOT
from tests.test_processes import running, wait_for
from tests.test_signals import RUN, begin, ended, kill, naps, saved

pytestmark = pytest.mark.slow
TWO = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")


@pytest.mark.parametrize(
    ("to_group", "number", "exit_status", "status"),
    [(True, signal.SIGINT, 130, "interrupted"), (False, signal.SIGTERM, 143, "preempted")],
)
def test_two_processes_end_together(to_group, number, exit_status, status, tmp_path):
    process = begin(tmp_path, *TWO, *naps(tmp_path, timeout=None, seconds=3))
    wait_for(lambda: all((tmp_path / f"begun.{rank}").exists() for rank in (0, 1)), process)
    (os.killpg if to_group else os.kill)(process.pid, number)
    told = ended(tmp_path, process, exit_status=exit_status, status=status, seconds=60)
    assert "step 0 is saved; continue with: python train.py" in told
    assert saved(tmp_path) == 0


def test_ctrl_c_while_two_processes_are_loading(tmp_path):
    process = begin(tmp_path, *TWO)
    wait_for(lambda: len(running(f"hydra.run.dir={tmp_path}/run")) == 3, process)
    time.sleep(1)  # the second one is being imported
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    printed = (tmp_path / "log").read_text()
    assert printed.count("interrupted") == 1
    assert "Traceback" not in printed
    wait_for(lambda: not running(f"hydra.run.dir={tmp_path}/run"), seconds=10)


def test_a_second_ctrl_c_ends_processes_that_wait_for_one_another(tmp_path):
    process = begin(tmp_path, *TWO, *naps(tmp_path, timeout=None, function="naps_on_in_process_1"))
    wait_for((tmp_path / "begun").exists, process)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    wait_for(lambda: not running(f"hydra.run.dir={tmp_path}/run"), seconds=20)
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_torchrun_passes_sigterm_on(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}", "train.py"]
    command += [
        *RUN,
        *TWO[:2],
        "trainer.devices=2",
        *naps(tmp_path, timeout=None, seconds=5),
        f"hydra.run.dir={tmp_path}/run",
    ]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
    wait_for((tmp_path / "begun").exists, process)
    time.sleep(1)
    process.terminate()
    assert process.wait(timeout=60) == 1
    printed = (tmp_path / "log").read_text()
    assert printed.count("asked to end by SIGTERM: step 0 is saved; continue with: ") == 1, printed
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "preempted"
    assert saved(tmp_path) == 0
    wait_for(lambda: not running(f"hydra.run.dir={tmp_path}/run"), seconds=10)


def test_sigusr1_saves_a_task_of_slurm(tmp_path):
    # SLURM_NTASKS and SLURM_JOB_NAME make Lightning take the process for a task of SLURM's
    environment = {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "grpo", "SLURM_PROCID": "0"}
    environment |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    process = begin(tmp_path, kill("rollout", signal.SIGUSR1), **environment)
    told = ended(tmp_path, process, exit_status=143, status="preempted")
    assert "asked to end by SIGUSR1: step 2 is saved" in told
    assert saved(tmp_path) == 2
    assert not list((tmp_path / "run").rglob("hpc_ckpt*"))
