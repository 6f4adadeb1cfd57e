"""Checkpoints that are damaged, missing, of another program, or made to run code."""

import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from grpo_lightning.checkpoint import rewind
from grpo_lightning.checkpoint.io import read
from grpo_lightning.checkpoint.resume import find_checkpoint
from grpo_lightning.config.shell import command_name
from tests.support.composed import composed
from tests.support.running import small_run

RUN = ("steps=4", "validation.every=2", "callbacks.checkpoint.every=1")
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
    """The command line is begun by ``python train.py``."""
    monkeypatch.setattr("sys.argv", ["train.py"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained") / "run"
    small_run(directory, *RUN)
    return directory


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def pickled(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


DAMAGE = {
    "empty": (lambda content, mark: b"", r"is cut off or no checkpoint \(0 bytes\)"),
    "cut off": (lambda content, mark: content[:-1000], r"is cut off or no checkpoint \(\d+ bytes\)"),
    "zeros": (lambda content, mark: bytes(5_000_000), r"is cut off or no checkpoint \(5000000 bytes\)"),
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


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_best_one_offered(name, run, tmp_path):
    damage, expected = DAMAGE[name]
    content = damage((run / LAST).read_bytes(), tmp_path / "code ran")
    (run / LAST).unlink()
    (run / LAST).write_bytes(content)
    step = read(run / "checkpoints" / "best.ckpt")["step"]["completed"]
    before = contents(run)
    for mode in ("fit", "validate", "export"):
        config, given = CONFIG | {"mode": mode}, ["steps=4", "checkpoint=last"]
        with pytest.raises(ValueError, match=rf"checkpoint={run / LAST} {expected}") as refusal:
            find_checkpoint(config, run, directory_given=True, overrides=given)
        command = f"{command_name()} steps=4 hydra.run.dir={run} checkpoint={run}/checkpoints/best.ckpt"
        assert str(refusal.value).endswith(f"best.ckpt of step {step}, is continued by: {command}")
    with pytest.raises(ValueError, match=expected):
        find_checkpoint(CONFIG | {"checkpoint": str(run / LAST)}, tmp_path / "other", directory_given=True)
    assert not (tmp_path / "code ran").exists()
    assert contents(run) == before


def test_an_address_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint=http://a/b.ckpt is not a local file: download it first"):
        find_checkpoint(CONFIG | {"checkpoint": "http://a/b.ckpt"}, tmp_path, directory_given=True)


@pytest.mark.slow
def test_a_run_directory_and_its_checkpoints_may_be_links_to_a_scratch_disk(tmp_path):
    scratch = tmp_path / "scratch"
    (scratch / "checkpoints").mkdir(parents=True)
    (tmp_path / "run").symlink_to(scratch / "run")
    (scratch / "run").mkdir()
    (scratch / "run" / "checkpoints").symlink_to(scratch / "checkpoints")
    small_run(tmp_path / "run", *RUN)
    small_run(tmp_path / "run", *RUN, "steps=5", "checkpoint=last")
    assert read(scratch / "checkpoints" / "last.ckpt")["step"]["completed"] == 5
    assert (tmp_path / "run" / "checkpoints").is_symlink()


def test_the_checkpoint_that_is_offered_continues_the_run(run):
    (run / LAST).write_bytes(b"")
    before = contents(run)
    with pytest.raises(ValueError, match=r"last.ckpt is cut off or no checkpoint"):
        small_run(run, *RUN, "steps=5", "checkpoint=last")
    assert contents(run) == before
    small_run(run, *RUN, "steps=5", f"checkpoint={run}/checkpoints/best.ckpt")
    assert read(run / LAST)["step"]["completed"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["last", "null"])
def test_a_run_without_its_last_checkpoint_is_not_overwritten(checkpoint, run, tmp_path):
    (run / LAST).unlink()
    before = contents(run)
    with pytest.raises(ValueError, match=r"best.ckpt of step \d, is continued by: python train.py"):
        small_run(run, *RUN, f"checkpoint={checkpoint}")
    small_run(tmp_path / "other", *RUN)
    with pytest.raises(ValueError, match="already holds another run than"):
        small_run(run, *RUN, f"checkpoint={tmp_path}/other/checkpoints/last.ckpt")
    assert contents(run) == before


def test_where_nothing_is_whole_that_is_said(run):
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="there is no other readable checkpoint beside it"):
        small_run(run, *RUN, "checkpoint=last")


STAGED = [
    *(".last.ckpt.123", ".best.ckpt.9", ".last.ckpt.4/part"),
    *("../.summary.json.77", "../.summary_validate.json.7", "../.export.partial/x"),
]


def test_what_a_killed_process_had_in_writing_is_swept(run):
    own = run / "checkpoints"
    for name in (*STAGED, "mine.ckpt", "../.notes", ".last.ckpt.x", "last_2_0.ckpt/meta.pt"):
        (own / name).parent.mkdir(exist_ok=True)
        (own / name).write_text("")
    small_run(run, *RUN, "steps=5", "checkpoint=last")
    assert {path.name for path in own.iterdir()} == {"last.ckpt", "best.ckpt", "mine.ckpt", ".last.ckpt.x"}
    hidden = {path.name for path in run.iterdir() if path.name.startswith(".")}
    assert hidden == {".notes"}


def test_directories_that_a_checkpoint_leads_to_stay(tmp_path):
    own = tmp_path / "checkpoints"
    for name in ("last_1_0.ckpt", "last_2_0.ckpt", "last_3_0.ckpt", "last_4_0.ckpt"):
        (own / name).mkdir(parents=True)
    assert rewind.remove_stale_files(tmp_path) == []  # no link: which of them is the run's cannot be told
    (own / "last.ckpt").symlink_to("last_3_0.ckpt")
    (own / "best.ckpt").symlink_to("last_1_0.ckpt")
    rewind.remove_stale_files(tmp_path, keep=own / "last_4_0.ckpt")
    assert {path.name for path in own.iterdir() if not path.is_symlink()} == {
        *("last_1_0.ckpt", "last_3_0.ckpt", "last_4_0.ckpt")
    }


def parts(directory: Path) -> Path:
    """A sharded checkpoint of no weights."""
    directory.mkdir(parents=True)
    torch.save({"step": {"completed": 3}}, directory / "meta.pt")
    (directory / ".metadata").write_bytes(b"")
    return directory


def test_a_sharded_checkpoint_is_for_the_trainer_that_wrote_it(tmp_path):
    target = parts(tmp_path / "checkpoints" / "last_3_0.ckpt")
    last = tmp_path / LAST
    last.symlink_to("last_3_0.ckpt")
    config, sharding = composed("checkpoint=last"), composed("checkpoint=last", "trainer=fsdp")
    with pytest.raises(ValueError, match=r"last.ckpt is a sharded checkpoint: use trainer=fsdp, or mode=export"):
        find_checkpoint(config, tmp_path, directory_given=True)
    assert find_checkpoint({**config, "mode": "export"}, tmp_path, directory_given=True) == last
    assert find_checkpoint(sharding, tmp_path, directory_given=True) == last
    (target / ".metadata").unlink()
    with pytest.raises(
        ValueError, match=r"last.ckpt was not written to its end: .metadata is missing; there is no other"
    ):
        find_checkpoint(sharding, tmp_path, directory_given=True)
    shutil.rmtree(target)
    with pytest.raises(ValueError, match=r"checkpoint=last: there is no \S+last.ckpt$"):
        find_checkpoint(config, tmp_path, directory_given=True)


def test_an_optimizer_of_another_kind_is_refused(run):
    summary = json.loads((run / "summary.json").read_text())
    with pytest.raises(ValueError, match=r"optimizer._target_=bitsandbytes.optim.AdamW8bit cannot .* torch.optim.Adam"):
        small_run(run, *RUN, "steps=5", "checkpoint=last", "optimizer=adamw_8bit")
    after = json.loads((run / "summary.json").read_text())
    assert (after["steps"], after["status"]) == (4, "failed")
    assert after["seconds"] > summary["seconds"]


def test_a_sharded_checkpoint_from_elsewhere_is_not_unpickled(tmp_path):
    stranger = parts(tmp_path / "downloaded" / "last_3_0.ckpt")
    (stranger / ".metadata").write_bytes(pickle.dumps(Code(tmp_path / "code ran")))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link.ckpt").symlink_to(stranger)
    for path in (stranger, tmp_path / "run" / "link.ckpt"):
        for words in (["trainer=fsdp"], ["mode=export"], ["mode=validate", "trainer=fsdp"]):
            config = composed(f"checkpoint={path}", *words)
            with pytest.raises(ValueError, match=r"sharded checkpoints hold pickles and are read from this run's own"):
                find_checkpoint(config, tmp_path / "run", directory_given=True)
        with pytest.raises(ValueError, match="or export it where it was made"):
            small_run(tmp_path / "run", "mode=export", f"checkpoint={path}")
    assert not (tmp_path / "code ran").exists()
    own = tmp_path / "run" / "checkpoints" / "last_3_0.ckpt"
    shutil.copytree(stranger, own)
    config = composed(f"checkpoint={own}", "mode=export")
    assert find_checkpoint(config, tmp_path / "run", directory_given=True) == own
