"""A program that says which extension types the columns of a file have: extension_types.py FILE parquet|arrow.

Whoever reads the types of a file has pyarrow hand what the file says of them to classes that the process has
registered; this process has registered none. It prints a list of pairs, names of columns and of types. Where pyarrow
does not tell the names of types, since it drops what is said of parts of a column, there is one that begins with "?".
"""

import base64
import binascii
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet


def told(fields: Iterable[pa.Field]) -> Iterator[tuple[str, str]]:
    """Pairs of the names of columns, and of parts of such, and those of their extension types."""
    for field in fields:
        kind = field.type
        if name := (field.metadata or {}).get(b"ARROW:extension:name"):
            yield field.name, name.decode(errors="replace")
        while pa.types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
            if isinstance(kind, pa.BaseExtensionType):
                yield field.name, kind.extension_name
                kind = kind.storage_type
            else:
                kind = kind.value_type
        if kind.num_fields and not any(is_one(kind) for is_one in _NESTED):
            yield field.name, f"?{kind}"
        yield from told(kind.field(number) for number in range(kind.num_fields))


_NESTED = (
    *(pa.types.is_struct, pa.types.is_map),
    *(pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list),
)


def of_parquet(file: BinaryIO) -> Iterator[tuple[str, str]]:
    """What a parquet file says: in what it holds of arrow, which pyarrow reads even where the columns are others."""
    said = (pa.parquet.read_metadata(file).metadata or {}).get(b"ARROW:schema", b"")
    try:
        yield from told(pa.ipc.read_schema(pa.py_buffer(base64.b64decode(said, validate=True))))
    except (binascii.Error, pa.ArrowException):
        yield "ARROW:schema", "?"


def of_arrow(file: BinaryIO) -> Iterator[tuple[str, str]]:
    """What a file of arrow says, as a stream and as a file."""
    for opened in (pa.ipc.open_stream, pa.ipc.open_file):
        file.seek(0)
        try:
            yield from told(opened(file).schema)
        except pa.ArrowException:  # it is of the other kind
            continue


def main(path: str, kind: str) -> None:
    """Print the pairs as JSON."""
    with open(path, "rb") as file:
        print(json.dumps([*(of_parquet if kind == "parquet" else of_arrow)(file)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # at an ordinary end pyarrow's threads sometimes abort the process
