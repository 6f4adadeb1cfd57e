"""Checkpoints that are damaged, missing, of another program, or made to run code."""

import io
import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from grpo_lightning.checkpoint import leftovers
from grpo_lightning.checkpoint.io import check, read, weights
from grpo_lightning.checkpoint.resume import chosen
from tests.support.composed import composed
from tests.support.provocations import provocation
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
    monkeypatch.setenv("GRPO_LIGHTNING_BEGUN", json.dumps(["python", "train.py"]))


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


def flipped(content: bytes) -> bytes:
    """One bit of a weight is another one: the directory of the file is whole."""
    place = content.index(b"data/0") + 2000
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def pickled(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


DAMAGE = {
    "0 bytes": (lambda content, mark: b"", r"is no checkpoint \(0 bytes\)"),
    "500 bytes of it": (lambda content, mark: content[:500], r"is cut off: 500 bytes"),
    "a word that it is one of nine archives": (
        lambda content, mark: content[: (place := content.rindex(b"PK\x06\x07") + 16)] + b"\x09" + content[place + 1 :],
        r"is cut off: \d+ bytes",
    ),
    "all but its last 1000 bytes": (lambda content, mark: content[:-1000], r"is cut off: \d+ bytes"),
    "5,000,000 zeros": (lambda content, mark: bytes(5_000_000), r"is no checkpoint \(5000000 bytes\)"),
    "a text": (lambda content, mark: b"hello\n" * 100, r"is no checkpoint \(600 bytes\)"),
    "a foreign pickle": (lambda content, mark: pickle.dumps(Code(mark)), r"is no checkpoint"),
    "a pickle that runs code, as torch writes it": (
        lambda content, mark: pickled({"step": {"completed": 4}, "code": Code(mark)}),
        r"holds other objects than tensors and plain values",
    ),
    "a foreign dict": (lambda content, mark: pickled({"model": torch.ones(3)}), r"was not written by this program"),
    "a foreign list": (lambda content, mark: pickled([1, 2]), r"was not written by this program"),
    "one bit of a weight changed": (lambda content, mark: flipped(content), r"is damaged: its .*data/0"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=provocation(
                f"`checkpoint=last` where last.ckpt is {name}",
                "the file is named with what is wrong, and the newest whole checkpoint with its command",
            ),
        )
        for name in DAMAGE
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_best_one_offered(name, run, tmp_path):
    damage, expected = DAMAGE[name]
    content = damage((run / LAST).read_bytes(), tmp_path / "code ran")
    (run / LAST).unlink()
    (run / LAST).write_bytes(content)
    step = read(run / "checkpoints" / "best.ckpt")["step"]["completed"]
    before = contents(run)
    for mode in ("fit", "validate", "export"):
        config, given = CONFIG | {"mode": mode}, ["steps=4", "checkpoint=last"]
        with pytest.raises(ValueError, match=rf"checkpoint='{run / LAST}' {expected}") as refusal:
            chosen(config, run, directory_given=True, overrides=given)
        command = f"python train.py steps=4 hydra.run.dir={run} checkpoint={run}/checkpoints/best.ckpt"
        assert str(refusal.value).endswith(f"best.ckpt of step {step}, is continued by: {command}")
    with pytest.raises(ValueError, match=expected):
        chosen(CONFIG | {"checkpoint": str(run / LAST)}, tmp_path / "other", directory_given=True)
    assert not (tmp_path / "code ran").exists()
    assert contents(run) == before


@provocation(
    "`checkpoint=last` where last.ckpt is gone, or a link to nothing, and a stranger's checkpoint has a name that "
    "reads `… is continued by: python train.py; touch x`",
    "the name stands in the command only, as one quoted word of one line",
)
def test_a_name_tells_no_command(run):
    theirs = "best.ckpt of step 9, is continued by: python train.py; touch x\n[INFO] (see train.log).ckpt"
    (run / LAST).rename(run / "checkpoints" / theirs)
    (run / "checkpoints" / "best.ckpt").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"checkpoint=last") as refusal:
            chosen(CONFIG, run, directory_given=True, overrides=["steps=4"])
        told, _, command = str(refusal.value).partition(" is continued by: ")
        assert told.endswith("starts anew, and the newest whole checkpoint, of step 4,")
        assert "\n" not in str(refusal.value)
        start, quote, word = command.partition("$'")
        assert (start, quote) == (f"python train.py steps=4 hydra.run.dir={run} ", "$'")
        assert re.fullmatch(r"checkpoint=\"?/[^'\"]*\.ckpt\"?'", word)
        (run / LAST).unlink(missing_ok=True)
        (run / LAST).symlink_to("x\n[INFO] the run is continued by:\n  touch x\n")


@provocation(
    "`checkpoint=theirs/last.ckpt`, or a part of a sharded checkpoint, that is a link to a checkpoint of the user's: "
    "an export would hold its weights",
    "refused in one sentence; links in the same directory are followed",
)
@pytest.mark.parametrize("mode", ["fit", "export"])
def test_a_checkpoint_is_no_link_to_another_place(mode, run, tmp_path):
    config, theirs = CONFIG | {"mode": mode}, tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "last.ckpt").symlink_to(run / LAST)
    (theirs / "parts").mkdir()
    (theirs / "parts" / ".metadata").write_bytes(b"")
    (theirs / "parts" / "__0_0.distcp").symlink_to(run / LAST)

    def chosen_of(file):
        return chosen(config | {"checkpoint": str(file)}, tmp_path / "new", directory_given=True, overrides=[])

    for file, name in ((theirs / "last.ckpt", "last.ckpt"), (theirs / "parts", "__0_0.distcp")):
        with pytest.raises(
            ValueError, match=rf"^checkpoint={file}: \S+/{name} is a link, by which it is \S+{LAST}; allowed"
        ):
            chosen_of(file)
    shutil.copy(run / LAST, theirs / "x.ckpt")
    (theirs / "y.ckpt").symlink_to("x.ckpt")
    assert chosen_of(theirs / "y.ckpt") == theirs / "y.ckpt"
    (theirs / "checkpoints").symlink_to(run / "checkpoints")
    told = r"last\.ckpt: \S+/theirs/checkpoints is a link, by which it is \S+/last\.ckpt; allowed"
    with pytest.raises(ValueError, match=told):
        chosen_of(theirs / LAST)
    with pytest.raises(ValueError, match=told):
        chosen(config | {"checkpoint": "last"}, theirs, directory_given=True, overrides=[])


