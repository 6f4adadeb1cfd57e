"""Files of the user's where a run writes: none is lost."""

import json

import pytest
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.tensorboard import SummaryWriter

import grpo_lightning as grpo
from grpo_lightning.callbacks.export import check_replaceable
from grpo_lightning.checkpoint import rewind
from grpo_lightning.console import escape_formula, write_atomic
from grpo_lightning.distributed.strategies import FullyShardedStrategy
from tests.support.running import SMALL, small_run
from tests.test_callbacks import scalars
from tests.test_damaged import contents


def test_a_directory_with_more_than_an_export_is_not_replaced(tmp_path):
    export, key = tmp_path / "export", "callbacks.export.directory"
    assert check_replaceable(export) == export
    export.mkdir()
    assert check_replaceable(export) == export
    (export / "README.md").write_text("Post-trained with grpo-lightning 0.2.0")
    (export / "model.safetensors").write_text("")
    assert check_replaceable(export) == export
    (tmp_path / "link").symlink_to(export)
    assert check_replaceable(tmp_path / "link") == tmp_path / "link"
    (export / ".git").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    for place in (export, tmp_path / "mine", tmp_path / "mine" / "thesis.tex"):
        with pytest.raises(ValueError, match=rf"{key}={place}: allowed is a directory that does not exist, is empty"):
            check_replaceable(place)


@pytest.mark.slow
def test_a_run_may_lie_behind_links_and_export_through_one(tmp_path):
    for name in ("scratch", "scratch/models"):
        (tmp_path / name).mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    (tmp_path / "latest").symlink_to(tmp_path / "scratch" / "models")
    for steps in (1, 2):
        words = (f"steps={steps}", f"callbacks.export.directory={tmp_path}/latest", "checkpoint=last")
        small_run(tmp_path / "run", *words, "logger=[tensorboard,csv]")
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "scratch" / "models" / "config.json").exists()
    assert json.loads((tmp_path / "scratch" / "summary.json").read_text())["steps"] == 2


def logged(directory, step, suffix=""):
    before = set(directory.rglob("*"))
    writer = SummaryWriter(str(directory), filename_suffix=suffix)
    writer.add_scalar("x", 1.0, step)
    writer.close()
    return next(path for path in directory.rglob("events*") if path not in before)


@pytest.mark.slow
def test_a_new_run_removes_no_foreign_logs(tmp_path):
    logs = tmp_path / "tensorboard"
    foreign = [logged(logs, 1), logged(logs / "exp1", 1), logged(logs / "exp2", 1, rewind.EVENTS_SUFFIX)]
    killed = logged(logs, 7, rewind.EVENTS_SUFFIX)  # of a run that was killed before its first checkpoint
    before = {path: path.read_bytes() for path in foreign}
    small_run(tmp_path, "steps=1")
    assert {path: path.read_bytes() for path in before} == before
    assert not killed.exists()
    assert list(logs.glob(f"*{rewind.EVENTS_SUFFIX}"))
    small_run(tmp_path / "two", "steps=2", f"checkpoint={tmp_path}/checkpoints/last.ckpt")
    small_run(tmp_path, "steps=2", "checkpoint=last")
    assert {path: path.read_bytes() for path in before} == before
    steps = [step for step, _ in scalars(logs)["reward/total"]]
    assert sorted(steps) == [1, 2]  # files of the same second are read in any order


def test_a_file_is_replaced_whole(tmp_path):
    file = tmp_path / "summary.json"
    for text in ("{}", b"{ }"):
        write_atomic(file, text)
    write_atomic(tmp_path / "other", "ä", by="staged")
    assert (file.read_bytes(), (tmp_path / "other").read_text(encoding="utf-8")) == (b"{ }", "ä")
    (tmp_path / "folder" / "x").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "folder", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "other", "summary.json"]


def test_no_text_of_a_table_is_a_formula():
    texts = ["=cmd|' /C calc'!A0", "@x", "+x", "-x", "\t=x", "\r=x"]
    assert [escape_formula(text) for text in texts] == [f"'{text}" for text in texts]
    plain = ["a=b", "-2", "+1.5e-3", "-.5", "", "1", 3, -2.5, None]
    assert [escape_formula(value) for value in plain] == plain


@pytest.mark.slow
def test_lightning_keeps_no_checkpoints_of_its_own(tmp_path):
    keeper = f"+callbacks.a={{_target_: lightning.pytorch.callbacks.ModelCheckpoint, dirpath: {tmp_path}/2/a}}"
    for number, (words, found) in enumerate(
        (
            ([], {"checkpoints/last.ckpt", "checkpoints/best.ckpt"}),
            (["~callbacks.checkpoint"], set()),
            (["~callbacks.checkpoint", keeper], {"a/epoch=0-step=1.ckpt"}),
        )
    ):
        run = tmp_path / str(number)
        grpo.compose(*SMALL, "steps=1", *words, run_dir=run).fit()
        assert {str(path.relative_to(run)) for path in run.rglob("*.ckpt")} == found


@pytest.mark.slow
def test_the_checkpoints_of_another_run_are_not_overwritten(tmp_path):
    shared = tmp_path / "shared"
    given = f"callbacks.checkpoint.directory={shared}"
    small_run(tmp_path / "one", given, "steps=1")
    before = contents(shared)
    with pytest.raises(ValueError, match=f"{given} holds the checkpoints of a run: name an empty"):
        small_run(tmp_path / "two", given, "steps=1")
    assert contents(shared) == before
    small_run(tmp_path / "one", given, "steps=2", f"checkpoint={shared}/last.ckpt")
    assert contents(shared) != before


def test_sharded_checkpoints_remove_only_their_own(tmp_path, monkeypatch):
    def write(self, checkpoint, target, storage_options=None):
        (tmp_path / target).mkdir()

    monkeypatch.setattr(ModelParallelStrategy, "save_checkpoint", write)
    monkeypatch.setattr(FullyShardedStrategy, "broadcast", lambda self, name: name)
    monkeypatch.setattr(FullyShardedStrategy, "barrier", lambda self: None)
    monkeypatch.setattr(FullyShardedStrategy, "is_global_zero", True)
    for name in ("last_good.ckpt", "last_1_good.ckpt", "last_1_0.ckpt.old"):
        (tmp_path / name).mkdir()
    kept = {path.name for path in tmp_path.iterdir()}
    strategy = FullyShardedStrategy(timeout=1, sharded_checkpoints=True)
    for step in (1, 2):
        strategy.save_checkpoint({"step": {"completed": step}}, tmp_path / "last.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == kept | {"last.ckpt", "last_2_0.ckpt"}
