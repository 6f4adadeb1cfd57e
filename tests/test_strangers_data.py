"""A directory of a stranger's data set reads no files but its own."""

import codecs
import dataclasses
import functools
import itertools
import json
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import types
import zipfile
from contextlib import nullcontext, suppress
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from datasets import packaged_modules
from datasets import table as arrow_files
from datasets.features import features
from datasets.packaged_modules.arrow.arrow import Arrow
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.utils.extract import Extractor, MagicNumberBaseExtractor
from fsspec.compression import compr
from fsspec.implementations.zip import ZipFileSystem
from fsspec.registry import _registry, known_implementations
from reasoning_gym import factory
from reasoning_gym.dataset import ProceduralDataset

from grpo_lightning import start
from grpo_lightning.data import PromptData
from grpo_lightning.data.archives import contained
from grpo_lightning.data.columns import check_columns
from grpo_lightning.data.hub import Hub
from grpo_lightning.data.jsonl import Inline, JsonLines
from grpo_lightning.data.reasoning_gym import ReasoningGym
from grpo_lightning.reward import registered as registered_tasks
from grpo_lightning.reward.accuracy import demonstrated, reasoning_gym
from grpo_lightning.settings import given, trust
from tests.support.composed import ROOT
from tests.support.provocations import provocation
from tests.support.running import small_run
from tests.test_data import settings


@pytest.fixture
def place(tmp_path):
    directory = tmp_path / "data"
    (directory / "part").mkdir(parents=True)
    (directory / "part" / "own.jsonl").write_text('{"prompt": "own"}\n')
    (tmp_path / "secret.jsonl").write_text('{"prompt": "secret"}\n')
    return directory


def configured(place, settings, file="README.md"):
    text = f"configs:\n- config_name: default\n  {settings}\n"
    (place / file).write_text(f"---\n{text}---\n" if file == "README.md" else text)
    return Hub(str(place), "train")


@provocation(
    "a data set's directory whose README names an encoding, or what is done with its errors, that the user's own file "
    "has registered with Python's `codecs`",
    "refused in one sentence; nothing is read",
)
@pytest.mark.parametrize("said", ["encoding: own", "encoding: [utf-8]", "encoding_errors: own", "encoding_errors: {}"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "txt"])
def test_encodings_that_a_program_has_registered(said, kind, place, monkeypatch):
    def called(*args):
        raise AssertionError("it was called")

    (place / f"rows.{kind}").write_bytes(b'{"prompt": "\xff"}\n')
    codecs.register_error("own", called)
    codecs.register(search := lambda name: called() if name == "own" else None)
    try:
        with pytest.raises(ValueError, match=rf"its README says {said.split(':')[0]} .*; allowed are "):
            configured(place, f"data_files: rows.{kind}\n  {said}")
    finally:
        codecs.unregister(search)


def test_encodings_of_pythons_own(place):
    (place / "rows.csv").write_bytes("prompt\nüber\n".encode("latin-1"))
    rows = configured(place, "data_files: rows.csv\n  encoding: latin-1")
    assert rows[0][0] == "über"
    (place / "rows.csv").write_bytes(b"prompt\nx\xffy\n")
    rows = configured(place, "data_files: rows.csv\n  encoding_errors: ignore")
    assert rows[0][0] == "xy"


@provocation(
    "a data set's directory whose README names an absolute path, `..`, a URL or `reference::FILE` in `data_files`",
    "refused in one sentence; nothing outside the directory is read",
)
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "settings",
    [
        "data_files: {0}/secret.jsonl",
        "data_files: ../secret.jsonl",
        "data_files: part/../../secret.jsonl",
        "data_files: ['part/*', '../*.jsonl']",
        "data_files: [{{split: train, path: {0}/secret.jsonl}}]",
        "data_files: [{{split: train, path: ['part/*', 'file://{0}/secret.jsonl']}}]",
        "data_files: 'file:{0}/secret.jsonl'",
        "data_files: 'http://localhost:1/secret.jsonl'",
        "data_files: 'reference::part/own.jsonl'",
        "data_dir: {0}",
        "data_dir: ..",
    ],
)
def test_files_of_a_data_set_lie_in_its_directory(settings, file, place, tmp_path):
    with pytest.raises(ValueError, match=r"is not in this directory; allowed are relative paths") as error:
        configured(place, settings.format(tmp_path), file)
    assert str(error.value).startswith(f"data.path='{place}', data.split='train': {file}: data_")
    assert "\n" not in str(error.value)


@provocation(
    "a data set's `.huggingface.yaml` that is a list of pairs, of which a library makes a mapping, or a file in it "
    "called `a.jsonl.gz::hdfs::b`, for which pyarrow loads `libhdfs.so` from where it finds one",
    "refused in one sentence; nothing is loaded",
)
def test_a_data_set_reads_from_files_alone(place):
    for kind in ("hdfs", "dask", "reference"):
        with contained(), pytest.raises(ValueError, match=f"Protocol not known: {kind}"):
            fsspec.filesystem(kind)
        assert kind in known_implementations
    (place / ".huggingface.yaml").write_text('- [configs, [{config_name: default, data_files: "part/*.jsonl"}]]\n')
    with pytest.raises(
        ValueError, match=r"^data.path=.*, data.split='train': .huggingface.yaml: allowed is a mapping$"
    ):
        Hub(str(place), "train")
    (place / ".huggingface.yaml").write_text("")
    assert Hub(str(place), "train")[0] == ("own", {})
    (place / "part" / "a.jsonl.gz::hdfs::b").write_text("")
    told = "'part/a.jsonl.gz::hdfs::b': names a place to read from; allowed are names without '::'"
    with pytest.raises(ValueError, match=f"^data.path='{place}', data.split='train': {told}$"):
        Hub(str(place), "train")


@pytest.mark.parametrize("settings", ["data_files: part/*.jsonl", "data_dir: part"])
def test_files_inside_are_read(settings, place):
    (place / "other.jsonl").write_text('{"prompt": "other"}\n')
    rows = configured(place, settings)
    assert [rows[i] for i in range(len(rows))] == [("own", {})]


