"""Types of columns of arrow and parquet files that strangers may have written."""

from collections.abc import Iterator

import pyarrow as pa

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


def check_columns(schema: pa.Schema) -> None:
    """Refuse columns of types that pyarrow reads unchecked: a view that is null is copied in the length that it says.

    Raises:
        ValueError: There are such; names the first.
    """
    for field in schema:
        column = f"the column {one_line(repr(field.name))} holds"
        for kind in _kinds(field.type):
            if not any(is_one(kind) for is_one in _COLUMNS):
                told = f"values of the type {one_line(str(kind))[:80]}; allowed are types with memory of their own"
                raise ValueError(f"{column} {told}, such as string and large_string")
            most = DIGITS[kind.bit_width] if pa.types.is_decimal(kind) else None
            if most is not None and not 0 <= kind.scale <= most:
                raise ValueError(f"{column} decimal numbers of the scale {kind.scale}; allowed are 0 to {most}")
            if pa.types.is_fixed_size_list(kind) and kind.list_size < 0:
                raise ValueError(f"{column} lists of {kind.list_size} values; allowed are 0 and more")
        check_length(field.type)


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
