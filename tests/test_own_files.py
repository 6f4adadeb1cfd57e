"""Files of the user's where a run writes: none is lost."""

import json
import os
from pathlib import Path

import pytest
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.tensorboard import SummaryWriter

from grpo_lightning.checkpoint import tensorboard
from grpo_lightning.checkpoint.lock import Locked, held
from grpo_lightning.distributed.strategies import FullyShardedStrategy
from tests.support.provocations import provocation
from tests.support.running import small_run
from tests.test_callbacks import scalars
from tests.test_damaged import contents


@provocation(
    '`callbacks.export.directory=` a project whose README.md says "trained with grpo-lightning", or an export with a '
    "file of one's own",
    "refused before the first step; every file stays",
)
@pytest.mark.parametrize("own", [".git/HEAD", "notes.txt", "train.py", "link"])
def test_a_directory_with_more_than_an_export_is_not_replaced(own, tmp_path):
    project = tmp_path / "project"
    small_run(tmp_path / "first", f"callbacks.export.directory={project}")
    (project / own).parent.mkdir(exist_ok=True)
    if own == "link":
        (project / own).symlink_to(tmp_path)
    else:
        (project / own).write_text("mine")
    before = contents(project)
    with pytest.raises(ValueError, match=rf"callbacks.export.directory=.*nothing else, such as {Path(own).parts[0]}"):
        small_run(tmp_path / "second", f"callbacks.export.directory={project}")
    assert contents(project) == before
    assert not (tmp_path / "second" / "checkpoints").exists()


@provocation("a directory `.NAME.partial` of one's own beside the export", "stays; one of a killed export is removed")
def test_a_hidden_directory_beside_an_export_stays(tmp_path):
    own, cut = tmp_path / ".mine.partial", tmp_path / ".other.partial"
    for directory, name in ((own, "notes.txt"), (cut, "model.safetensors")):
        directory.mkdir()
        (directory / name).write_text("mine")
    small_run(tmp_path / "run", f"callbacks.export.directory={tmp_path}/mine")
    small_run(tmp_path / "run2", f"callbacks.export.directory={tmp_path}/other")
    assert (own / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run2", "mine", "other", own.name}


def logged(directory: Path, step: int, suffix: str = "") -> Path:
    before = set(directory.rglob("*"))
    writer = SummaryWriter(str(directory), filename_suffix=suffix)
    writer.add_scalar("x", 1.0, step)
    writer.close()
    return next(path for path in directory.rglob("events*") if path not in before)


@provocation("`hydra.run.dir=.` where tensorboard/ holds logs of one's own", "they stay, also beyond links")
def test_a_new_run_removes_no_foreign_logs(tmp_path):
    run, logs = tmp_path / "run", tmp_path / "run" / "tensorboard"
    elsewhere = logged(tmp_path / "elsewhere", 1, tensorboard.SUFFIX)
    foreign = [logged(logs, 1), logged(logs / "exp1", 1), logged(logs / "exp2", 1, tensorboard.SUFFIX), elsewhere]
    (logs / elsewhere.name).symlink_to(elsewhere)
    killed = logged(logs, 7, tensorboard.SUFFIX)  # of a run that was killed before its first checkpoint
    before = {path: path.read_bytes() for path in foreign}
    small_run(run, "steps=1")
    assert {path: path.read_bytes() for path in before} == before
    assert not killed.exists()
    assert [path for path in logs.glob(f"*{tensorboard.SUFFIX}") if not path.is_symlink()]
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "tensorboard").symlink_to(tmp_path / "elsewhere")
    small_run(linked, "steps=1")
    assert elsewhere.read_bytes() == before[elsewhere]


def test_a_run_from_another_one_s_checkpoint_removes_no_foreign_logs(tmp_path):
    small_run(tmp_path / "one", "steps=1")
    foreign = logged(tmp_path / "two" / "tensorboard", 1)
    small_run(tmp_path / "two", "steps=2", f"checkpoint={tmp_path}/one/checkpoints/last.ckpt")
    assert foreign.exists()
    small_run(tmp_path / "one", "steps=2", "checkpoint=last")
    assert [step for step, _ in scalars(tmp_path / "one" / "tensorboard")["reward/total"]] == [1, 2]


@provocation(
    "two runs with the same `callbacks.checkpoint.directory`", "the second is refused; the first's checkpoints stay"
)
def test_the_checkpoints_of_another_run_are_not_overwritten(tmp_path):
    shared = tmp_path / "shared"
    given = f"callbacks.checkpoint.directory={shared}"
    small_run(tmp_path / "one", given, "steps=1")
    before = contents(shared)
    with pytest.raises(ValueError, match=rf"{given}: holds the checkpoints of a run; allowed is a directory without"):
        small_run(tmp_path / "two", given, "steps=1")
    small_run(tmp_path / "three", "steps=1")
    for run, checkpoint in (("two", tmp_path / "three/checkpoints/last.ckpt"), ("one", "last"), ("three", "last")):
        with pytest.raises(ValueError, match=rf"{given}: holds the checkpoints of a run"):
            small_run(tmp_path / run, given, "steps=2", f"checkpoint={checkpoint}")
    assert contents(shared) == before
    small_run(tmp_path / "one", given, "steps=2", f"checkpoint={shared}/last.ckpt")
    assert contents(shared) != before


@provocation("`checkpoints/last_good.ckpt`, a copy of one's own, beside sharded checkpoints", "stays")
def test_sharded_checkpoints_remove_only_their_own(tmp_path, monkeypatch):
    def write(self, checkpoint, target, storage_options=None):
        Path(target).mkdir()

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


@provocation("`.lock` in the run directory is a link to a file", "refused; the file is as before")
def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for target in (mine, tmp_path / "nothing"):
        run = tmp_path / f"run_{target.name}"
        run.mkdir()
        (run / ".lock").symlink_to(target)
        with pytest.raises(Locked, match=r"\.lock in it is a link, which is not written to; allowed is"), held(run):
            pass
        assert os.readlink(run / ".lock") == str(target)
    assert mine.read_text() == "mine"
    assert not (tmp_path / "nothing").exists()


@provocation("`checkpoint=last` on a finished run whose summary.json lacks its metrics", "says that the run has ended")
def test_a_summary_without_metrics_is_taken(tmp_path):
    small_run(tmp_path, "steps=1")
    summary = json.loads((tmp_path / "summary.json").read_text())
    del summary["metrics"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert small_run(tmp_path, "steps=1", "checkpoint=last").metrics == {}
