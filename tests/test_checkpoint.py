"""Checkpoint files: damaged, foreign and sharded ones, the policy they are of, what kills leave behind, the lock."""

import errno
import fcntl
import io
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import grpo_lightning as grpo
from grpo_lightning.checkpoint import io as checkpoint_io
from grpo_lightning.checkpoint import resume
from grpo_lightning.checkpoint.io import CannotSave, read
from grpo_lightning.checkpoint.lock import LOCK_FILE, DirectoryLocked, is_locked, lock, lock_run
from grpo_lightning.checkpoint.resume import (
    base_fingerprint,
    check_adapter,
    find_checkpoint,
    policy_settings,
    recorded_run,
)
from grpo_lightning.config.settings import command_name
from grpo_lightning.distributed.strategies import FullyShardedStrategy
from tests.support.composed import ROOT, composed
from tests.support.running import SMALL, contents, small_run

RUN = ("steps=4", "validation.every=2", "callbacks.checkpoint.every=1", "policy.seed=7")
LAST = Path("checkpoints", "last.ckpt")
CONFIG = {"checkpoint": "last", "mode": "fit", "steps": 6, "trainer": {}}


class Code:
    """Runs when it is unpickled: makes a directory."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.mkdir, (self.mark,)


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """The command line is begun by ``python train.py``, and nobody waits long for a lock."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr("grpo_lightning.checkpoint.lock.PATIENCE", 0.5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained") / "run"
    small_run(directory, *RUN)
    return directory


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def pickled(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


DAMAGE = {
    "cut off": (lambda content, mark: content[:-1000], r"is cut off or no checkpoint \(\d+ bytes\)"),
    "a pickle": (lambda content, mark: pickle.dumps(Code(mark)), r"is cut off or no checkpoint"),
    "zeros within": (
        lambda content, mark: content[:200] + bytes(800) + content[1000:],
        r"is damaged \(\d+ bytes\), or",
    ),
    "code": (
        lambda content, mark: pickled({"step": {"completed": 4}, "code": Code(mark)}),
        r"is damaged \(\d+ bytes\), or holds more than tensors and plain values",
    ),
    "another program's": (lambda content, mark: pickled({"model": torch.ones(3)}), r"was not written by this program"),
}


def test_a_damaged_checkpoint_is_named_and_the_newest_readable_one_offered(run, tmp_path):
    whole = (run / LAST).read_bytes()
    (run / LAST).unlink()  # else best.ckpt, which is the same file, would be damaged, too
    step = read(run / "checkpoints" / "best.ckpt")["step"]["completed"]
    command = f"{command_name()} steps=4 hydra.run.dir={run} checkpoint={run}/checkpoints/best.ckpt"
    for damage, expected in DAMAGE.values():
        (run / LAST).write_bytes(damage(whole, tmp_path / "code ran"))
        with pytest.raises(ValueError, match=rf"checkpoint={run / LAST} {expected}") as refusal:
            find_checkpoint(CONFIG, run, directory_given=True, overrides=["steps=4", "checkpoint=last"])
        assert str(refusal.value).endswith(f"best.ckpt of step {step}, is continued by: {command}")
    assert not (tmp_path / "code ran").exists()


def test_the_checkpoint_that_is_offered_continues_the_run(run):
    (run / LAST).unlink()
    with pytest.raises(ValueError, match=r"best.ckpt of step \d, is continued by: python train.py"):
        small_run(run, *RUN, "checkpoint=null")
    small_run(run, *RUN, "steps=5", f"checkpoint={run}/checkpoints/best.ckpt")
    assert read(run / LAST)["step"]["completed"] == 5
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="there is no other readable checkpoint beside it"):
        small_run(run, *RUN, "checkpoint=last")


