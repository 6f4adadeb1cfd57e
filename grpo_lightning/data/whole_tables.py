"""Tables of strangers: their types, sizes and offsets are looked at before libraries trust them."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.json
from datasets import table as arrow_files
from datasets.features import features
from datasets.packaged_modules.arrow.arrow import Arrow
from datasets.packaged_modules.parquet.parquet import Parquet
from pyarrow import ipc, parquet

from grpo_lightning.data.columns import DIGITS, check_arrow, check_columns, check_length, parquet_schema
from grpo_lightning.data.json_tables import read_in_one_block
from grpo_lightning.output.terminal import one_line

_TYPE = re.compile(
    r"null|uuid|bool[_8]?|u?int(8|16|32|64)|float(16|32|64)|date(32|64)|month_day_nano_interval|((large_)?(string|utf8|binary)"
    r"|(string|binary)_view)|\w+[(\[].*",
    re.ASCII | re.DOTALL,
)
"""Of what stands before a bracket datasets knows the few that there are; any other name is a function of pyarrow's."""

_DECIMAL = re.compile(r"decimal(128|256)\(\d+, ?(\d+)\)", re.ASCII)


@contextmanager
def whole_tables() -> Iterator[None]:
    """Inside, datasets makes tables only of files that are what they say, and of types of pyarrow's and its own.

    Of the types of columns, which files name, it calls by itself all that pyarrow has a function for, and what a
    program has registered. Lists have no type that makes them longer than pyarrow can count, lines of JSON are read in
    one block, and tables are validated, also those that datasets has prepared before, as pyarrow trusts their offsets.
    """
    by_name, nested, tables = features.string_to_arrow, features.get_nested_type, Parquet._generate_tables
    casts = {kind: kind._cast_table for kind in (Arrow, Parquet)}

    def known(name: str) -> Any:
        if not _TYPE.fullmatch(name):
            raise ValueError(
                f"a column of the type {one_line(repr(name))}: allowed are types of pyarrow's, like string"
            )
        if name.startswith("decimal"):
            decimal = _DECIMAL.fullmatch(name)
            if not decimal or int(decimal[2]) > DIGITS[int(decimal[1])]:
                allowed = " and ".join(f"decimal{bits}(DIGITS, SCALE), 0 to {DIGITS[bits]}" for bits in (128, 256))
                raise ValueError(f"a column of the type {one_line(repr(name))}: allowed are {allowed}")
        return by_name(name)

    def bounded(feature: Any) -> Any:
        check_length(kind := nested(feature))
        return kind

    def cast(builder: Any, table: Any) -> Any:
        check_columns(table.schema)
        table.validate(full=True)  # parquet's reader takes numbers of words of a dictionary as they are
        return casts[Arrow if isinstance(builder, Arrow) else Parquet](builder, table)

    def typed(builder: Any, files: Iterable[str], *others: Any, **options: Any) -> Iterator[Any]:
        """Types are looked at before rows, whose lists are made as long as a file says."""
        for file in (files := [*files]):
            with open(file, "rb") as opened, suppress(pyarrow.ArrowException):  # a damaged one is told when it is read
                check_columns(parquet_schema(opened))
        yield from tables(builder, files, *others, **options)

    files = ("_memory_mapped_arrow_table_from_file", "_in_memory_arrow_table_from_file")
    prepared: dict[str, Any] = {name: _validated(getattr(arrow_files, name)) for name in files}
    opened: dict[str, Any] = {name: _looked_at(getattr(ipc, name)) for name in ("open_stream", "open_file")}
    with (
        patch.object(features, "string_to_arrow", known),
        patch.object(features, "get_nested_type", bounded),
        patch.object(pyarrow.json, "read_json", read_in_one_block),
        patch.object(Arrow, "_cast_table", cast),
        patch.object(Parquet, "_cast_table", cast),
        patch.object(Parquet, "_generate_tables", typed),
        patch.object(parquet, "read_schema", parquet_schema),
        patch.multiple(arrow_files, **prepared),
        patch.multiple(ipc, **opened),
        patch.dict(features._FEATURE_TYPES),
    ):
        for name, made in [*features._FEATURE_TYPES.items()]:
            if not made.__module__.startswith("datasets."):  # a program's own, which would be given what files say
                del features._FEATURE_TYPES[name]
        yield


def _looked_at(read: Callable[..., Any]) -> Callable[..., Any]:
    """A reader of arrow that is handed files, with `check_arrow` before."""

    def checked(source: Any, *args: Any, **options: Any) -> Any:
        if isinstance(name := getattr(source, "name", None), str) and Path(name).is_file():
            check_arrow(Path(name))
        return read(source, *args, **options)

    return checked


def _validated(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader of a file of arrow that datasets has written, or is said to have written."""
    open_stream = ipc.open_stream

    def checked(file: str) -> Any:
        check_arrow(Path(file))
        with pyarrow.memory_map(file) as mapped, open_stream(mapped) as stream:
            check_columns(stream.schema)
            for batch in stream:
                batch.validate(full=True)
        return read(file)

    return checked