@provocation(
    "a data set's README whose `version` or `config_name` is a path, to which the prepared data set would be written",
    "refused in one sentence; nothing is written there",
)
@pytest.mark.parametrize("value", ["/proc/self/cwd/out", "HERE/out", "../../../out", "a/../../b", ".."])
@pytest.mark.parametrize("key", ["version", "config_name"])
def test_a_data_set_is_prepared_in_the_cache(key, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "a" / "b" / "cache"))
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "data.jsonl").write_text('{"prompt": "own"}\n')
    config = {"config_name": "default", "data_files": "data.jsonl", key: value.replace("HERE", str(tmp_path))}
    (tmp_path / "bundle" / "README.md").write_text(f"---\n{json.dumps({'configs': [config]})}\n---\n")
    with pytest.raises(ValueError, match=r"^data.path='bundle', data.split='train': "):
        Hub("bundle", "train")
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_dir()]
    assert {path.parts[0] for path in written} <= {"a", "bundle"}
    assert all(path.parts[:3] == ("a", "b", "cache") for path in written if len(path.parts) > 2)


@pytest.fixture
def saved(tmp_path):
    """Two splits as ``save_to_disk`` writes them, beside another such data set that is none of theirs."""
    rows = datasets.Dataset.from_list([{"prompt": "own"}])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    datasets.Dataset.from_list([{"prompt": "secret"}]).save_to_disk(str(tmp_path / "secret"))
    return tmp_path / "saved"


@provocation(
    "a data set with an arrow file that has a column of views, one of them null and of a negative length, beside a "
    "README that says text: pyarrow finds nothing wrong, and would copy gigabytes beyond its memory",
    "refused by the column's name and type",
)
@pytest.mark.parametrize("kind", ["folder", "file", "saved", "parquet"])
def test_columns_are_of_their_own_memory(kind, tmp_path):
    values = struct.pack("<i4sii", 50, b"A" * 4, 0, 0) + struct.pack("<iiii", -50, 0, 0, 0)
    buffers = [pa.py_buffer(bytes([1])), pa.py_buffer(values), pa.py_buffer(b"A" * 50)]
    views = pa.Array.from_buffers(pa.string_view(), 2, buffers)
    views.validate(full=True)
    table = pa.table({"prompt": ["a", "b"], "answer": views})
    place = tmp_path / "data"
    if kind == "saved":
        datasets.Dataset.from_dict({"prompt": ["a"], "answer": ["b"]}).save_to_disk(str(place))
        (file,) = place.glob("*.arrow")
    else:
        place.mkdir()
        file = place / "train.arrow"
        features = "".join(f"  - {{name: {name}, dtype: string}}\n" for name in table.column_names)
        (place / "README.md").write_text(f"---\ndataset_info:\n  features:\n{features}---\n")
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    if kind == "parquet":
        file.unlink()
        pyarrow.parquet.write_table(table, place / "train.parquet")
    with pytest.raises(ValueError, match="the column 'answer' holds values of the type string_view; allowed"):
        Hub(str(file if kind == "file" else place), split="train")


@pytest.mark.parametrize(
    "kind",
    [
        pa.json_(pa.string_view()),
        pa.list_(pa.struct([("a", pa.binary_view())])),
        pa.dictionary(pa.int8(), pa.string_view()),
        pa.map_(pa.string(), pa.list_(pa.json_(pa.string_view()))),
        pa.list_view(pa.int8()),
        pa.large_list_view(pa.int8()),
        pa.run_end_encoded(pa.int32(), pa.string()),
        pa.list_(pa.string_view(), 2),
        pa.sparse_union([pa.field("a", pa.int8())]),
        pa.list_(pa.dense_union([pa.field("a", pa.int8())])),
    ],
    ids=str,
)
def test_views_are_found_wherever_they_stand(kind):
    with pytest.raises(
        ValueError, match="the column 'a' holds values of the type .*; allowed are types with memory of"
    ):
        check_columns(pa.schema([("b", pa.string()), ("a", kind)]))


def test_columns_without_views_are_allowed():
    plain = (pa.large_string(), pa.map_(pa.string(), pa.int8()), pa.dictionary(pa.int8(), pa.string()), pa.json_())
    check_columns(
        pa.schema(
            [(str(number), kind) for number, kind in enumerate((*plain, pa.list_(pa.struct([("a_view", pa.null())]))))]
        )
    )


