"""Types of columns of arrow and parquet files that strangers may have written."""

import base64
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

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


_EXTENSION, _RENAMED = b"ARROW:extension:name", b"ARROW:extension:nam_"
_ENCODED = tuple(base64.b64encode(bytes(before) + _EXTENSION)[4:-4] for before in range(3))
"""The middle of it in base 64, wherever in a text it begins."""
_BASE64 = re.compile(rb"[A-Za-z0-9+/]*={0,2}")
_KNOWN = ("arrow.", "datasets.features.features.Array")
"""What the names of extension types begin with that pyarrow and datasets have themselves."""
_read_schema, _opened = pa.parquet.read_schema, (pa.ipc.open_stream, pa.ipc.open_file)


def parquet_schema(file: Any) -> pa.Schema:
    """The types of the columns of a parquet file that is open for reading.

    Raises:
        ValueError: One is an extension type of a program's: pyarrow would hand what the file says to its class, as soon
            as it reads the types.
    """
    footer = _footer(file)
    if any(core in footer for core in _ENCODED):
        begin = footer.find(b"/////")  # -1, by which pyarrow begins what it says of types, in base 64
        run = _BASE64.match(footer, begin) if begin >= 0 else None
        types = base64.b64decode(run[0][: len(run[0]) // 4 * 4]) if run else b""
        try:
            schema = pa.ipc.read_schema(pa.py_buffer(types.replace(_EXTENSION, _RENAMED)))
        except pa.ArrowException as error:
            raise ValueError("what its ARROW:schema says of extension types cannot be read") from error
        if _check_names(schema) != types.count(_EXTENSION):
            raise ValueError("not all extension types are those of columns")
        if _count(footer) != _count(base64.b64encode(types)):
            raise ValueError("it says twice of which extension types its columns are")
    file.seek(0)
    return _read_schema(file)


def _footer(file: Any) -> bytes:
    """The end of a parquet file, which says of what types its columns are; nothing if it is no such file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    last = file.read(8)
    if not last.endswith(b"PAR1"):
        return b""
    file.seek(max(0, size - 8 - int.from_bytes(last[:4], "little")))
    return bytes(file.read())


def _count(text: bytes) -> int:
    return sum(text.count(core) for core in _ENCODED)


def check_arrow(path: Path) -> None:
    """`parquet_schema`'s errors for a file of arrow, whether it is a stream or not."""
    if not path.stat().st_size:
        return
    with path.open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # what is changed in it stays here
    while (place := held.find(_EXTENSION)) >= 0:
        held[place : place + len(_EXTENSION)] = _RENAMED
    for opened in _opened:
        try:
            schema = opened(pa.py_buffer(held)).schema
        except pa.ArrowException:
            continue
        _check_names(schema)


def _check_names(fields: Iterable[pa.Field]) -> int:
    """Refuse extension types of programs, in types that were read without them; returns how many others there are.

    Of what `check_columns` refuses pyarrow does not tell all names.
    """
    count = 0
    for field in fields:
        name = ((field.metadata or {}).get(_RENAMED) or b"").decode(errors="replace")
        if name and not name.startswith(_KNOWN):
            raise ValueError(
                f"the column {one_line(repr(field.name))[:80]} has the extension type {one_line(repr(name))[:80]}, "
                "whose class would be given what the file says; allowed are types of pyarrow's own"
            )
        count += bool(name)
        kind = field.type
        while pa.types.is_dictionary(kind):
            kind = kind.value_type
        _check_kind(kind, field.name)
        count += _check_names(kind.field(number) for number in range(kind.num_fields))
    return count


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