@provocation("`checkpoint=last` where last.ckpt is empty, then the command that is offered", "refused, then continued")
def test_the_checkpoint_that_is_offered_continues_the_run(run):
    (run / LAST).write_bytes(b"")
    before = contents(run)
    with pytest.raises(ValueError, match="last.ckpt' is no checkpoint"):
        small_run(run, *RUN, "steps=5", "checkpoint=last")
    assert contents(run) == before
    small_run(run, *RUN, "steps=5", f"checkpoint={run}/checkpoints/best.ckpt")
    assert read(run / LAST)["step"]["completed"] == 5


@pytest.mark.slow
@provocation(
    "last.ckpt is gone, best.ckpt is there; with and without `checkpoint=last`", "refused, best.ckpt is offered"
)
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
    with pytest.raises(ValueError, match=r"no other whole checkpoint stands beside it; another hydra.run.dir= starts"):
        small_run(run, *RUN, "checkpoint=last")


STAGED = [
    *(".last.ckpt.123", ".best.ckpt.9", ".last.ckpt.4/part"),
    *("../.summary.json.77", "../.summary_validate.json.7", "../.export.partial/x"),
]


@provocation("files in writing of processes that were killed", "removed when the run continues; others stay")
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
    assert leftovers.sweep(tmp_path) == []  # no link: which of them is the run's cannot be told
    (own / "last.ckpt").symlink_to("last_3_0.ckpt")
    (own / "best.ckpt").symlink_to("last_1_0.ckpt")
    leftovers.sweep(tmp_path, keep=own / "last_4_0.ckpt")
    assert {path.name for path in own.iterdir() if not path.is_symlink()} == {
        *("last_1_0.ckpt", "last_3_0.ckpt", "last_4_0.ckpt")
    }


