"""Disks that are full, or too small from the beginning."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from grpo_lightning.checkpoint import io
from grpo_lightning.checkpoint.io import read
from tests.kills import difference
from tests.support.disk import on_small_disk
from tests.support.running import SMALL, contents, small_run

TASK = ("steps=3", "data.prompts_per_step=4", "rollout.group_size=4", "validation.every=3", "data.validation_size=16")


def leftovers(directory: Path) -> list[str]:
    return [str(path) for path in directory.rglob(".*") if path.name not in (".hydra", ".lock")]


def ended(directory: Path) -> tuple[str, int]:
    summary = json.loads((directory / "summary.json").read_text())
    return summary["status"], summary["steps"]


@pytest.mark.slow
def test_a_disk_without_room_for_two_checkpoints_is_refused_before_the_first_step(tmp_path):
    place = tmp_path / "run"
    done = on_small_disk(16_000_000, place, "train.py", *TASK, "trainer=cpu", f"hydra.run.dir={place}")
    assert done.returncode == 1, done.stderr[-2000:]
    assert f"{place}/checkpoints: a checkpoint takes 9.79 MB, and " in done.stderr
    assert "are free; make room for two" in done.stderr
    assert "step 0/" not in done.stderr
    assert ended(place) == ("failed", 0)
    assert not (place / "checkpoints").exists()


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_the_step_that_is_saved(tmp_path):
    place = tmp_path / "run"
    filling = f"+callbacks.fill={{_target_: tests.support.disk.Fill, directory: {place}, step: 4, left: 20000}}"
    run = ["steps=6", "callbacks.checkpoint.every=1", "policy.seed=0"]
    done = on_small_disk(2_000_000, place, "train.py", *SMALL, *run, filling, f"hydra.run.dir={place}")
    assert done.returncode == 1, done.stderr[-2000:]
    told = f"{place}/checkpoints/last.ckpt was not written (No space left on device): it takes "
    sentence = done.stderr[done.stderr.index(told) :].splitlines()[0]
    assert "kB are free on its disk; last.ckpt and best.ckpt of earlier steps stay" in sentence
    assert ended(place) == ("failed", 4)
    assert leftovers(place) == []
    assert read(place / "checkpoints" / "last.ckpt")["step"]["completed"] == 3
    (place / "filler").unlink()
    small_run(place, *run, "checkpoint=last")
    small_run(tmp_path / "unbroken", *run)
    one, other = (read(path / "checkpoints" / "last.ckpt")["state_dict"] for path in (place, tmp_path / "unbroken"))
    assert difference(one, other) is None


def no_room(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("how", ["fsync", "archive"])
def test_a_full_disk_is_told_by_whatever_error_it_comes(how, tmp_path, monkeypatch):
    written, save, usage = [], torch.save, io.shutil.disk_usage

    def saved(*arguments):  # of steps 0, 1 and 2
        written.append(arguments)
        if len(written) > 3 and how == "fsync":
            monkeypatch.setattr(os, "fsync", no_room)
        elif len(written) > 3:
            raise RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0")
        save(*arguments)

    def free(place):
        return usage(place)._replace(free=5_000 if len(written) > 3 else 10**9)

    monkeypatch.setattr(torch, "save", saved)
    monkeypatch.setattr(io.shutil, "disk_usage", free)
    expected = r"last.ckpt was not written \(No space left on device\): it takes \d+ kB, and 5 kB are free"
    with pytest.raises(io.CannotSave, match=expected):
        small_run(tmp_path, "steps=5", "callbacks.checkpoint.every=1")
    assert leftovers(tmp_path) == []
    assert read(tmp_path / "checkpoints" / "last.ckpt")["step"]["completed"] == 2
    assert ended(tmp_path)[0] == "failed"


def test_another_error_while_saving_stays_what_it_is(tmp_path):
    with pytest.raises(RuntimeError, match="no disk"), io.explain_write_errors(tmp_path / "x", 1, kept=lambda: ""):
        raise RuntimeError("no disk")
    with (
        pytest.raises(io.CannotSave, match=r"x was not written \(Read-only file system\); all stays"),
        io.explain_write_errors(tmp_path / "x", 1, kept=lambda: "all stays"),
    ):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_summary_that_cannot_be_written_hides_nothing(tmp_path, monkeypatch, caplog):
    write = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda path, *a, **k: no_room() if "summary" in path.name else write(path, *a, **k)
    )
    monkeypatch.setattr("tests.support.rewards.vowels", lambda completions: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        small_run(tmp_path)
    assert "summary.json cannot be written: No space left on device" in caplog.text
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_an_export_without_room_leaves_the_old_one(tmp_path, monkeypatch):
    small_run(tmp_path, "steps=1")
    before = contents(tmp_path / "export")
    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", no_room)
    told = r"export was not written .* the checkpoints stay, and mode=export checkpoint=last"
    with pytest.raises(io.CannotSave, match=told):
        small_run(tmp_path, "steps=2", "checkpoint=last")
    assert contents(tmp_path / "export") == before
    assert leftovers(tmp_path) == []
    assert read(tmp_path / "checkpoints" / "last.ckpt")["step"]["completed"] == 2


@pytest.mark.slow
def test_the_size_of_a_checkpoint_is_predicted(tmp_path):
    large = ("policy.hidden_size=256", "policy.intermediate_size=1024", "rollout.max_new_tokens=2")
    for optimizer in ("adamw", "adamw_8bit"):
        module = small_run(tmp_path / optimizer, *large, f"optimizer={optimizer}")
        written = (tmp_path / optimizer / "checkpoints" / "last.ckpt").stat().st_size
        predicted = io.checkpoint_bytes(module.policy, module.optimizer, all_weights=True)
        assert written * 0.97 < predicted < written * 1.1

    def wants_more(parameters):
        raise TypeError("wants more")

    assert io.optimizer_bytes(wants_more) == 8  # as AdamW
    assert io.optimizer_bytes(lambda parameters: torch.optim.SGD(parameters, lr=1)) == 0


def test_a_checkpoint_that_is_there_leaves_room_for_one_more(tmp_path, monkeypatch):
    directory = tmp_path / "checkpoints"

    def check(free: int) -> None:
        monkeypatch.setattr(io.shutil, "disk_usage", lambda place: type("Usage", (), {"free": free}))
        io.check_room(directory, checkpoint=100_000)

    check(200_000)
    with pytest.raises(io.CannotSave, match=r"takes 100 kB, and 200 kB are free; make room for two"):
        check(199_999)
    directory.mkdir()
    (directory / "last.ckpt").write_text("")
    check(100_000)
    with pytest.raises(io.CannotSave, match=r"make room for one more"):
        check(99_999)
