"""One run at a time in a directory."""

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_lightning.checkpoint.lock import LOCK_FILE, Locked, is_locked, lock, lock_run
from tests.support.composed import ROOT
from tests.support.running import SMALL, small_run


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("grpo_lightning.checkpoint.lock.PATIENCE", 0.5)


HOLDER = (
    "import sys, time; from pathlib import Path; from grpo_lightning.checkpoint.lock import lock\n"
    "with lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(float(sys.argv[2]))"
)


def holder(directory: Path, seconds: float = 60) -> subprocess.Popen:
    """A process that holds the lock, once this returns."""
    command = [sys.executable, "-c", HOLDER, str(directory), str(seconds)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def other(tmp_path):
    process = holder(tmp_path)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("overrides", [(), ("checkpoint=last",)])
def test_a_second_run_is_refused_and_changes_nothing(overrides, tmp_path, other, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / f".last.ckpt.{other.pid}").write_text("in writing")
    (tmp_path / "summary.json").write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != LOCK_FILE}
    expected = rf"hydra.run.dir=.*: process {other.pid} on {socket.gethostname()} uses it since 20"
    with pytest.raises(Locked, match=expected):
        small_run(tmp_path, *overrides)
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "summary.json", LOCK_FILE}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoint", "rollouts"])
def test_a_second_run_with_the_same_place_for_its_files_is_refused(name, tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    both = (f"callbacks.checkpoint.directory={shared}", f"callbacks.rollouts.directory={shared}")
    small_run(tmp_path / "first", *both)
    shutil.rmtree(shared)
    other = holder(shared)
    with pytest.raises(Locked, match=rf"callbacks.{name}.directory={shared}: process {other.pid} on .* uses"):
        small_run(tmp_path / "second", *both[name == "rollouts" :][:1])
    other.kill()
    other.wait()
    assert {path.name for path in shared.iterdir()} == {LOCK_FILE}


def test_a_lock_ends_with_its_process(tmp_path, other):
    other.kill()
    with lock(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.slow
def test_a_process_keeps_out_of_its_own_directory(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with lock(tmp_path / "run"):
        for name in ("run", "link"):
            with pytest.raises(Locked, match=f"process {os.getpid()} on "), lock(tmp_path / name):
                pass
        with pytest.raises(subprocess.TimeoutExpired):  # still held, by the first one
            subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path / "run"), "0"], cwd=ROOT, timeout=1.5)
    with lock(tmp_path / "run"):
        pass


def test_workers_do_not_hold_the_lock(tmp_path):
    with lock(tmp_path):
        worker = subprocess.Popen(["sleep", "60"], close_fds=False)
        forked = os.fork()
        if not forked:
            time.sleep(60)
            os._exit(0)
    try:
        holder(tmp_path, seconds=0).wait()
        with lock(tmp_path):
            pass
    finally:
        for pid in (worker.pid, forked):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_place_that_is_no_directory_is_refused_by_its_key(tmp_path):
    (tmp_path / "file").write_text("")
    expected = r"hydra.run.dir=.*file.run: the directory cannot be written to"
    with pytest.raises(Locked, match=expected), lock(tmp_path / "file" / "run"):
        pass


@pytest.mark.slow
def test_validation_looks_at_a_run_that_trains(tmp_path):
    small_run(tmp_path, "steps=2")
    process = holder(tmp_path)
    try:
        small_run(tmp_path, "mode=validate", "checkpoint=last")
        command = [sys.executable, "train.py", *SMALL, f"hydra.run.dir={tmp_path}", "steps=9", "checkpoint=last"]
        before = (tmp_path / "summary.json").read_bytes()
        refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert refused.returncode == 1
        assert f"process {process.pid} on" in refused.stderr
        assert (tmp_path / "summary.json").read_bytes() == before
    finally:
        process.kill()
        process.wait()


def test_the_weights_for_a_server_are_one_runs(tmp_path):
    config = {"sampler": {"directory": str(tmp_path / "weights")}}
    with lock_run(config, tmp_path / "one"):
        again = lock_run(config, tmp_path / "two")
        with pytest.raises(Locked, match=r"^sampler\.directory=.*/weights: "), again:
            pass
        with lock_run({"sampler": {"directory": None}}, tmp_path / "two"):
            pass
    with lock_run(config, tmp_path / "two"):
        pass
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_file_system_without_locks_is_trained_on(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with lock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