def test_what_a_killed_process_has_left_is_removed(run):
    folder = run / "checkpoints"
    staged = (".last.ckpt.123", ".best.ckpt.9", ".last.ckpt.4/part", "last_2_0.ckpt/meta.pt")
    staged += ("../.summary.json.77", "../.summary_validate.json.7", "../.export.partial/x")
    for name in (*staged, "mine.ckpt", "../.notes", ".last.ckpt.x"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    small_run(run, *RUN, "steps=5", "checkpoint=last")
    assert {path.name for path in folder.iterdir()} == {"last.ckpt", "best.ckpt", "mine.ckpt", ".last.ckpt.x"}
    assert {path.name for path in run.iterdir() if path.name.startswith(".")} == {".notes"}


def sharded(directory: Path, metadata: bytes = b"") -> Path:
    """A sharded checkpoint of no weights."""
    directory.mkdir(parents=True)
    torch.save({"step": {"completed": 3}}, directory / "meta.pt")
    (directory / ".metadata").write_bytes(metadata)
    return directory


def test_a_sharded_checkpoint_is_for_the_trainer_that_wrote_it(tmp_path):
    target = sharded(tmp_path / "checkpoints" / "last_3_0.ckpt")
    last = tmp_path / LAST
    last.symlink_to("last_3_0.ckpt")
    config, fsdp = composed("checkpoint=last"), composed("checkpoint=last", "trainer=fsdp")
    with pytest.raises(ValueError, match=r"last.ckpt is a sharded checkpoint: use trainer=fsdp, or mode=export"):
        find_checkpoint(config, tmp_path, directory_given=True)
    assert find_checkpoint({**config, "mode": "export"}, tmp_path, directory_given=True) == last
    assert find_checkpoint(fsdp, tmp_path, directory_given=True) == last
    for name in ("last_1_0.ckpt", "last_2_0.ckpt", "last_4_0.ckpt"):
        sharded(tmp_path / "checkpoints" / name)
    (last.parent / "best.ckpt").symlink_to("last_1_0.ckpt")
    resume.remove_stale_files(tmp_path, keep=last.parent / "last_4_0.ckpt")
    left = {path.name for path in last.parent.iterdir() if not path.is_symlink()}
    assert left == {"last_1_0.ckpt", "last_3_0.ckpt", "last_4_0.ckpt"}
    (target / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"last.ckpt was not written to its end: .metadata is missing"):
        find_checkpoint(fsdp, tmp_path, directory_given=True)


def test_a_sharded_checkpoint_from_elsewhere_is_not_unpickled(tmp_path):
    foreign = sharded(tmp_path / "downloaded" / "last_3_0.ckpt", pickle.dumps(Code(tmp_path / "code ran")))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link.ckpt").symlink_to(foreign)
    for path in (foreign, tmp_path / "run" / "link.ckpt"):
        for words in (["trainer=fsdp"], ["mode=export"]):
            config = composed(f"checkpoint={path}", *words)
            with pytest.raises(ValueError, match=r"sharded checkpoints hold pickles and are read from this run's own"):
                find_checkpoint(config, tmp_path / "run", directory_given=True)
    assert not (tmp_path / "code ran").exists()


def test_an_optimizer_that_cannot_continue_is_refused(run, tmp_path, caplog):
    with pytest.raises(ValueError, match=r"optimizer._target_=bitsandbytes.optim.AdamW8bit cannot .* torch.optim.Adam"):
        small_run(run, *RUN, "steps=5", "checkpoint=last", "optimizer=adamw_8bit")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["status"]) == (4, "failed")
    path = tmp_path / "last.ckpt"
    content = {"events": {}, "config": {}}
    torch.save({"run": content, "step": {"completed": 1, "processes": 2, "sharded": False}}, path)
    fsdp = SimpleNamespace(world_size=2, strategy=FullyShardedStrategy(timeout=1))
    with pytest.raises(ValueError, match=r"last.ckpt is of an adapter trained without trainer=fsdp"):
        recorded_run(path, fsdp, {}, is_adapter=True)
    assert recorded_run(path, SimpleNamespace(world_size=1), {}, is_adapter=False) == content
    assert "the checkpoint is of a run in 2 processes, which now continues in 1" in caplog.text


def test_an_adapter_belongs_to_its_base():
    policy = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    policy[0].requires_grad_(False)
    weights = {f"policy.{name}": weight for name, weight in policy.state_dict().items()}
    base = base_fingerprint(policy)
    check_adapter(policy, base, {"state_dict": weights})  # all weights: no base is needed
    trained = {"policy.1.weight": weights["policy.1.weight"]}
    check_adapter(policy, base, {"state_dict": trained, "base": base})
    for other in ({}, {"base": None}, {"base": "0123"}):
        with pytest.raises(ValueError, match=r"the checkpoint's adapter was trained on other base weights \("):
            check_adapter(policy, base, {"state_dict": trained} | other)
    with pytest.raises(ValueError, match="lacks weights that policy.adapter has, 1 such as policy.1.weight"):
        check_adapter(policy, base, {"state_dict": {"policy.0.weight": None}, "base": base})
    with pytest.raises(ValueError, match="holds an adapter only: set policy.adapter"):
        check_adapter(nn.Linear(2, 2), None, {"state_dict": trained, "base": base})


LOADED = {
    **{"_target_": "grpo_lightning.policy.loading.load", "path": "/models/a", "trust_remote_code": False},
    "adapter": {"r": 8},
}
REFERENCE = {"_target_": "grpo_lightning.reference.frozen_copy"}


def settings_of(config, overrides, current, directory):
    torch.save({"step": {"completed": 1}, "run": {"config": config}}, directory / "x.ckpt")
    named = {"mode": "export", "checkpoint": str(directory / "x.ckpt"), "run_dir": str(directory)}
    return policy_settings(named, overrides, current)


