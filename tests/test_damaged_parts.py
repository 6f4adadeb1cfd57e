"""Directories of parts made to run code behind the back of what checks them."""

import copyreg
import functools
import os
import pathlib
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import serialization
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from grpo_lightning.checkpoint.io import check, weights
from grpo_lightning.checkpoint.resume import chosen
from grpo_lightning.distributed import parts
from grpo_lightning.distributed.strategies import FullyShardedStrategy
from grpo_lightning.settings import ConfigError
from grpo_lightning.settings import check as check_settings
from tests.support.composed import NOWHERE, composed
from tests.support.provocations import provocation
from tests.test_damaged import LAST, Code, pickled

METADATA = "torch.distributed.checkpoint.metadata"


class Replaced:
    """Is unpickled as an ``OrderedDict`` whose ``items`` gives nothing."""

    def __init__(self, content: dict) -> None:
        self.content = content

    def __reduce__(self):
        return OrderedDict, ([list(pair) for pair in self.content.items()],), {"items": torch.Size}


@pytest.fixture(autouse=True)
def as_this_program_writes():
    """Also what a test pickles itself."""
    with parts.plainly_written():
        yield


@pytest.fixture
def written(tmp_path):
    """As torch writes it, with a list beside the weights."""
    directory = tmp_path / "parts"
    content = {"state_dict": {"w": torch.arange(2.0)}, "plain": [1, 2]}
    _save_state_dict(content, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    torch.save({"step": {"completed": 3}}, directory / "meta.pt")
    return directory


def changed(directory: Path, change) -> None:
    described = pickle.loads((directory / ".metadata").read_bytes())
    change(described)
    (directory / ".metadata").write_bytes(pickle.dumps(described))


def poisoned(directory: Path, mark: Path) -> None:
    """What is no tensor becomes code, in a part of its own."""
    (directory / "code.distcp").write_bytes(pickled(Code(mark)))
    changed(directory, functools.partial(moved, directory, "code.distcp"))


def moved(directory: Path, name: str, described) -> None:
    """What is no tensor lies in a file of its own."""
    for index, place in described.storage_data.items():
        if isinstance(described.state_dict_metadata[index.fqn], BytesStorageMetadata):
            place.relative_path, place.offset = name, 0
            place.length = (directory / name).stat().st_size


def as_tensor(described) -> None:
    for kind in described.state_dict_metadata.values():
        vars(kind).setdefault("chunks", [])


def unseen(described) -> None:
    described.storage_data = Replaced(described.storage_data)


def unseen_kinds(described) -> None:
    described.state_dict_metadata = Replaced(described.state_dict_metadata)


def no_places(described) -> None:
    described.storage_data = torch.Size([])


@provocation(
    "a directory of parts whose `.metadata` passes code in a part off as a tensor, or hides its list of parts",
    "refused; nothing ran",
)
@pytest.mark.parametrize("trick", [lambda described: None, as_tensor, unseen, unseen_kinds, no_places])
def test_no_trick_in_the_metadata_lets_code_in_a_part_run(trick, written, tmp_path):
    check(written)
    assert torch.equal(weights(written)["w"], torch.arange(2.0))
    mark = tmp_path / "code ran"
    poisoned(written, mark)
    changed(written, trick)
    for reader in (check, weights):
        with pytest.raises(ValueError, match=r"could run code|cannot be read"):
            reader(written)
    last = tmp_path / "run" / LAST
    last.parent.mkdir(parents=True)
    written.rename(last)
    for config in (composed("checkpoint=last", "mode=export"), composed("checkpoint=last", "trainer=fsdp")):
        with pytest.raises(ValueError, match=r"could run code|cannot be read"):
            chosen(config, tmp_path / "run", directory_given=True)
    assert not mark.exists()


class Failing:
    """Cannot be unpickled, by torch's reader; it names only what a true ``.metadata`` may name."""

    def __reduce__(self):
        return _MEM_FORMAT_ENCODING, (99,)


@provocation(
    "a directory of parts whose `.metadata` makes torch read `__0.metadata`, with code in it, instead",
    "refused; nothing ran",
)
def test_no_other_metadata_is_read_where_the_first_one_cannot_be(written, tmp_path):
    mark = tmp_path / "code ran"
    changed(written, lambda described: setattr(described, "planner_data", Failing()))
    for name in ("__0.metadata", "__0.MetaData", "__0.meta\u200cdata"):  # the same file to some file systems
        (written / name).write_bytes(pickle.dumps(Code(mark)))
        for reader in (check, weights, FullyShardedStrategy(timeout=1).load_checkpoint):
            with pytest.raises(ValueError, match=r"parts' has a __0.(?i:metadata|meta.*data), which .* could run code"):
                reader(written)
        (written / name).unlink()
    assert not mark.exists()


@provocation("a checkpoint in parts, of which one holds sparse or nested tensors beside the weights", "is not read")
@pytest.mark.parametrize(
    "value", [torch.zeros(2, 2).to_sparse(), torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])]
)
def test_what_lies_beside_the_weights_is_dense(value, written):
    torch.save([{"eps": value}], written / "code.distcp")
    assert parts.problem(written) is None
    changed(written, functools.partial(moved, written, "code.distcp"))
    told = (
        "holds objects that are not loaded, since they could run code, beside tensors and plain values in code.distcp"
    )
    assert parts.problem(written) == told