@provocation(
    "a folder with an arrow file whose texts' offsets lead beyond its memory",
    "refused: pyarrow trusts them where it changes a column's type",
)
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_offsets_stay_inside_the_file(kind, tmp_path):
    table, place = pa.table({"prompt": ["a" * 33, "b" * 11]}), tmp_path / "data"
    place.mkdir()
    with pa.OSFile(str(place / "train.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    whole, offsets = (place / "train.arrow").read_bytes(), struct.pack("<3i", 0, 33, 44)
    assert whole.count(offsets) == 1
    (place / "train.arrow").write_bytes(whole.replace(offsets, struct.pack("<3i", 0, 2**30, 44)))
    with pytest.raises(ValueError, match="Offset invariant failure"):
        Hub(str(place / "train.arrow" if kind == "file" else place), split="train")


@provocation(
    "a parquet or arrow file with texts by their numbers in a dictionary, and numbers that it does not have",
    "refused in one sentence before pyarrow changes the column's type",
)
@pytest.mark.parametrize("kind", [Arrow, Parquet])
def test_numbers_of_words_are_those_of_a_dictionary(kind, tmp_path):
    words = pa.DictionaryArray.from_arrays(pa.array([0, 7], pa.int8()), pa.array(["a"]), safe=False)
    with contained(), pytest.raises(pa.ArrowInvalid, match="out of bounds"):
        kind._cast_table(kind(cache_dir=str(tmp_path)), pa.table({"prompt": words}))


@pytest.mark.parametrize("fault", ["view", "number"])
def test_so_are_those_of_parquet_files_that_are_read_as_rows(fault, tmp_path, monkeypatch):
    pyarrow.parquet.write_table(pa.table({"prompt": ["a"]}), tmp_path / "x.parquet")
    words = pa.DictionaryArray.from_arrays(pa.array([0, 7], pa.int8()), pa.array(["a"]), safe=False)
    column = words if fault == "number" else pa.array(["a"], pa.string_view())
    monkeypatch.setattr(pyarrow.parquet, "read_table", lambda file: pa.table({"prompt": column}))
    told = "x.parquet: not a parquet file, or damaged: .*out of bounds"
    with pytest.raises(
        ValueError, match=told if fault == "number" else "x.parquet: the column 'prompt' holds values of"
    ):
        JsonLines(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [
        *((name, True) for name in ("decimal128(3, 2)", "decimal128(38,38)", "decimal256(76, 76)")),
        *((f"decimal128(38, {scale})", False) for scale in ("39", "+99", "9_9", "٩٩", "-1", "-39", " 99", "99 ")),
        *((name, False) for name in ("decimal256(76, 77)", "decimal1_28(38, 99)")),
    ],
)
def test_scales_are_found_however_they_are_written(name, is_allowed):
    with contained(), nullcontext() if is_allowed else pytest.raises(ValueError, match="allowed are decimal128"):
        assert features.string_to_arrow(name).scale <= 76


@provocation(
    "a data set with a column of decimal numbers whose scale is 2147483647, said by its README or by a saved file",
    "refused: pyarrow would read far beyond a table, and crash",
)
def test_decimals_have_a_scale(tmp_path):
    told = "the column 'n' holds decimal numbers of the scale 2147483647; allowed are 0 to 38"
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.csv").write_text("prompt,n\na,1.5\nb,2.5\n")
    readme = "---\ndataset_info:\n  features:\n  - {name: prompt, dtype: string}\n  - {name: n, dtype: 'DTYPE'}\n---\n"
    for dtype, message in (("decimal128(38, 2147483647)", "'Decimal128.*' not found"), ("decimal128(38, 2)", None)):
        (tmp_path / "text" / "README.md").write_text(readme.replace("DTYPE", dtype))
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            Hub(str(tmp_path / "text"), split="train")
    rows = pa.table({"prompt": ["a"], "n": pa.array([None], pa.decimal128(38, 2147483647))})
    datasets.Dataset.from_list([{"prompt": "a", "n": None}]).save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    with pytest.raises(ValueError, match=told):
        Hub(str(tmp_path / "saved"), split="train")


@provocation(
    "an arrow file with decimal numbers of the scale 2147483647, -1 or 39, for which its README says another type",
    "refused in one sentence: pyarrow would read far beyond a table when it makes the one of the other",
)
@pytest.mark.parametrize("scale", [2**31 - 1, -(2**31), -1, 39])
@pytest.mark.parametrize("dtype", ["decimal128(38, 2)", "int64"])
def test_decimals_have_a_scale_whatever_the_readme_says(scale, dtype, tmp_path):
    plain = pa.array([7, 9], pa.decimal128(38, 0))
    numbers = pa.Array.from_buffers(pa.decimal128(38, scale), 2, plain.buffers())
    rows = pa.table({"prompt": ["a", "b"], "n": pa.StructArray.from_arrays([numbers], ["m"])})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    said = [{"name": "prompt", "dtype": "string"}, {"name": "n", "struct": [{"name": "m", "dtype": dtype}]}]
    (tmp_path / "README.md").write_text(f"---\n{json.dumps({'dataset_info': {'features': said}})}\n---\n")
    told = f"the column 'n' holds decimal numbers of the scale {scale}; allowed are 0 to 38"
    with pytest.raises(ValueError, match=told):
        Hub(str(tmp_path), split="train")


def test_lists_have_a_length_that_is_one():
    size = 7654321
    written = pa.schema({"prompt": pa.string(), "x": pa.list_(pa.list_(pa.int8(), size))}).serialize().to_pybytes()
    damaged = written.replace(size.to_bytes(4, "little"), b"\xff" * 4)
    with pytest.raises(ValueError, match="the column 'x' holds lists of -1 values; allowed are 0 and more"):
        check_columns(pa.ipc.read_schema(pa.py_buffer(damaged)))


def test_types_of_parquet_are_looked_at_before_its_rows(tmp_path, monkeypatch):
    for name, kind in (("a", pa.list_(pa.int8(), 2)), ("b", pa.list_(pa.int8(), 2**25))):
        table = pa.table({"prompt": ["a"], "x": pa.nulls(1, kind)})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    monkeypatch.setattr("pyarrow.dataset.ParquetFileFormat", lambda **_: pytest.fail("rows are read"))
    files = [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    with contained(), pytest.raises(ValueError, match=r"a column of the type fixed_size_list.+, of 33554432 values"):
        next(Parquet(cache_dir=str(tmp_path))._generate_tables(files, [None, None]))


@provocation(
    "a data set as `save_to_disk` leaves it whose file is called `data.arrow.gz`, which is another one unpacked",
    "refused: it would be read into memory without a look at its offsets",
)
def test_what_is_checked_of_a_saved_data_set_is_what_is_read(tmp_path):
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(str(tmp_path))
    (file,) = tmp_path.glob("*.arrow")
    file.rename(tmp_path / f"{file.name}.gz")
    state = tmp_path / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"_data_files": [{"filename": f"{file.name}.gz"}]}))
    told = rf"state.json: _data_files: '{file.name}.gz': allowed are names that end in .arrow"
    with pytest.raises(ValueError, match=told):
        Hub(str(tmp_path), split="train")