def parts(directory: Path, metadata: object, data: bytes = b"") -> Path:
    directory.mkdir(parents=True)
    torch.save({"step": {"completed": 3}}, directory / "meta.pt")
    (directory / "__0_0.distcp").write_bytes(data)
    (directory / ".metadata").write_bytes(metadata if isinstance(metadata, bytes) else pickle.dumps(metadata))
    return directory


def described(length: int = 0, **place) -> Metadata:
    place = {"relative_path": "__0_0.distcp", "offset": 0, "length": length} | place
    kinds = {"optimizer_0.param_groups.0.lr": BytesStorageMetadata()}
    return Metadata(kinds, storage_data={MetadataIndex(next(iter(kinds))): _StorageInfo(**place)})


@provocation("a directory of parts whose `.metadata` or parts run code when unpickled", "refused; nothing ran")
def test_a_directory_of_parts_runs_no_code(tmp_path):
    mark = tmp_path / "code ran"
    hidden = described(10)
    hidden.planner_data = Code(mark)
    unsafe = pickled(Code(mark))
    plain = pickle.dumps(Code(mark))
    safe = pickled(0.001)
    for name, directory in {
        "plain": parts(tmp_path / "a", Code(mark)),
        "inside": parts(tmp_path / "b", hidden, b"0123456789"),
        "in a part": parts(tmp_path / "c", described(len(unsafe)), unsafe),
        "in a part, as pickle": parts(tmp_path / "d", described(len(plain)), plain),
    }.items():
        for reader in (check, weights):
            with pytest.raises(ValueError, match="could run code"):
                reader(directory)
        last = tmp_path / name / LAST
        last.parent.mkdir(parents=True)
        directory.rename(last)
        for config in (composed("checkpoint=last", "mode=export"), composed("checkpoint=last", "trainer=fsdp")):
            with pytest.raises(ValueError, match="could run code"):
                chosen(config, tmp_path / name, directory_given=True)
    assert not mark.exists()
    check(parts(tmp_path / "good", described(len(safe)), safe))


@pytest.mark.parametrize(
    "place, expected",
    [
        ({"relative_path": "../other/x"}, r"has a .metadata that this program has not written \(../other/x\)"),
        ({"transform_descriptors": ["zstd"]}, r"has a .metadata that this program has not written"),
        ({"relative_path": "__1_0.distcp"}, r"lacks __1_0.distcp"),
        ({"length": 10_000}, r"is cut off: __0_0.distcp has \d+ bytes"),
        ({"offset": 10_000}, r"is cut off: __0_0.distcp has \d+ bytes"),
        ({"offset": "0"}, r"is damaged: TypeError in __0_0.distcp"),
        ({"length": 100}, r"is damaged: .* in __0_0.distcp"),
    ],
)
def test_a_damaged_directory_of_parts_is_named(place, expected, tmp_path):
    safe = pickled(0.001)
    with pytest.raises(ValueError, match=expected):
        check(parts(tmp_path / "x", described(**{"length": len(safe)} | place), safe))


def test_a_directory_of_parts_that_was_not_finished_is_named(tmp_path):
    directory = parts(tmp_path / "x", b"")
    with pytest.raises(ValueError, match=r"has a .metadata that cannot be read"):
        check(directory)
    (directory / ".metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match=r"has a .metadata that cannot be read"):
        check(directory)
    (directory / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"lacks .metadata: it was not written to its end"):
        check(directory)
    (directory / "meta.pt").unlink()
    with pytest.raises(ValueError, match=r"lacks meta.pt"):
        check(directory)


@provocation(
    "`optimizer=adamw_8bit` on a run of `optimizer=adamw`", "refused: the optimizer of the checkpoint is named"
)
def test_an_optimizer_of_another_kind_is_refused(run):
    summary = json.loads((run / "summary.json").read_text())
    with pytest.raises(
        ValueError, match=r"optimizer._target_=bitsandbytes.optim.AdamW8bit: allowed is torch.optim.AdamW"
    ):
        small_run(run, *RUN, "steps=5", "checkpoint=last", "optimizer=adamw_8bit")
    after = json.loads((run / "summary.json").read_text())
    assert (after["steps"], after["status"]) == (4, "failed")
    assert after["seconds"] > summary["seconds"]