def called(*words):
    """What a program has registered for its own pickles, or for tensors of a device of its own."""
    raise AssertionError(words)


@provocation(
    "a checkpoint in parts whose `.metadata` calls, by a number, a function that the user's program has given to "
    "Python's `copyreg`",
    "refused; it is not called",
)
@pytest.mark.parametrize("opcode", [b"\x82\x07", b"\x83\x07\x00", b"\x84\x07\x00\x00\x00"])
def test_no_number_stands_for_a_function(opcode, written):
    copyreg.add_extension(__name__, "called", 7)
    sys.modules.setdefault(__name__, SimpleNamespace(called=called))
    try:
        assert pickle.loads(b"\x80\x02\x82\x07.").__name__ == "called"  # which Python remembers
        (written / ".metadata").write_bytes(b"\x80\x02" + opcode + b"(X\x01\x00\x00\x00xtR.")
        assert "which is not loaded, since it could run code" in parts.problem(written)
        with pytest.raises(pickle.UnpicklingError, match="a pickle that names .*called"), parts.values_only():
            dcp.FileSystemReader(written).read_metadata()
        assert pickle.loads(b"\x80\x02\x82\x07.").__name__ == "called"
    finally:
        copyreg.remove_extension(__name__, "called", 7)


@provocation(
    "a checkpoint in parts with a tensor whose place is a text, which torch gives to what the user's program has "
    "registered with `torch.serialization.register_package`",
    "refused; it is not called",
)
def test_no_place_of_a_tensor_reaches_a_program(written, monkeypatch):
    def restored(_, location):
        return None if location == "cpu" else called(location)

    monkeypatch.setattr(serialization, "_package_registry", [(5, called, restored), *serialization._package_registry])
    monkeypatch.setattr(serialization, "location_tag", lambda _: "cpu")
    torch.save([{"eps": torch.zeros(3)}], written / "own.distcp")
    change = functools.partial(moved, written, "own.distcp")
    changed(written, change)
    assert parts.problem(written) is None
    monkeypatch.setattr(serialization, "location_tag", lambda _: "of_mine()")
    torch.save([{"eps": torch.zeros(3)}], written / "own.distcp")
    changed(written, change)
    assert parts.problem(written).endswith("beside tensors and plain values in own.distcp")
    told = "the checkpoint's parts cannot be read: .*a file of weights holds other objects than dense tensors"
    with pytest.raises(ValueError, match=told), parts.values_only():
        dcp.load({"plain": None}, storage_reader=dcp.FileSystemReader(written), no_dist=True)