@provocation(
    "a data set as `save_to_disk` leaves it whose `_format_type` is that of a formatter which a program has registered "
    "with datasets",
    "refused in one sentence; formats of datasets' own are taken off",
)
def test_formats_that_a_program_has_registered(tmp_path):
    datasets.Dataset.from_list([{"prompt": "a"}]).with_format("numpy").save_to_disk(str(tmp_path))
    assert Hub(str(tmp_path), split="train")[0] == ("a", {})
    state = tmp_path / "state.json"
    said = json.loads(state.read_text())
    for changed in ({"_format_type": "own"}, {"_format_type": "custom"}, {"_format_kwargs": {"log": "HIT"}}):
        state.write_text(json.dumps(said | changed))
        with pytest.raises(ValueError, match=r"state\.json: the format \[.*\]; allowed are those of datasets"):
            Hub(str(tmp_path), split="train")


@provocation(
    "a data set with files of a kind that the program has registered with datasets, also in place of one of its own",
    "refused: the program's class is given nothing that its README says",
)
@pytest.mark.parametrize("kind", ["own", "csv"])
def test_kinds_of_files_that_a_program_has_registered(kind, tmp_path, monkeypatch):
    class Own(datasets.GeneratorBasedBuilder):
        def _info(self):
            pytest.fail("it is made")

    module = types.ModuleType("mine.csv")
    module.Own, Own.__module__ = Own, "mine.csv"
    monkeypatch.setitem(sys.modules, "mine.csv", module)
    known = dict(packaged_modules._PACKAGED_DATASETS_MODULES)
    monkeypatch.setitem(packaged_modules._PACKAGED_DATASETS_MODULES, kind, ("mine.csv", "0" * 64))
    monkeypatch.setitem(packaged_modules._EXTENSION_TO_MODULE, f".{kind}", (kind, {}))
    monkeypatch.setitem(packaged_modules._MODULE_TO_EXTENSIONS, kind, [f".{kind}"])
    (tmp_path / f"train.{kind}").write_text("prompt\na\n")
    with pytest.raises(ValueError, match=r"^data\.path='.*', data\.split='train': "):
        Hub(str(tmp_path), split="train")
    with contained():
        assert {name: known[name] for name in {*known} - {kind}} == packaged_modules._PACKAGED_DATASETS_MODULES
    assert packaged_modules._PACKAGED_DATASETS_MODULES[kind][0] == "mine.csv"


@provocation(
    "a data set with a file that begins as what the program has added to datasets' kinds of archives, such as one that "
    "runs what it unpacks",
    "the program's class is given nothing; the file is read as what it is called",
)
@pytest.mark.parametrize("kind", ["own", "gzip"])
def test_kinds_of_archives_that_a_program_has_added(kind, tmp_path, monkeypatch):
    class Own(MagicNumberBaseExtractor):
        magic_numbers = (b"prompt",)

        @staticmethod
        def extract(input_path, output_path):
            pytest.fail("it is called")

    monkeypatch.setattr(Extractor, "extractors", Extractor.extractors | {kind: Own})
    (tmp_path / "train.csv").write_text("prompt\na\nb\n")
    assert len(Hub(str(tmp_path), split="train")) == 2
    assert Extractor.extractors[kind] is Own


def test_kinds_of_places_that_a_program_has_put_in_the_place_of_others(monkeypatch, tmp_path):
    class Own(ZipFileSystem):
        def __init__(self, *args, **options):
            pytest.fail("it is made of what a file holds")

    with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
        archive.writestr("train.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    for kinds, own in ((known_implementations, {"class": "mine.Own"}), (_registry, Own)):
        monkeypatch.setitem(kinds, "zip", own)
    for compression in (None, "gzip"):
        monkeypatch.setitem(compr, compression, lambda *args, **options: pytest.fail("it is called"))
    with contained():
        assert "zip" not in {*known_implementations, *_registry}
        assert {"lzma", "xz"} <= {*compr}
        assert not {None, "gzip"} & {*compr}
        assert fsspec.filesystem("file").exists(str(tmp_path))
    assert _registry["zip"] is Own
    monkeypatch.delitem(known_implementations, "zip")
    with suppress(ValueError):
        Hub(str(tmp_path), split="train")


@provocation(
    "a data set of the hub that is already prepared in the cache of datasets, whose table says more values than it "
    "holds",
    "refused: pyarrow would read beyond its memory",
)
def test_tables_that_were_prepared_before_are_validated(tmp_path):
    rows = pa.table({"prompt": ["a", "b"], "x": pa.array([[7] * 8, [7] * 8], pa.list_(pa.uint8()))})
    file = tmp_path / "x.arrow"
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    written, offsets = file.read_bytes(), struct.pack("<3i", 0, 8, 16)
    assert written.count(offsets) == 1
    reads = (arrow_files.MemoryMappedTable.from_file, arrow_files.InMemoryTable.from_file)
    for read in reads:
        with contained():
            assert read(str(file)).num_rows == 2
    file.write_bytes(written.replace(offsets, struct.pack("<3i", 0, 8, 1 << 20)))
    for read in reads:
        with contained(), pytest.raises(pa.ArrowInvalid):
            read(str(file))
    schema = pa.schema([pa.field("x", pa.string(), metadata={"ARROW:extension:name": "ray.data.arrow_pickled_object"})])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        stream.write_table(pa.table({"x": ["a"]}, schema=schema))
    for read in reads:
        with contained(), pytest.raises(ValueError, match=r"extension type 'ray\.data\.arrow_pickled_object'"):
            read(str(file))


@provocation(
    "a data set as `save_to_disk` leaves it whose `state.json` or `dataset_dict.json` names an absolute path, `..` "
    "or a URL",
    "refused in one sentence; nothing outside the directory is read",
)
@pytest.mark.parametrize(
    "name",
    ["{0}/secret/data-00000-of-00001.arrow", "../../secret/data-00000-of-00001.arrow", "http://localhost:1/x.arrow"],
)
def test_parts_of_a_saved_data_set_lie_in_its_directory(name, saved, tmp_path):
    assert Hub(str(saved), "train")[0] == ("own", {})
    for part in ("train", "test"):
        state = saved / part / "state.json"
        before = state.read_text()
        state.write_text(json.dumps(json.loads(before) | {"_data_files": [{"filename": name.format(tmp_path)}]}))
        with pytest.raises(
            ValueError, match=rf"{part}/state.json: _data_files: '.*' is not in this directory; allowed"
        ):
            Hub(str(saved), "train")
        with pytest.raises(ValueError, match=r"state.json: _data_files: '.*' is not in this directory; allowed"):
            Hub(str(saved / part), "train")
        state.write_text(before)
    beside = json.loads((saved / "train" / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps(beside | {"_data_files": [{"filename": name.format(tmp_path)}]}))
    with pytest.raises(ValueError, match=r"state.json: _data_files: '.*' is not in this directory; allowed"):
        Hub(str(saved), "train")  # which is read before dataset_dict.json
    (saved / "state.json").unlink()
    (saved / "dataset_dict.json").write_text(json.dumps({"splits": {"../secret": "train"}}))
    with pytest.raises(ValueError, match=r"dataset_dict.json: splits: allowed is a list of names$"):
        Hub(str(saved), "train")
    (saved / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "../secret"]}))
    with pytest.raises(ValueError, match=r"dataset_dict.json: splits: '../secret' is not in this directory"):
        Hub(str(saved), "../secret")


