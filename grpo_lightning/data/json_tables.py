"""Tables of JSON lines that strangers may have written, read so that pyarrow stays within its memory."""

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.json

_read = pyarrow.json.read_json
_MOST_BYTES = 2**31 - 2
"""Of one block, whose size pyarrow counts in 32 bits."""


def read_in_one_block(source: Any, read_options: Any = None, *others: Any, **options: Any) -> pa.Table:
    """A table of JSON lines, as ``pyarrow.json.read_json`` makes it of lines that are all of one block.

    Where types change from block to block, pyarrow 26 takes lists for mappings, and writes where their memory says. Of
    one block it can make lists that are longer than their memory; their lines are read anew, one by one.

    Args:
        source: A file that is open for reading bytes.
        read_options: Left out: they say how large blocks are.
        others: Further arguments of pyarrow's.
        options: Such by name.

    Raises:
        pyarrow.ArrowInvalid: The lines are no JSON, too many, or of types that do not go together.
    """
    content = source.read() + b"\n"  # else the last line is a block of its own
    if len(content) > _MOST_BYTES:
        raise pa.ArrowInvalid(f"{len(content)} bytes at once; allowed are {_MOST_BYTES}, such as in shorter lines")
    whole = pyarrow.json.ReadOptions(use_threads=False, block_size=max(len(content), 2))
    table = _read(io.BytesIO(content), whole, *others, **options)
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        table = _line_by_line(content)
    return table


def _line_by_line(content: bytes) -> pa.Table:
    try:
        rows = [json.loads(line) for line in content.split(b"\n") if line.strip()]
        table = pa.Table.from_struct_array(pa.array(rows))  # from_pylist would look at the first row for its columns
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's own are among them
        raise pa.ArrowInvalid(str(error)) from error
    table.validate(full=True)
    return table
