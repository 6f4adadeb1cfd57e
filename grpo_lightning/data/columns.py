"""Types of columns of arrow and parquet files that strangers may have written."""

import base64
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from grpo_lightning.data import extension_types
from grpo_lightning.output.terminal import one_line

_COLUMNS = (
    *(pa.types.is_null, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal),
    *(pa.types.is_temporal, pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary),
    *(pa.types.is_fixed_size_binary, pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list),
    *(pa.types.is_struct, pa.types.is_map, pa.types.is_dictionary),
)
"""Tell the types of columns that data sets have: of views, unions and run ends pyarrow trusts what files say."""
DIGITS = {32: 9, 64: 18, 128: 38, 256: 76}
"""Bits of a decimal number -> its most digits: pyarrow looks for powers of ten in a table of so many, also beyond."""
_MOST_VALUES = 2**24
"""Of one row, as far as its type says how many it has: with the number of rows, pyarrow counts in 64 bits."""


_EXTENSION = b"ARROW:extension:name"
_ENCODED = tuple(base64.b64encode(bytes(before) + _EXTENSION)[4:-4] for before in range(3))
"""The middle of it in base 64, as parquet has it, wherever in a text it begins."""
_PLACES = ("GEOMETRY", "GEOGRAPHY")
"""Parquet's own types of places."""
_VARIANT = pa.struct([pa.field(name, pa.binary(), nullable=False) for name in ("metadata", "value")])
_OF_PARQUETS_OWN = {"geoarrow.wkb": pa.binary(), "arrow.parquet.variant": _VARIANT}
"""A type of a program's that pyarrow looks for where a file has a type of parquet's own -> how values are held."""
_KNOWN = {
    *("arrow.bool8", "arrow.fixed_shape_tensor", "arrow.json", "arrow.opaque", "arrow.uuid"),
    "arrow.variable_shape_tensor",
    *(f"datasets.features.features.Array{number}DExtensionType" for number in range(2, 6)),
}
"""The extension types that pyarrow and datasets have themselves; of some of Arrow's names pyarrow has none."""
_read_schema = pa.parquet.read_schema


def parquet_schema(file: Any) -> pa.Schema:
    """The types of the columns of a parquet file that is open for reading.

    Raises:
        ValueError: One is an extension type of a program's: pyarrow would hand what the file says to its class, as soon
            as it reads the types.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))  # the length of the footer, which says of what types columns are, and PAR1
    file.seek(max(0, size - 8 - int.from_bytes(file.read(4), "little")))
    footer = file.read()
    if any(core in footer for core in _ENCODED):
        _check_extensions(Path(file.name), "parquet")
    file.seek(0)
    with ExitStack() as stack:
        for name, storage in _OF_PARQUETS_OWN.items():
            stack.enter_context(_without(name, storage))
        columns = pa.parquet.read_metadata(file).schema
    if " (Variant" in str(columns):  # of a group, of which pyarrow tells the type in no other way
        raise ValueError("a column is of the type VARIANT; allowed are types of pyarrow's own")
    for column in map(columns.column, range(len(columns))):
        if column.logical_type.type in _PLACES:
            raise ValueError(
                f"the column {one_line(repr(column.path))[:80]} is of the type {column.logical_type.type}; allowed are "
                "types of pyarrow's own"
            )
    file.seek(0)
    return _read_schema(file)


@contextmanager
def _without(name: str, storage: pa.DataType) -> Iterator[None]:
    """Inside, no program's type of this name is registered: it would be given what a file says."""
    named = {"ARROW:extension:name": name, "ARROW:extension:metadata": "{}"}
    written = pa.schema([pa.field("x", storage, metadata=named)]).serialize()
    kind = pa.ipc.read_schema(written).field(0).type
    if not isinstance(kind, pa.ExtensionType):
        yield
        return
    pa.unregister_extension_type(name)
    try:
        yield
    finally:
        pa.register_extension_type(kind)


def check_arrow(path: Path) -> None:
    """`parquet_schema`'s errors for a file of arrow, whether it is a stream or not."""
    if not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        has_some = held.find(_EXTENSION) >= 0
    if has_some:
        _check_extensions(path, "arrow")


def _check_extensions(path: Path, kind: str) -> None:
    """Refuse a file with extension types of a program's, as `extension_types` tells them in a process of its own."""
    command = [sys.executable, "-P", extension_types.__file__, str(path.absolute()), kind]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"the extension types of its columns cannot be looked at: {one_line(done.stderr[-200:])}")
    for column, name in json.loads(done.stdout):
        if name not in _KNOWN:
            raise ValueError(
                f"the column {one_line(repr(column))[:80]} has the extension type {one_line(repr(name))[:80]}, whose "
                "class would be given what the file says; allowed are types of pyarrow's own"
            )


def check_columns(schema: pa.Schema) -> None:
    """Refuse columns of types that pyarrow reads unchecked: a view that is null is copied in the length that it says.

    Raises:
        ValueError: There are such; names the first.
    """
    for field in schema:
        column = f"the column {one_line(repr(field.name))} holds"
        for kind in _kinds(field.type):
            _check_kind(kind, field.name)
            most = DIGITS[kind.bit_width] if pa.types.is_decimal(kind) else None
            if most is not None and not 0 <= kind.scale <= most:
                raise ValueError(f"{column} decimal numbers of the scale {kind.scale}; allowed are 0 to {most}")
            if pa.types.is_fixed_size_list(kind) and kind.list_size < 0:
                raise ValueError(f"{column} lists of {kind.list_size} values; allowed are 0 and more")
        check_length(field.type)


def _check_kind(kind: pa.DataType, column: str) -> None:
    if not any(is_one(kind) for is_one in _COLUMNS):
        told = f"values of the type {one_line(str(kind))[:80]}; allowed are types with memory of their own"
        raise ValueError(f"the column {one_line(repr(column))} holds {told}, such as string and large_string")


def check_length(kind: pa.DataType) -> None:
    """Refuse a type whose lists have so many values that pyarrow would write beyond their memory.

    Raises:
        ValueError: It has.
    """
    if (number := _values(kind)) > _MOST_VALUES:
        told = one_line(str(kind))[:80]
        raise ValueError(f"a column of the type {told}, of {number} values in a row; allowed are {_MOST_VALUES}")


def _values(kind: pa.DataType) -> int:
    """How many values a row of a type has in its longest list of lists, as far as the type says; of texts, bytes."""
    if isinstance(kind, pa.BaseExtensionType):
        return _values(kind.storage_type)
    own = kind.list_size if pa.types.is_fixed_size_list(kind) else 1
    own = kind.byte_width if pa.types.is_fixed_size_binary(kind) else own
    below = [kind.value_type] if pa.types.is_dictionary(kind) else []
    below += [kind.field(number).type for number in range(kind.num_fields)]
    return max(own, 1) * max(map(_values, below), default=1)


def _kinds(kind: pa.DataType) -> Iterator[pa.DataType]:
    """A type, and those that it is made of, which its own name may not tell."""
    if isinstance(kind, pa.BaseExtensionType):
        yield from _kinds(kind.storage_type)
        return
    yield kind
    if pa.types.is_dictionary(kind):
        yield from _kinds(kind.value_type)
    for number in range(kind.num_fields):
        yield from _kinds(kind.field(number).type)