def test_an_export_or_validation_takes_the_policy_from_the_checkpoint(trained, tmp_path):
    best = f"checkpoint={trained}/checkpoints/best.ckpt"
    run = grpo.compose("mode=export", best, run_dir=tmp_path / "export")
    assert run.config["module"]["policy"] == run.config["policy"]
    assert run.config["policy"]["seed"] == 7
    run.export()
    stored = torch.load(trained / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(run.module.state_dict()[name], value) for name, value in stored.items())
    task = [word for word in SMALL if not word.startswith(("policy", "rollout.max_new_tokens"))]
    last = f"checkpoint={trained}/{LAST}"
    metrics = grpo.compose("mode=validate", last, *task, run_dir=tmp_path / "validate").validate()
    recorded = read(trained / LAST)["step"]["metrics"]
    assert {n: v for n, v in metrics.items() if n.startswith("val/")} == {
        n: v for n, v in recorded.items() if n.startswith("val/")
    }
    given = grpo.compose("mode=validate", last, *task, "rollout.max_new_tokens=5", run_dir=tmp_path / "given")
    assert given.config["validation"]["max_new_tokens"] == given.config["rollout"]["max_new_tokens"] == 5


def test_what_the_user_gives_wins(tmp_path):
    values = {"policy.path": "/moved/a", "policy.adapter.r": 4, "rollout.max_new_tokens": 7}
    recorded = {"policy": LOADED, "reference": REFERENCE, "rollout": {"max_new_tokens": 100}}
    recorded |= {"validation": {"max_new_tokens": 50}, "loss": {"kl_coef": 0.5}}
    words = ["policy.path=/moved/a", "++policy.adapter.r=4", "rollout.max_new_tokens=7"]
    assert settings_of(recorded, words, values.get, tmp_path) == {
        "policy": LOADED | {"path": "/moved/a", "adapter": {"r": 4}},
        "reference": REFERENCE,
        "validation.max_new_tokens": 50,
        "loss.kl_coef": 0.5,
    }
    assert settings_of(recorded, ["policy=gpt2", "reference@reference=none"], {}.get, tmp_path) == {}
    assert policy_settings({"mode": "fit", "checkpoint": "last", "run_dir": str(tmp_path)}, (), {}.get) == {}


def test_what_cannot_be_taken_over_is_asked_for(tmp_path):
    part = {"_target_": "x.Y", "model": {"_target_": "grpo_lightning.composition.live_object"}}
    with pytest.raises(ValueError, match="object of a Python prog"):
        settings_of({"policy": part}, [], {}.get, tmp_path)
    for key, value, message in (
        ("path", "REDACTED", r"its policy.path is REDACTED, .*: give policy.path=… yourself"),
        ("path", "${oc.env:HOME}", r"its policy.path is \$\{oc.env:HOME\}, which is not"),
        ("attn_implementation", "some/kernel", "is some/kernel, which would run code"),
        ("trust_remote_code", True, r"its policy.trust_remote_code is True, which .* \(policy.path=/models/a\)"),
    ):
        policy = LOADED | {key: value}
        with pytest.raises(ValueError, match=message):
            settings_of({"policy": policy}, [], {}.get, tmp_path)
        taken = settings_of({"policy": policy}, [f"policy.{key}=…"], {f"policy.{key}": "mine"}.get, tmp_path)
        assert taken["policy"] == policy | {key: "mine"}


def test_a_policy_of_another_shape_is_named_by_its_settings(trained, tmp_path):
    words = (f"checkpoint={trained}/checkpoints/best.ckpt", *SMALL, "policy.hidden_size=32", "mode=export")
    with pytest.raises(ValueError, match=r"^checkpoint=.*best.ckpt: its policy has other settings: ") as error:
        grpo.compose(*words, run_dir=tmp_path).export()
    assert "policy.hidden_size was 16 and is 32 (" in str(error.value)


HOLDER = (
    "import sys, time; from pathlib import Path; from grpo_lightning.checkpoint.lock import lock\n"
    "with lock(Path(sys.argv[1])): print('locked', flush=True); time.sleep(float(sys.argv[2]))"
)