@provocation(
    "`data.path=text`, `json`, `csv` or another format's name", "refused; no files of the working directory are read"
)
@pytest.mark.parametrize("name", ["text", "json", "csv", "parquet", "imagefolder", "arrow"])
def test_a_format_is_no_data_set(name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    (tmp_path / name / "private.txt").write_text("secret")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"data.path='{name}': names a format.*; allowed is .* such as ./{name}, or"):
        Hub(name, "train")


@provocation("`data.path=reference::…` or another chain or URL of fsspec's", "refused in one sentence")
@pytest.mark.parametrize("path", ["reference::data:application/json,x", "memory://x", "./a::b"])
def test_a_path_is_no_url(path):
    with pytest.raises(ValueError, match=r"allowed is .* a path without '://' and '::'"):
        Hub(path, "train")


class Opened(Exception):
    """A medium's decoder was called."""


@provocation(
    "a parquet file whose metadata makes a column images, which are at `reference://k::data:…` or `http://127.0.0.1`",
    "the column is left out, which a warning says; nothing is opened",
)
def test_media_are_not_opened(tmp_path, monkeypatch, caplog):
    def opened(*_, **__):
        raise Opened

    for kind in (datasets.Image, datasets.Audio, datasets.Video):
        monkeypatch.setattr(kind, "decode_example", opened)
    place = {"path": "reference://k::data:application/json,{}", "bytes": None}
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "image": datasets.Image(),
            "sounds": datasets.List(datasets.Audio()),
            "nested": {"film": datasets.Video()},
            "kind": datasets.ClassLabel(names=["a", "b"]),
            "numbers": datasets.List(datasets.Value("int32")),
        }
    )
    row = {"prompt": "own", "image": place, "sounds": [place], "nested": {"film": place}, "kind": 1, "numbers": [3]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row], schema=features.arrow_schema), tmp_path / "x.parquet")
    seen = []
    given = {"split": "train", "map_row": lambda row: seen.append(row) or row}
    assert Hub(str(tmp_path / "x.parquet"), **given)[0] == ("own", {"kind": 1, "numbers": [3]})
    assert set(seen[0]) == {"prompt", "kind", "numbers"}
    assert "the columns image, sounds, nested are left out: they hold images" in caplog.text
    with pytest.raises(
        ValueError, match=r"image not in .*; allowed: new name -> one of \['kind', 'numbers', 'prompt'\]"
    ):
        Hub(str(tmp_path / "x.parquet"), "train", columns={"prompt": "image"})


@provocation(
    "`data.task_config={operators: [CODE]}`, or so in `data.train.tasks`, which a task evaluates, with `python -O` too",
    "refused by its key",
)
@pytest.mark.slow
def test_operators_of_a_task_are_operators(tmp_path):
    """In a process without assertions, by which the library checks them."""
    config = {"operators": [f"+(open({str(tmp_path / 'HIT')!r}, 'w').close() or 1)+"]}
    nested = {"datasets": [{"name": "basic_arithmetic", "weight": 1.0, "config": config}]}
    code = f"""
from grpo_lightning.data.reasoning_gym import ReasoningGym
from grpo_lightning.data.taught import Demonstrations
for make in (
    lambda: ReasoningGym("basic_arithmetic", {config!r}, 9, 0)[0],
    lambda: ReasoningGym("composite", {nested!r}, 9, 0)[0],
    lambda: Demonstrations({{"basic_arithmetic": {config!r}}}, 9, 0, 0)[0],
):
    try:
        make()
    except ValueError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-O", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    told = [line for line in done.stdout.splitlines() if "operators: " in line]
    for line, key in zip(told, ("data.task_config", "data.task_config", "tasks.basic_arithmetic"), strict=True):
        assert line.startswith(f"{key}.operators: +(open("), line
        assert "allowed are * + - /" in line
    assert not (tmp_path / "HIT").exists()


@dataclasses.dataclass
class Config:
    seed: int | None = None
    size: int = 9
    output_file: str = ""

    def validate(self) -> None:
        pass


NESTED = {"datasets": [{"name": "mine", "weight": 1, "config": {"output_file": "/x"}}]}


class Mine(ProceduralDataset):
    """A data set of the user's, which writes a file when it is made."""

    def __init__(self, config):
        super().__init__(config, config.seed, config.size)
        if config.output_file:
            Path(config.output_file).touch()

    def __getitem__(self, index):
        return {"question": f"{index}?", "answer": str(index), "metadata": {}}


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(factory.DATASETS, "mine", (Mine, Config))