@provocation(
    "a checkpoint in parts, of which one has a pickle that runs code, or a sparse tensor, in place of a weight",
    "refused in one sentence when it is read; nothing ran",
)
@pytest.mark.parametrize("kind", ["code", "sparse", "expanded"])
def test_weights_in_parts_are_dense(kind, written, tmp_path):
    expanded = torch.zeros(1).expand(2)
    content = {"code": Code(tmp_path / "ran"), "sparse": torch.ones(2).to_sparse(), "expanded": expanded}[kind]
    (written / "code.distcp").write_bytes(pickled(content))

    def change(described):
        for index, place in described.storage_data.items():
            if isinstance(described.state_dict_metadata[index.fqn], TensorStorageMetadata):
                place.relative_path, place.offset = "code.distcp", 0
                place.length = (written / "code.distcp").stat().st_size

    changed(written, change)
    told = "a tensor that is overlapping itself" if kind == "expanded" else "other objects than dense tensors"
    expected = f"a file of weights holds {told}"
    with pytest.raises(ValueError, match=rf"^the checkpoint's parts cannot be read: {expected}"):
        weights(written)
    with pytest.raises(ValueError, match=rf"^the checkpoint's parts cannot be read: {expected}"), parts.values_only():
        dcp.load({"state_dict": {"w": torch.zeros(2)}}, checkpoint_id=written)
    assert not (tmp_path / "ran").exists()


@provocation(
    "a directory of parts that cannot be listed (mode 0311, as unpacked), with code in `__0.metadata`",
    "refused; nothing ran",
)
def test_parts_that_cannot_be_listed_are_not_read(written, monkeypatch):
    def unlisted(directory):
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr(Path, "iterdir", unlisted)
    for reader in (check, weights, FullyShardedStrategy(timeout=1).load_checkpoint):
        with pytest.raises(ValueError, match="is a directory whose files cannot be listed: Permission denied"):
            reader(written)


@pytest.mark.parametrize("name", ["__0.metadata", ".metadata"])
def test_torch_reads_no_code_of_metadata_that_nobody_has_checked(name, written, tmp_path, monkeypatch):
    mark = tmp_path / "code ran"
    changed(written, lambda described: setattr(described, "planner_data", Failing()))
    (written / name).write_bytes(pickle.dumps(Code(mark)))
    monkeypatch.setattr(parts, "problem", lambda directory: None)
    with pytest.raises(BaseException, match=r"global metadata read failed|Load state dict"):
        weights(written)
    load = FullyShardedStrategy(timeout=1).load_checkpoint
    monkeypatch.setattr(
        "lightning.pytorch.strategies.ModelParallelStrategy.load_checkpoint", lambda *args, **options: dcp_read(written)
    )
    with pytest.raises(BaseException, match=r"global metadata read failed|Load state dict"):
        load(written)
    assert not mark.exists()
    with pytest.raises(BaseException, match=r"."):
        dcp_read(written)  # by torch alone
    assert mark.exists()


def dcp_read(directory: Path) -> None:
    dcp.load({"plain": [0, 0]}, storage_reader=dcp.FileSystemReader(directory), no_dist=True)


@provocation("a directory of parts whose `.metadata` torch cannot read, though it is harmless", "refused by its name")
def test_metadata_that_torch_cannot_read_is_named(written):
    changed(written, lambda described: setattr(described, "planner_data", Failing()))
    for reader in (check, weights, FullyShardedStrategy(timeout=1).load_checkpoint):
        with pytest.raises(ValueError, match=r"^checkpoint='.*parts' has a .metadata that cannot be read: 99"):
            reader(written)


