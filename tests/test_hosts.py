"""Two machines, as network namespaces with an address each: torchrun on both, a machine that is lost, and a network."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_lightning.checkpoint.io import read, read_weights
from tests.support.composed import ROOT
from tests.support.processes import finish, start, wait_for

pytestmark = pytest.mark.slow
SETTINGS = [
    *("data.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=12", "data.validation_size=2"),
    *("validation.samples_per_prompt=1", "validation.ks=[1]", "validation.every=100", "callbacks.checkpoint.every=1"),
    *("schedule=constant", "+optimizer.eps=1e-7", "+callbacks.record.double=true"),
]


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts():
    """The names of two namespaces whose ``eth`` are connected, with the addresses 10.0.0.1 and 10.0.0.2."""
    names = [f"grpo-{os.getpid()}-{host}" for host in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("-n", names[0], "link", "add", "eth", "type", "veth", "peer", "name", "eth", "netns", names[1])
            for number, name in enumerate(names, start=1):
                ip("-n", name, "addr", "add", f"10.0.0.{number}/24", "dev", "eth")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "eth", "up")
            ip("netns", "exec", names[0], "true")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"two hosts need network namespaces: {error} {getattr(error, 'stderr', '')}")
        yield names
    finally:
        for name in names:
            subprocess.run(f"ip netns pids {name} | xargs -r kill -9; ip netns del {name}", shell=True, check=False)


def launch(hosts: list[str], directory: Path, *overrides: str) -> list[subprocess.Popen]:
    """train.py by torchrun on both, each in its own directory; of the run's the second can write ``train.log`` only."""
    run = directory / "run"
    run.mkdir(exist_ok=True)
    (run / "train.log").touch()
    guard = "mount --bind $0 $0; mount -o remount,bind,ro $0; mount --bind $0/train.log $0/train.log; "
    guard = f'set -e; {guard} mount -o remount,bind,rw $0/train.log; exec "$@"'
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth"}
    record = ["+callbacks.record._target_=tests.support.processes.Record", f"+callbacks.record.path={run}.jsonl"]
    own = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_nodes=2", f"hydra.run.dir={run}"]
    started = []
    for rank, host in enumerate(hosts):
        place = directory / host
        place.mkdir(exist_ok=True)
        program = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
        program += [f"--node_rank={rank}", "--master_addr=10.0.0.1", "--master_port=29500", str(ROOT / "train.py")]
        shell = ["ip", "netns", "exec", host, "sh", "-c", guard if rank else 'exec "$@"', str(run)]
        with (directory / f"{host}.log").open("w") as log:
            streams = {"stdout": log, "stderr": log, "env": environment, "cwd": place}
            started.append(subprocess.Popen([*shell, *program, *SETTINGS, *record, *own, *overrides], **streams))
    return started


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """As whole runs of several processes are compared in test_processes.py, in float64."""
    assert found.keys() == expected.keys()
    gaps = {name: float((found[name] - value).norm() / value.norm()) for name, value in expected.items()}
    assert {name: gap for name, gap in gaps.items() if gap > 1e-7} == {}


def test_two_hosts_train_what_one_process_does_and_the_first_one_writes(hosts, tmp_path):
    began = time.monotonic()
    started = launch(hosts, tmp_path, "steps=3")
    assert [process.wait(300) for process in started] == [0, 0], (tmp_path / f"{hosts[1]}.log").read_text()[-4000:]
    print(f"two hosts: {time.monotonic() - began:.0f} s")
    finish(start(1, tmp_path, "cpu", {"alone": [*SETTINGS, "steps=3"]}))
    check_equal(*(load_file(tmp_path / run / "export" / "model.safetensors") for run in ("run", "alone")))
    first, second = ((tmp_path / f"{host}.log").read_text() for host in hosts)
    assert first.count("step 3/3") == 1
    assert "step " not in second
    assert not [*(tmp_path / hosts[0]).iterdir(), *(tmp_path / hosts[1]).iterdir()]


def test_a_lost_host_or_network_ends_the_run_which_continues_on_one_host_and_on_two(hosts, tmp_path):
    last, step = tmp_path / "run" / "checkpoints" / "last.ckpt", 0
    for loss in ("network", "host"):
        started = launch(hosts, tmp_path, "steps=100", "checkpoint=last")
        enough = step + 2
        wait_for(lambda: last.exists() and read(last)["step"]["completed"] >= enough, started[0])  # noqa: B023
        began = time.monotonic()
        if loss == "network":
            ip("-n", hosts[1], "link", "set", "eth", "down")
        else:
            subprocess.run(["kill", "-9", *ip("netns", "pids", hosts[1]).split()], check=True)
        statuses = [process.wait(60) for process in started]
        print(f"{loss} lost: ended after {time.monotonic() - began:.0f} s")
        assert statuses == ([1, 1] if loss == "network" else [1, -9])
        ip("-n", hosts[1], "link", "set", "eth", "up")
        printed = (tmp_path / f"{hosts[0]}.log").read_text()
        [sentence] = [line for line in printed.splitlines() if "lost contact" in line]
        assert sentence.startswith("[ERROR] lost contact with another process of the run: it was killed, ")
        assert sentence.endswith(f"(traceback: {tmp_path}/run/train.log)")
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert (summary["status"], summary["error"] in sentence) == ("failed", True)
        step = read(last)["step"]["completed"] + 2
        finish(start(1, tmp_path, "cpu", {"run": [*SETTINGS, f"steps={step}", "checkpoint=last"]}))
    started = launch(hosts, tmp_path, f"steps={step + 2}", "checkpoint=last")
    assert [process.wait(300) for process in started] == [0, 0]
    finish(start(1, tmp_path, "cpu", {"whole": [*SETTINGS, f"steps={step + 2}"]}))
    check_equal(read_weights(last), read_weights(tmp_path / "whole" / "checkpoints" / "last.ckpt"))