@provocation(
    "a row with the name of a data set that the user's own code registers with reasoning_gym, and a place for it",
    "refused in one sentence; the rows of that data set itself are scored with its arguments",
)
def test_no_stranger_gives_a_registered_data_set_its_arguments(registered, tmp_path):
    hit = tmp_path / "HIT"
    question, columns = ReasoningGym("mine", {"output_file": str(hit)}, 9, 0)[1]  # of one's own
    assert question == "1?"
    row = {"answer": ["1"], "task": ["mine"], "metadata": [{}]}
    assert reasoning_gym(["<answer>1</answer>"], task_config=[columns["task_config"]], **row) == [1.0]
    hit.unlink()
    assert type(columns["task_config"]) is dict  # which is carried over, and stands in checkpoints
    said = {"size": 8, "output_file": str(hit)}
    with pytest.raises(ValueError, match=r"task='mine': no data set of reasoning_gym itself, and task_config of its "):
        reasoning_gym(["<answer>1</answer>"], task_config=[said], **row)
    named = ({"report": str(hit)}, {"report": bytes(hit)}, {"size": 8, "more": [({"report": "x"},)]})
    for said in named:  # whatever it is called
        with pytest.raises(
            ValueError, match=r"task='mine': .*task_config of its row has 'report'; allowed are size and seed"
        ):
            reasoning_gym(["<answer>1</answer>"], task_config=[said], **row)
    with pytest.raises(ValueError, match=r"task='composite': no data set of reasoning_gym itself, and task_config of "):
        reasoning_gym(["<answer>1</answer>"], task_config=[NESTED], **row | {"task": ["composite"]})
    for said in ({"allow_pickle": True}, {"size": True}, {"level": 3}, {"more": [1]}):
        with pytest.raises(
            ValueError, match=r"task='mine': .*; allowed are size and seed, the arguments of data.task_con"
        ):
            reasoning_gym(["<answer>1</answer>"], task_config=[said], **row)
    assert reasoning_gym(["<answer>1</answer>"], task_config=[{"size": 8, "seed": 1}], **row) == [1.0]
    assert reasoning_gym(["<answer>1</answer>"], task_config=[None], **row) == [1.0]
    assert not hit.exists()


class Evaluating(Mine):
    """A data set of the user's whose verifier evaluates what the data set itself has written into an entry."""

    def score_answer(self, answer, entry):
        return float(str(eval(entry["metadata"]["expression"])) == answer)


@provocation(
    "a row that names, as its task or as the source of a composite's, a data set of the user's program, which has "
    "registered it with reasoning_gym for other runs and evaluates what stands in `metadata`",
    "refused in one sentence; where `data.task` names the data set, also as a part of a composite, rows are scored",
)
def test_no_stranger_chooses_a_registered_data_sets_verifier(monkeypatch, tmp_path):
    kinds = {"late": (Mine, Config), "evaluating": (Evaluating, Config), "part": (Evaluating, Config)}
    for name, kind in kinds.items():
        monkeypatch.setitem(factory.DATASETS, name, kind)
    monkeypatch.setattr(registered_tasks, "_named", set())
    payload = {"expression": f"open({str(tmp_path / 'HIT')!r}, 'w').close()"}
    refused = r"task='evaluating': a data set of your own, .*; allowed are reasoning_gym's own, the one of data.task, "
    for task, metadata in (("evaluating", payload), ("composite", payload | {"source_dataset": "evaluating"})):
        rows = {"completions": ["<answer>1</answer>"], "answer": ["1"], "task": [task], "metadata": [metadata]}
        for config in (None, {}, {"size": 3}):
            with pytest.raises(ValueError, match=refused):
                reasoning_gym(**rows, task_config=[config])
        with pytest.raises(ValueError, match=refused):
            demonstrated(**rows, completion=["<answer>1</answer>"])
    assert not (tmp_path / "HIT").exists()
    row = {"completions": ["<answer>4</answer>"], "answer": ["4"], "metadata": [{"expression": "2 + 2"}]}
    assert ReasoningGym("evaluating", {}, 9, 0)[0]
    assert reasoning_gym(**row, task=["evaluating"]) == [1.0]
    assert ReasoningGym("composite", {"datasets": [{"name": "part", "weight": 1, "config": {}}]}, 9, 0)[0]
    row["metadata"][0]["source_dataset"] = "part"
    assert reasoning_gym(**row, task=["composite"]) == [1.0]
    with pytest.raises(ValueError, match="task='late': a data set of your own"):
        reasoning_gym(**row | {"metadata": [{}]}, task=["late"])
    sources = (functools.partial(Inline, ["a", "b"]), functools.partial(ReasoningGym, "evaluating", {}, 9, 0))
    theirs, mine = (PromptData(train=one, validation=one, **settings()) for one in sources)
    row["metadata"][0].pop("source_dataset")
    begun = (PromptData.train_dataloader, PromptData.val_dataloader, lambda data: data.setup("preflight"))
    for data, begin in itertools.product((theirs, mine), begun * 2):  # runs after one another in a process
        registered_tasks.note(set(), {"evaluating"} if data is theirs else {"late"})
        begin(data)
        with nullcontext() if data is mine else pytest.raises(ValueError, match=refused):
            assert reasoning_gym(**row, task=["evaluating"]) == [1.0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_of_two_runs_in_turns_name_what_their_own_data_are_made_of(num_workers, monkeypatch):
    monkeypatch.setitem(factory.DATASETS, "mine", (Mine, Config))
    sources = (functools.partial(Inline, ["a", "b"]), functools.partial(ReasoningGym, "mine", {}, 9, 0))
    theirs, mine = (
        PromptData(train=one, validation=one, **settings() | {"num_workers": num_workers, "steps": 9})
        for one in sources
    )
    batches = [iter(data.train_dataloader()) for data in (mine, theirs)]
    for _ in range(2):
        for own, iterator in zip(({"mine"}, set()), batches, strict=True):
            assert next(iterator)
            assert registered_tasks.noted()[1] == own


@pytest.mark.parametrize("mode", ["validate", "preflight"])
def test_whatever_a_run_does_it_knows_no_data_set_that_another_has_named(mode, monkeypatch, tmp_path):
    monkeypatch.setattr(registered_tasks, "_named", {"evaluating"})
    small_run(tmp_path, f"mode={mode}")
    assert "evaluating" not in registered_tasks.noted()[1]


@provocation(
    "settings that the command brings along, and a data set that the user's own code registers with reasoning_gym, "
    "also as a part of a composite, whoever names it",
    "refused by its key; with `trusted_settings=true` allowed",
)
@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"task": "mine"}, "data.task=mine"),
        ({"task": "mine", "levels": {"mine": {"output_file": "/x"}}}, "data.task=mine"),
        (
            {"task": "composite", "task_config": {"datasets": [{"name": "mine"}]}},
            "data.task_config.datasets.0.name=mine",
        ),
        (
            {"task": "composite", "task_config": {"datasets": [{"name": "composite", "config": NESTED}]}},
            "data.task_config.datasets.0.config.datasets.0.name=mine",
        ),
        ({"task": "leg_counting", "task_config": {"output_file": "/x"}}, None),
    ],
)
def test_a_registered_data_set_is_given_nothing_that_is_brought_along(data, told, registered, tmp_path):
    target = {"_target_": "grpo_lightning.data.reasoning_gym.prompts"}
    config = {"run_dir": str(tmp_path / "run"), "data": target | data}
    assert given.ungiven(config, ["data.task=mine"]) == []  # of one's own
    start.note_settings_from([str(tmp_path / "theirs")])
    found = given.ungiven(config, ["data.task=mine"])
    assert bool(found) == bool(told)
    assert not found or found == [trust.beside_brought(*told.split("="))]


