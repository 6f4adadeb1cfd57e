"""Tables in a stranger's data set stay within their memory, whatever its files say of their columns."""

import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import datasets
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet
import pytest
from datasets.features import features

from grpo_lightning.data import json_tables
from grpo_lightning.data.archives import contained
from grpo_lightning.data.columns import check_arrow, check_length
from grpo_lightning.data.hub import Hub
from grpo_lightning.data.json_tables import read_in_one_block
from grpo_lightning.data.jsonl import JsonLines
from tests.support.composed import ROOT
from tests.support.provocations import provocation

ROWS = [{"prompt": "own", "x": {"a": 1}}] * 256 + [{"prompt": "own", "x": [{"a": 1}]}] * 256
READ = "import sys; from grpo_lightning.data.hub import Hub; print(list(Hub(sys.argv[1], 'train'))[::511])"
LENGTH = 2**31 - 1


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def lines(rows):
    """One of 64 bytes for each row: 256 are a block as datasets would read them."""
    return "".join(f"{json.dumps(row):<63}\n" for row in rows)


def read(place: Path) -> subprocess.CompletedProcess[str]:
    """Prints the first and the last row, in a process of its own: what is tested may end it."""
    env = {"HF_HOME": str(place.parent), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", READ, place], env=env, capture_output=True, text=True)


@provocation(
    "a data set's lines of JSON in which a mapping becomes a list, and a README by which datasets reads them in "
    "several blocks, where pyarrow would write beyond its memory",
    "they are read in one block, and refused in one sentence",
)
@pytest.mark.slow
def test_lines_of_json_are_read_in_one_block(place):
    (place / "x.jsonl").write_text(lines(ROWS))
    config = {"config_name": "own", "data_files": "x.jsonl", "chunksize": 2**19, "on_mixed_types": None}
    (place / "README.md").write_text(f"---\n{json.dumps({'configs': [config]})}\n---\n")
    done = read(place)
    assert done.returncode == 1, done.stderr
    assert f"data.path='{place}', data.split='train': JSON parse error: Column(/x) changed from" in done.stderr
    (place / "README.md").unlink()  # by itself datasets makes texts of such a column
    done = read(place)
    assert done.stdout == "[('own', {'x': {'a': 1}}), ('own', {'x': [{'a': 1}]})]\n", done.stderr


def test_pyarrow_reads_in_one_block_while_a_data_set_is_loaded():
    before = pyarrow.json.read_json
    with contained():
        assert pyarrow.json.read_json is read_in_one_block
        whole = pyarrow.json.read_json(io.BytesIO(lines(ROWS[:3]).encode()), pyarrow.json.ReadOptions(block_size=65))
    assert pyarrow.json.read_json is before
    assert (whole.to_pylist(), whole["x"].num_chunks) == (ROWS[:3], 1)


@provocation(
    'a line of JSON like `{"x": [null, 9]}`, of which pyarrow makes a list that is longer than its memory',
    "its lines are read one by one",
)
@pytest.mark.parametrize(
    "rows",
    [
        [{"x": [None, 9]}],
        [{"x": None}, {"x": [None, {"a": [None, "b"]}]}, {"x": [{"a": None}, {}]}],
        [{"x": [[None, 1.5], None]}, {"y": "z\n"}],
    ],
    ids=str,
)
@pytest.mark.parametrize("end", ["\n", ""])
def test_lists_are_as_long_as_their_lines_say(rows, end):
    content = lines(rows).removesuffix("\n").encode() + end.encode()
    with pytest.raises(pa.ArrowInvalid):  # else pyarrow has mended it
        pyarrow.json.read_json(io.BytesIO(content)).validate(full=True)
    table = read_in_one_block(io.BytesIO(content))
    table.validate(full=True)

    def plain(value):  # an absent key is null in a table
        if isinstance(value, dict):
            return {key: found for key, one in value.items() if (found := plain(one)) is not None}
        return [plain(one) for one in value] if isinstance(value, list) else value

    assert [plain(row) for row in table.to_pylist()] == [plain(row) for row in rows]


@pytest.mark.parametrize(
    "content", [b'{"x": [null, 9]}\n{"x": "a"}', b'{"x": [null, 9]}\n{"y": 99999999999999999999}', b"{", b"[1]", b"x\n"]
)
def test_what_is_no_table_is_told_as_pyarrow_tells_it(content):
    with pytest.raises(pa.ArrowInvalid):
        read_in_one_block(io.BytesIO(content))


def test_a_block_has_a_size_that_pyarrow_can_count(monkeypatch):
    monkeypatch.setattr(json_tables, "_MOST_BYTES", 9)
    assert read_in_one_block(io.BytesIO(b'{"x": 1}')).to_pylist() == [{"x": 1}]
    with pytest.raises(pa.ArrowInvalid, match=r"^10 bytes at once; allowed are 9, such as in shorter lines$"):
        read_in_one_block(io.BytesIO(b'{"x": 11}'))


@provocation(
    "a data set whose README or tables say that a column has lists of 2147483647 lists of 2147483647 values, for whose "
    "absent rows pyarrow would write beyond its memory",
    "refused in one sentence before a row is read",
)
@pytest.mark.parametrize("form", ["README", "parquet", "arrow"])
def test_files_say_not_that_lists_are_longer_than_memory(form, place):
    if form == "README":
        (place / "x.jsonl").write_text('{"prompt": "own"}\n')
        nested = {"list": {"list": "int8", "length": LENGTH}, "length": LENGTH}
        said = {"features": [{"name": "prompt", "dtype": "string"}, {"name": "x"} | nested]}
        (place / "README.md").write_text(f"---\n{json.dumps({'dataset_info': said})}\n---\n")
    elif form == "parquet":
        inner = {"feature": {"dtype": "int8", "_type": "Value"}, "length": LENGTH, "_type": "List"}
        long = {"feature": inner, "length": LENGTH, "_type": "List"}
        about = {"features": {"prompt": {"dtype": "string", "_type": "Value"}, "x": long}}
        table = pa.table({"prompt": ["own"]}).replace_schema_metadata({"huggingface": json.dumps({"info": about})})
        pyarrow.parquet.write_table(table, place / "x.parquet")
    else:
        schema = pa.schema({"prompt": pa.string(), "x": pa.list_(pa.list_(pa.int8(), LENGTH), LENGTH)})
        with pa.OSFile(str(place / "x.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema):
            pass
    told = r"a column of the type fixed_size_list<.*, of \d+ values in a row; allowed are 16777216"
    with pytest.raises(ValueError, match=f"^data.path='{place}', data.split='train': {told}"):
        Hub(str(place), "train")


def test_rows_of_parquet_are_read_when_their_types_are_known(tmp_path, monkeypatch):
    kind = pa.list_(pa.list_(pa.int8(), LENGTH), LENGTH)
    table = pa.table({"prompt": pa.array([], pa.string()), "x": pa.array([], kind)})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    monkeypatch.setattr(pyarrow.parquet, "read_table", lambda *_: pytest.fail("was read"))
    with pytest.raises(ValueError, match=r"x\.parquet: a column of the type fixed_size_list<.*; allowed are 16777216"):
        JsonLines(str(tmp_path / "x.parquet"))


def test_lengths_are_multiplied_by_hand():
    for kind, number in (
        (pa.list_(pa.list_(pa.int8(), 2**12), 2**13), 2**25),
        (pa.struct({"a": pa.string(), "b": pa.list_(pa.map_(pa.string(), pa.list_(pa.binary(8), 2**22)))}), 2**25),
        (pa.dictionary(pa.int32(), pa.binary(2**25)), 2**25),
        (pa.large_list(pa.list_(pa.null(), 2**25)), 2**25),
        (pa.list_(pa.list_(pa.list_(pa.int8(), LENGTH), 0), LENGTH), LENGTH**2),
    ):
        with pytest.raises(ValueError, match=rf", of {number} values in a row; allowed are 16777216$"):
            check_length(kind)
    check_length(pa.list_(pa.list_(pa.decimal128(38), 2**12), 2**12))
    check_length(pa.struct({"a": pa.list_(pa.int8(), 2**20), "b": pa.list_(pa.int8(), 2**20)}))


def test_lists_of_a_length_are_read(place):
    said = {"features": [{"name": "prompt", "dtype": "string"}, {"name": "x", "list": "int8", "length": 2}]}
    (place / "x.jsonl").write_text('{"prompt": "own", "x": [1, 2]}\n')
    (place / "README.md").write_text(f"---\n{json.dumps({'dataset_info': said})}\n---\n")
    before = features.get_nested_type
    assert Hub(str(place), "train")[0] == ("own", {"x": [1, 2]})
    assert features.get_nested_type is before


@provocation(
    "a data set of parquet whose README has `filters`, with which pyarrow would compute before tables are validated",
    "refused in one sentence",
)
def test_a_readme_filters_no_rows(place):
    pyarrow.parquet.write_table(pa.table({"prompt": ["own"]}), place / "x.parquet")
    config = {"config_name": "own", "data_files": "x.parquet", "filters": [["prompt", "=", "own"]]}
    (place / "README.md").write_text(f"---\n{json.dumps({'configs': [config]})}\n---\n")
    with pytest.raises(ValueError, match=r"data.split='train': its README says filters; allowed are rows that are all"):
        Hub(str(place), "train")


class Own(pa.ExtensionType):
    """A type of columns as a program may have one: what a file says of it goes to its class."""

    heard: list = []  # noqa: RUF012

    def __init__(self, name="mine.own") -> None:
        super().__init__(pa.string(), name)

    def __arrow_ext_serialize__(self) -> bytes:
        return b"said"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage, said):
        cls.heard.append(said)
        return cls()


def table(name: bytes, *, nested: bool):
    """With a column ``x`` that its metadata says to be of an extension type, or to hold such."""
    about = {b"ARROW:extension:name": name, b"ARROW:extension:metadata": b"said"}
    field = pa.field("x", pa.string(), metadata=about)
    if nested:
        field = pa.field("x", pa.struct([field]))
    rows = [{"x": "y"}] if nested else ["y"]
    return pa.Table.from_arrays(
        [pa.array(["a prompt"]), pa.array(rows, field.type)], schema=pa.schema([pa.field("prompt", pa.string()), field])
    )


@provocation(
    "a data set with a column of a type that a program has registered with pyarrow, such as Ray's, which unpickles "
    "what the file says",
    "refused in one sentence before its class hears of it",
)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("way", ["jsonl", "parquet", "arrow", "folder", "file of arrow", "saved"])
@pytest.mark.grid
@pytest.mark.parametrize(
    "name", ["mine.own", "arrow.parquet.variant", "datasets.features.features.Array6DExtensionType"]
)
def test_types_that_a_program_has_registered(place, name, way, nested):
    kind = "parquet" if way in ("jsonl", "parquet", "folder") else "arrow"
    made, file = table(name.encode(), nested=nested), place / f"train.{kind}"
    if way == "saved":
        saved = datasets.Dataset.from_dict({"prompt": ["a"], "x": ["y"]})
        saved.save_to_disk(str(place))
        file = next(place.glob("*.arrow"))
    if kind == "parquet":
        pa.parquet.write_table(made, file)
    else:
        with (pa.ipc.new_file if way == "file of arrow" else pa.ipc.new_stream)(file, made.schema) as stream:
            stream.write_table(made)
    path = str(place) if way in ("folder", "saved") else str(file)
    Own.heard.clear()
    pa.register_extension_type(Own(name))
    try:
        with pytest.raises(
            ValueError, match=rf"the column 'x' has the extension type '{re.escape(name)}', whose class would be"
        ):
            JsonLines(path) if way == "jsonl" else Hub(path, "train")
        assert Own.heard == []
        if kind == "parquet":
            assert pyarrow.parquet.read_schema(file)
            assert Own.heard  # it would have
    finally:
        pa.unregister_extension_type(name)


@pytest.mark.parametrize("way", ["jsonl", "parquet", "arrow"])
def test_nor_do_types_whose_names_pyarrow_does_not_tell(place, way):
    """Of columns of run ends it reads the extension types of what is in them, but tells no metadata."""
    kind, plain = pa.run_end_encoded(pa.int32(), Own()), pa.table({"prompt": ["a"], "x": ["y"]})
    pa.register_extension_type(Own())
    try:
        schema = pa.schema([pa.field("prompt", pa.string()), pa.field("x", kind)])
        if way == "arrow":
            with pa.ipc.new_stream(place / "train.arrow", schema):
                pass
        else:
            said = base64.b64encode(schema.serialize().to_pybytes())
            with pa.parquet.ParquetWriter(place / "train.parquet", plain.schema, store_schema=False) as writer:
                writer.write_table(plain)
                writer.add_key_value_metadata({"ARROW:schema": said})
        Own.heard.clear()
        with pytest.raises(ValueError, match=r"the column 'x' has the extension type '\?run_end_encoded"):
            JsonLines(str(place / "train.parquet")) if way == "jsonl" else Hub(str(place / f"train.{way}"), "train")
        assert Own.heard == []
        if way != "arrow":
            pyarrow.parquet.read_schema(place / "train.parquet")
            assert Own.heard  # it would have
    finally:
        pa.unregister_extension_type("mine.own")


def test_types_of_pyarrows_own_are_read(place):
    made = pa.table({"prompt": ["a"], "x": pa.array(['{"a": 1}'], pa.json_())})
    pa.parquet.write_table(made, place / "train.parquet")
    assert JsonLines(str(place / "train.parquet"))[0][1]["x"] == '{"a": 1}'
    (place / "empty.arrow").touch()
    check_arrow(place / "empty.arrow")


class Place(pa.ExtensionType):
    """A type of places as geoarrow registers one with pyarrow, which parquet files name in a way of their own."""

    heard: ClassVar[list[bytes]] = []

    def __init__(self, said=b"{}"):
        self.said = said
        super().__init__(pa.binary(), "geoarrow.wkb")

    def __arrow_ext_serialize__(self):
        return self.said

    @classmethod
    def __arrow_ext_deserialize__(cls, storage, said):
        cls.heard.append(said)
        return cls(said)


@provocation(
    "a parquet file with a column of parquet's own type GEOMETRY or GEOGRAPHY, which pyarrow hands to a class that a "
    "library such as geoarrow has registered",
    "refused; no class hears of what the file says",
)
@pytest.mark.parametrize("edges", ["planar", "spherical"])
def test_places_that_a_library_has_registered(edges, place):
    point = bytes.fromhex("0101000000000000000000F03F0000000000000040")
    pa.register_extension_type(Place())
    try:
        kind = Place(json.dumps({"crs": "HIT", "edges": edges}).encode())
        column = pa.ExtensionArray.from_storage(kind, pa.array([point, point], pa.binary()))
        pa.parquet.write_table(
            pa.table({"prompt": ["a", "b"], "place": column}), place / "train.parquet", store_schema=False
        )
        Place.heard.clear()
        for read in (lambda: JsonLines(str(place / "train.parquet")), lambda: Hub(str(place), "train")):
            with pytest.raises(ValueError, match=r"the column 'place' is of the type GEO\w+; allowed are types of pya"):
                read()
        assert {*Place.heard} <= {b"{}"}  # of this package's own
        kept = pa.ipc.read_schema(pa.schema([pa.field("x", kind)]).serialize())
        assert isinstance(kept.field(0).type, Place)
    finally:
        pa.unregister_extension_type("geoarrow.wkb")


@pytest.mark.parametrize("way", ["jsonl", "folder"])
def test_variants_that_a_program_has_registered(way, place):
    parts = pa.struct([pa.field("metadata", pa.binary(), nullable=False), pa.field("value", pa.binary())])
    made = pa.table({"prompt": pa.array(["a"]), "vrnt": pa.array([{"metadata": b"m", "value": b"said"}], parts)})
    file = place / "train.parquet"
    pa.parquet.write_table(made, file, store_schema=False)
    content = file.read_bytes()
    size = int.from_bytes(content[-8:-4], "little")
    plain, variant = (
        b"\x18\x04vrnt\x15\x04\x00",
        b"\x18\x04vrnt\x15\x04\x5c\x0c\x20\x00\x00\x00",
    )  # a field of Thrift's more
    assert content[-8 - size :].count(plain) == 1
    footer = content[-8 - size : -8].replace(plain, variant)
    file.write_bytes(content[: -8 - size] + footer + len(footer).to_bytes(4, "little") + b"PAR1")

    class Variant(Own):
        heard: ClassVar[list[bytes]] = []

        def __init__(self):
            pa.ExtensionType.__init__(self, parts, "arrow.parquet.variant")

        def __arrow_ext_serialize__(self):
            return b"{}"

    pa.register_extension_type(Variant())
    try:
        Variant.heard.clear()
        with pytest.raises(ValueError, match=r"a column is of the type VARIANT; allowed are types of pyarrow's own"):
            JsonLines(str(file)) if way == "jsonl" else Hub(str(place), "train")
        assert {*Variant.heard} <= {b"{}"}  # of this package's own
        pyarrow.parquet.read_schema(file)
        assert b"" in Variant.heard  # it would have
    finally:
        pa.unregister_extension_type("arrow.parquet.variant")


class Doc:
    """A type of columns as a program may have registered one with datasets."""

    def __init__(self, **said) -> None:
        raise AssertionError("it was made of what a file says")


def test_features_that_a_program_has_registered(place):
    kinds = {"prompt": {"dtype": "string", "_type": "Value"}, "x": {"log": "HIT", "_type": "Doc"}}
    about = {"info": {"features": kinds}}
    made = pa.table({"prompt": ["a"], "x": ["y"]}).replace_schema_metadata({"huggingface": json.dumps(about)})
    pa.parquet.write_table(made, place / "train.parquet")
    features.register_feature(Doc, "Doc")
    try:
        with pytest.raises(ValueError, match=r"Doc"):
            Hub(str(place), "train")
        assert features._FEATURE_TYPES["Doc"] is Doc
    finally:
        del features._FEATURE_TYPES["Doc"]