def test_a_part_that_is_exchanged_after_the_check_runs_no_code(written, tmp_path, monkeypatch):
    mark = tmp_path / "code ran"
    poisoned(written, mark)
    monkeypatch.setattr(parts, "problem", lambda directory: None)
    with pytest.raises(BaseException, match=r"could run code"):
        weights(written)
    assert not mark.exists()

    def load(*args, **options):
        return torch.load(written / "code.distcp", weights_only=False)

    monkeypatch.setattr("lightning.pytorch.strategies.ModelParallelStrategy.load_checkpoint", load)
    with pytest.raises(pickle.UnpicklingError, match=r"could run code"):
        FullyShardedStrategy(timeout=1).load_checkpoint(written)
    assert not mark.exists()


@provocation(
    "a directory of parts that Lightning has chosen by itself, with code in its `.metadata`", "refused; nothing ran"
)
def test_nothing_unchecked_reaches_the_strategy_s_reader(written, tmp_path):
    mark = tmp_path / "code ran"
    (written / ".metadata").write_bytes(pickle.dumps(Code(mark)))
    with pytest.raises(ValueError, match=r"checkpoint='.*parts' has a .metadata that cannot be read: it names"):
        FullyShardedStrategy(timeout=1).load_checkpoint(written, weights_only=True)
    assert not mark.exists()


@provocation("`hpc_ckpt_1.ckpt` in a run directory, which Lightning would go on from on SLURM", "refused in a sentence")
def test_lightning_s_own_checkpoints_on_slurm_are_refused(tmp_path):
    run = tmp_path / "run"
    (run / "below" / "hpc_ckpt_1.ckpt").mkdir(parents=True)
    check_settings(composed(f"run_dir={run}"))
    with pytest.raises(ConfigError, match=r"hpc_ckpt_1.ckpt in it is a checkpoint that Lightning would go on from"):
        check_settings(composed(f"run_dir={run}/below"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            *one, marks=provocation(f"`{one[0]}`", "refused by its key: it would read what nobody has checked")
        )
        for one in (
            (
                "+callbacks.a={_target_: lightning.pytorch.callbacks.OnExceptionCheckpoint, dirpath: RUN}",
                "OnExceptionCheckpoint: allowed is callbacks.checkpoint, whose last.ckpt is the last complete step",
            ),
            (
                "+callbacks.a={_target_: lightning.pytorch.callbacks.SpikeDetection}",
                "SpikeDetection: allowed is callbacks.doctor: this one overwrites a file",
            ),
            (
                "+trainer.strategy={_target_: lightning.pytorch.strategies.ModelParallelStrategy}",
                "ModelParallelStrategy: allowed is trainer=fsdp: it checks checkpoints in parts before they are read",
            ),
            (
                "+trainer.strategy={_target_: lightning.pytorch.strategies.FSDPStrategy}",
                "FSDPStrategy: allowed is trainer=fsdp",
            ),
            ("+trainer.strategy=deepspeed_stage_2", "trainer.strategy=deepspeed_stage_2: allowed is trainer=fsdp"),
            ("+trainer.strategy=DeepSpeed_stage_2", "trainer.strategy=DeepSpeed_stage_2: allowed is trainer=fsdp"),
            ("+trainer.strategy=FSDP", "trainer.strategy=FSDP: allowed is trainer=fsdp"),
        )
    ],
)
def test_what_would_read_unchecked_checkpoints_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        check_settings(composed(words.replace("RUN", str(NOWHERE))))