def test_a_data_set_may_have_a_name_of_the_librarys(tmp_path, monkeypatch):
    config = {"data": {"_target_": "grpo_lightning.data.reasoning_gym.prompts", "task": "spell_backward"}}
    start.note_settings_from([str(tmp_path / "theirs")])
    assert given.ungiven(config, []) == []
    for parts in ((Mine, Config), (factory.DATASETS["leg_counting"][0], Config)):
        monkeypatch.setitem(factory.DATASETS, "spell_backward", parts)
        assert given.ungiven(config, []) == [trust.beside_brought("data.task", "spell_backward")]


@provocation(
    "a data set whose files say that a column is of the type `have_libhdfs`, a function that loads `libhdfs.so`, or "
    "another function of pyarrow's",
    "refused in one sentence; nothing is called",
)
@pytest.mark.parametrize("form", ["README", "saved", "parquet", "extension", "lines"])
def test_the_type_of_a_column_is_a_type(form, tmp_path, monkeypatch):
    monkeypatch.setattr(pyarrow, "have_libhdfs", lambda: pytest.fail("was called"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "data"
    rows = datasets.Dataset.from_list([{"prompt": "own"}])
    if form == "saved":
        rows.save_to_disk(str(place))
        info = place / "dataset_info.json"
        assert '"string"' in info.read_text()
        info.write_text(info.read_text().replace('"string"', '"have_libhdfs"'))
    elif form in ("extension", "lines"):  # types of datasets' that say of what they are
        name = datasets.features.features.Array2DExtensionType((1, 1), "int32").extension_name
        about = {"ARROW:extension:name": name, "ARROW:extension:metadata": json.dumps([[1, 1], "have_libhdfs"])}
        fields = [pa.field("prompt", pa.string()), pa.field("x", pa.list_(pa.list_(pa.int32())), metadata=about)]
        table = pa.table({"prompt": ["own"], "x": [[[1]]]}, schema=pa.schema(fields))
        rows.save_to_disk(str(place))
        (file,) = place.glob("*.arrow")
        if form == "lines":
            file = place / "x.parquet"
            pyarrow.parquet.write_table(table, file)
        else:
            with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        if form == "lines":
            with pytest.raises(ValueError, match=r"a column of the type 'have_libhdfs'"):
                JsonLines(str(file))
            return
    elif form == "parquet":
        place.mkdir()
        table = rows.data.table
        about = {"info": {"features": {"prompt": {"dtype": "have_libhdfs", "_type": "Value"}}}}
        pyarrow.parquet.write_table(
            table.replace_schema_metadata({"huggingface": json.dumps(about)}), place / "x.parquet"
        )
    else:
        place.mkdir()
        (place / "x.jsonl").write_text('{"prompt": "own"}\n')
        about = {"dataset_info": {"features": [{"name": "prompt", "dtype": "have_libhdfs"}]}}
        (place / "README.md").write_text(f"---\n{json.dumps(about)}\n---\n")
    of_column = "a column of the type 'have_libhdfs': allowed are types of pyarrow's, like string"
    told = "Feature type 'HaveLibhdfs' not found" if form == "README" else of_column  # it may be media, as image is
    with pytest.raises(ValueError, match=f"^data.path='{place}', data.split='train': {told}"):
        Hub(str(place), "train")


def test_types_of_columns_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    named = {
        **{name: name for name in ("bool", "int8", "uint64", "float16", "float32", "float64", "string", "binary")},
        **{"large_string": "large_string", "time": "time64[us]", "stamp": "timestamp[s, tz=UTC]", "date": "date32"},
        **{"duration": "duration[ms]", "decimal": "decimal128(10, 2)", "null": "null"},
    }
    types = datasets.Features({"prompt": datasets.Value("string")} | {k: datasets.Value(v) for k, v in named.items()})
    rows = datasets.Dataset.from_list([{"prompt": "own"} | dict.fromkeys(named)], features=types)
    rows.save_to_disk(str(tmp_path / "saved"))
    rows.to_parquet(str(tmp_path / "x.parquet"))
    for path in ("saved", "x.parquet"):
        assert Hub(str(tmp_path / path), "train")[0] == ("own", dict.fromkeys(named))


@provocation(
    "a data set for which a library, whichever it is, reads a pickle that names a function", "refused in one sentence"
)
@pytest.mark.parametrize("path", ["org/name", "here", "here/x.jsonl", "saved"])
def test_nobody_reads_pickles_of_a_data_set(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "x.jsonl").write_text('{"prompt": "own"}\n')
    datasets.Dataset.from_list([{"prompt": "own"}]).save_to_disk("saved")
    for name in ("load_dataset", "load_from_disk"):
        monkeypatch.setattr(datasets, name, lambda *_, **__: pickle.loads(pickle.dumps(tmp_path)))
    with pytest.raises(
        ValueError, match=rf"^data.path='{path}', data.split='train': a pickle that could run code when"
    ):
        Hub(path, "train")


@provocation(
    "a data set that is an archive with tensors (`.pth` in a `.tar`, WebDataset), or files of another of the 25 kinds "
    "beside tables and texts that datasets has readers for",
    "refused in one sentence that names the kind; nothing is read",
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("x.tar", "webdataset"), ("x.h5", "hdf5"), ("x.xml", "xml"), ("x.wav", "audiofolder"), ("x.png", "imagefolder")],
)
@pytest.mark.parametrize("place", ["folder", "README"])
def test_data_sets_are_tables_and_texts(place, name, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("was read"))
    (tmp_path / "theirs").mkdir()
    about = {"configs": [{"config_name": "default", "data_files": name}]}
    if place == "README":
        (tmp_path / "theirs" / "README.md").write_text(f"---\n{json.dumps(about)}\n---\n")
    with tarfile.open(tmp_path / "theirs" / name, "w") as archive:
        for member in ("1.prompt.txt", "1.x.pth"):
            archive.addfile(tarfile.TarInfo(member))
    told = f"its files are of the kind {kind}; allowed are arrow, csv, json, parquet, text"
    with pytest.raises(ValueError, match=rf"^data.path='{tmp_path}/theirs', data.split='train': {told}$"):
        Hub(str(tmp_path / "theirs"), "train")


@pytest.mark.parametrize("path", ["org/name", "here", "here/x.jsonl", "saved"])
def test_torch_reads_no_older_files_of_a_data_set(path, tmp_path, monkeypatch):
    """Whatever of datasets would have it read them: what they say of memory is not looked at."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "x.jsonl").write_text('{"prompt": "own"}\n')
    datasets.Dataset.from_list([{"prompt": "own"}]).save_to_disk("saved")
    torch.save(torch.ones(2), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("load_dataset", "load_from_disk"):
        monkeypatch.setattr(datasets, name, lambda *_, **__: torch.load(tmp_path / "old.pth", weights_only=True))
    with pytest.raises(
        ValueError, match=rf"^data.path='{path}', .* a file of weights is a plain pickle, as torch wrote"
    ):
        Hub(path, "train")


def test_a_row_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    rows = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    monkeypatch.setattr("grpo_lightning.data.hub._load", lambda *_: rows)
    read = datasets.Dataset.__iter__

    def broken(self):
        yield next(read(self))
        raise pa.lib.ArrowIndexError("tried to refer\nto element 9")

    monkeypatch.setattr(datasets.Dataset, "__iter__", broken)
    told = r"^org/name \(train\), row 2: cannot be read: ArrowIndexError: tried to refer to element 9$"
    with pytest.raises(ValueError, match=told):
        Hub("org/name", "train")


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.jsonl", "x.txt", "x.parquet", "x.arrow"])
def test_tables_and_texts_are_read(name, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own").mkdir()
    rows = datasets.Dataset.from_list([{"prompt": "own"}])
    if name == "x.parquet":
        rows.to_parquet(tmp_path / "own" / name)
    elif name == "x.arrow":
        rows.save_to_disk(str(tmp_path / "saved"))
        shutil.copy(next((tmp_path / "saved").glob("*.arrow")), tmp_path / "own" / name)
    else:
        (tmp_path / "own" / name).write_text('{"prompt": "own"}\n' if name == "x.jsonl" else "prompt\nown\n")
    columns = {"prompt": "text"} if name == "x.txt" else None
    assert Hub(str(tmp_path / "own"), "train", columns=columns)[0][0] == ("prompt" if columns else "own")


@provocation(
    "`data=jsonl data.path=hdfs:/rows.parquet`, a file in a directory called `hdfs:`, for which pyarrow would load "
    "`./libhdfs.so`",
    "the file is read, and nothing else",
)
@pytest.mark.parametrize("place", ["hdfs:", "s3:", "fsspec+reference:"])
def test_a_file_is_a_file_whatever_its_directory_is_called(place, tmp_path, monkeypatch):
    (tmp_path / place).mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["p"]}), tmp_path / place / "a.parquet")
    monkeypatch.chdir(tmp_path)
    assert JsonLines(f"{place}/a.parquet")[0] == ("p", {})


@provocation(
    "a data set as `save_to_disk` leaves it, or a file of arrow, with offsets in a dictionary that lead beyond its "
    "memory, where pyarrow would write",
    "refused in one sentence before it is used",
)
@pytest.mark.parametrize("kind", ["saved", "file"])
def test_arrows_offsets_stay_in_their_memory(kind, tmp_path):
    datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]}).save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    words = pa.array(["-" * 2000, "b" * 64, "c" * 4096])
    table = pa.table({"prompt": pa.DictionaryArray.from_arrays(pa.array([1, 2, 0], pa.int32()), words)})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    path = str(file.rename(tmp_path / "words.arrow") if kind == "file" else tmp_path / "saved")
    known = file if kind == "saved" else tmp_path / "words.arrow"
    offsets, content = words.buffers()[1].to_pybytes()[:16], known.read_bytes()
    assert content.count(offsets) == 1
    assert len(Hub(path, "train")) == 3
    known.write_bytes(content.replace(offsets, struct.pack("<4i", 0, 2000, 64, 64 + 4096)))
    with pytest.raises(ValueError, match=rf"^data.path='{path}', data.split='train': .*"):
        Hub(path, "train")


@provocation(
    "`data=hub data.path=theirs` of two configurations, one with a name that ends a text of Python, which datasets "
    "shows in a line of Python to use",
    "the names are told, and no line to use",
)
def test_no_line_of_python_is_told(tmp_path):
    name = "main', open('HIT', 'w'), name='main"
    configs = [{"config_name": one, "data_files": "a.jsonl"} for one in (name, "other")]
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    with pytest.raises(ValueError, match=r"Please pick one among the available configs: ") as caught:
        Hub(str(tmp_path), "train")
    assert "load_dataset" not in str(caught.value)