def holder(directory: Path, seconds: float = 60) -> subprocess.Popen:
    """A process that has the lock, once this returns."""
    command = [sys.executable, "-c", HOLDER, str(directory), str(seconds)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_second_run_is_refused_and_a_lock_ends_with_its_process(run):
    other = holder(run)
    (run / "checkpoints" / f".last.ckpt.{other.pid}").write_text("in writing")
    before = contents(run)
    expected = rf"hydra.run.dir=.*: process {other.pid} on {socket.gethostname()} uses it since 20"
    with pytest.raises(DirectoryLocked, match=expected):
        small_run(run, "steps=9", "checkpoint=last")
    assert contents(run) == before
    assert is_locked(run)
    small_run(run, *RUN, "mode=validate", "checkpoint=last")  # which only reads
    other.kill()
    with lock(run):
        assert json.loads((run / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert not (run / LOCK_FILE).exists()
    (run / LOCK_FILE).write_text('{"pid": 1}')
    assert not is_locked(run)


def test_a_process_keeps_out_of_its_own_directory_and_workers_do_not_have_the_lock(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with lock(tmp_path):
        for path in (tmp_path, tmp_path / "link"):
            with pytest.raises(DirectoryLocked, match=f"process {os.getpid()} uses it already"), lock(path):
                pass
        worker = subprocess.Popen(["sleep", "60"], close_fds=False)
        forked = os.fork()
        if not forked:
            time.sleep(60)
            os._exit(0)
    try:
        holder(tmp_path, seconds=0).wait()
    finally:
        for pid in (worker.pid, forked):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_directories_elsewhere_are_one_runs(tmp_path, monkeypatch):
    config = {"sampler": {"directory": str(tmp_path / "weights")}}
    config["callbacks"] = {"checkpoint": {"directory": str(tmp_path / "checkpoints")}}
    with lock_run(config, tmp_path / "one"):
        for key in ("sampler", "callbacks"):
            again = lock_run({key: config[key]}, tmp_path / "two")
            with pytest.raises(DirectoryLocked, match=rf"^{key}\.(checkpoint\.)?directory=.*: "), again:
                pass
    with lock_run(config, tmp_path / "two"):
        pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DirectoryLocked, match="file.run: the directory cannot be written to"),
        lock(tmp_path / "file" / "run"),
    ):
        pass

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with lock(tmp_path):  # a file system without locks
        assert is_locked(tmp_path)


# --- disks that are too small, or full


@pytest.mark.parametrize("how", ["fsync", "archive"])
def test_a_full_disk_costs_the_step_that_is_saved_and_leaves_the_older_files(how, tmp_path, monkeypatch):
    words = ("steps=5", "callbacks.checkpoint.every=1", "policy.seed=0")
    saved, save, usage = [], torch.save, shutil.disk_usage

    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def saves(*arguments):  # of steps 0, 1 and 2
        saved.append(arguments)
        if len(saved) > 3 and how == "fsync":
            patch.setattr(os, "fsync", fail)
        elif len(saved) > 3:
            arguments[1].write(b"half")
            raise RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0")
        save(*arguments)

    def free(place):
        return usage(place)._replace(free=5_000 if len(saved) > 3 else 10**9)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", saves)
        patch.setattr(shutil, "disk_usage", free)
        expected = r"last.ckpt was not written, the disk is full: it takes 51.1 kB, and 5 kB are free; the checkpoints"
        with pytest.raises(CannotSave, match=expected):
            small_run(tmp_path / "run", *words)
    assert not list((tmp_path / "run").rglob(".*.ckpt.*"))
    assert read(tmp_path / "run" / LAST)["step"]["completed"] == 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    small_run(tmp_path / "run", *words, "checkpoint=last")
    small_run(tmp_path / "whole", *words)
    one, other = (read(tmp_path / name / LAST)["state_dict"] for name in ("run", "whole"))
    assert all(torch.equal(one[name], value) for name, value in other.items())


def test_a_summary_that_cannot_be_written_hides_nothing(tmp_path, monkeypatch, caplog):
    def replace(path, *arguments, plain=Path.replace):
        if "summary" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(path, *arguments)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr("tests.support.rewards.vowels", lambda completions: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        small_run(tmp_path)
    assert "summary.json cannot be written: No space left on device" in caplog.text
    assert not list(tmp_path.glob(".summary*"))


@pytest.mark.slow
def test_the_size_of_a_checkpoint_is_predicted(tmp_path):
    large = ("policy.hidden_size=256", "policy.intermediate_size=1024", "rollout.max_new_tokens=2")
    for optimizer in ("adamw", "adamw_8bit"):
        module = small_run(tmp_path / optimizer, *large, f"optimizer={optimizer}")
        written = (tmp_path / optimizer / LAST).stat().st_size
        predicted = checkpoint_io.checkpoint_bytes(module.policy, module.optimizer, all_weights=True)
        assert written * 0.9 < predicted < written * 1.1


def test_a_disk_without_room_for_two_checkpoints_is_refused_before_the_first_step(run, tmp_path, monkeypatch):
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(place)._replace(free=60_000))
    with pytest.raises(CannotSave, match=r"checkpoints: a checkpoint takes 51.1 kB, .* are free; make room for two"):
        small_run(tmp_path / "new", *RUN)
    assert not (tmp_path / "new" / "checkpoints").exists()
    small_run(run, *RUN, "steps=5", "checkpoint=last")  # there is one already: one more has room