@pytest.mark.parametrize("name", ["TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_what_the_user_has_set_for_torch_is_as_before(name, written, monkeypatch):
    monkeypatch.setenv(name, "1")
    before = dict(os.environ)
    assert weights(written)
    assert dict(os.environ) == before


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def word(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


CHANGED = [
    (METADATA, "BytesStorageMetadata", "chunks"),
    (METADATA, "Metadata", "storage_data"),
    (METADATA, "_MEM_FORMAT_ENCODING", "value"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo", "offset"),
    ("torch.serialization", "_get_layout", "__doc__"),
    ("pathlib", "PosixPath", "unlink"),
    ("pathlib", "Path", "unlink"),
    ("torch", "Size", "numel"),
]


@provocation("a directory of parts whose `.metadata` changes classes of the program", "refused; they are as before")
@pytest.mark.parametrize("made", [b"", b")\x81", b")R"], ids=["itself", "new", "called"])
@pytest.mark.parametrize("module, name, attribute", CHANGED)
def test_no_class_is_changed(module, name, attribute, made, written):
    before = pathlib.PosixPath.unlink, pathlib.Path.unlink, torch.serialization._get_layout.__doc__
    for state in (b"N}(%su\x86", b"}(%su"):
        entry = word(attribute) + named("torch", "Size")
        (written / ".metadata").write_bytes(b"\x80\x04" + named(module, name) + made + state % entry + b"b.")
        with pytest.raises(ValueError, match=r"has a .metadata that cannot be read"):
            check(written)
    assert before == (pathlib.PosixPath.unlink, pathlib.Path.unlink, torch.serialization._get_layout.__doc__)
    assert not hasattr(BytesStorageMetadata, "chunks")
    assert not hasattr(parts._Bytes, "chunks")


@pytest.mark.parametrize(
    "place",
    [
        {"relative_path": 1},
        {"relative_path": Path("__0_0.distcp")},
        {"offset": -1},
        {"length": -1},
        {"offset": True},
        {"length": 1.0},
        {"transform_descriptors": ["zstd"]},
    ],
)
def test_places_of_other_types_are_refused(place, written):
    def change(described):
        for found in described.storage_data.values():
            vars(found).update(place)

    changed(written, change)
    with pytest.raises(ValueError, match=r"is damaged|has not written"):
        check(written)


def test_a_tensor_s_metadata_is_one(written):
    def change(described):
        for name, kind in described.state_dict_metadata.items():
            if isinstance(kind, TensorStorageMetadata):
                described.state_dict_metadata[name] = kind.properties

    changed(written, change)
    with pytest.raises(ValueError, match="has not written"):
        check(written)


def test_what_another_process_has_sent_is_read_while_parts_are():
    sent = pickle.dumps({"w": torch.ones(2)})  # as torch.distributed packs objects, in the form of before 1.6
    with parts.values_only():
        assert pickle.loads(sent)["w"].tolist() == [1, 1]


@provocation(
    "a directory of parts whose `.metadata` leaves a weight, or some of it, in no part: it would be what memory holds",
    "refused by the name of the weight",
)
@pytest.mark.parametrize(
    ("size", "chunks", "is_whole"),
    [
        ((4,), [((0,), (4,))], True),
        ((4,), [], False),
        ((4,), [((0,), (2,)), ((2,), (2,))], True),
        ((4,), [((0,), (2,)), ((3,), (1,))], False),
        ((4,), [((0,), (2,)), ((1,), (2,))], False),
        ((4,), [((0,), (2,)), ((2,), (2,)), ((4,), (0,))], True),
        ((4,), [((2,), (4,))], False),
        ((4,), [((-1,), (4,))], False),
        ((4,), [((0,), (True,)), ((1,), (3,))], False),
        ((4,), [((0, 0), (4, 1))], False),
        ((2, 2), [((0, 0), (1, 2)), ((1, 0), (1, 2))], True),
        ((2, 2), [((0, 0), (2, 1)), ((0, 1), (2, 1))], True),
        ((2, 2), [((0, 0), (1, 2)), ((0, 0), (2, 1))], False),
        ((), [((), ())], True),
        ((), [], False),
        ((0, 3), [], True),
    ],
)
def test_parts_are_all_of_a_weight(size, chunks, is_whole):
    kind = SimpleNamespace(size=size, chunks=[SimpleNamespace(offsets=at, sizes=sizes) for at, sizes in chunks])
    assert parts._is_covered(kind) == is_whole


def test_a_weight_without_parts_is_not_what_lies_in_memory(written):
    check(written)
    changed(written, lambda described: described.state_dict_metadata["state_dict.w"].chunks.clear())
    with pytest.raises(
        ValueError, match=r"parts' has no whole state_dict\.w: its parts leave some of it out, or overlap"
    ):
        check(written)
