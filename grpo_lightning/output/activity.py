"""What a process is doing, noted where the process that started it can still read it after a crash."""

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIZE = 2**20  # bytes, of which the system takes those that are written to

_page: mmap.mmap | None = None
_facts: dict[str, Any] = {}


def share() -> None:
    """Begin anew, on memory that processes forked from now on share with this one."""
    global _page
    _page = mmap.mmap(-1, _SIZE)
    _facts.clear()


def note(**facts: Any) -> None:
    """Note plain values by name, in place of earlier ones of these names."""
    _facts.update(facts)
    if _page is not None and len(text := json.dumps(_facts).encode()) <= _SIZE - 8:
        # The length comes first and is 0 meanwhile, so that a process that dies here leaves nothing half written.
        _page[:8] = bytes(8)
        _page[8 : 8 + len(text)] = text
        _page[:8] = len(text).to_bytes(8, "little")


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Inside, ``what`` is what the process does; afterwards what it did before."""
    before = _facts.get("doing")
    note(doing=what)
    try:
        yield
    finally:
        note(doing=before)


def noted() -> dict[str, Any]:
    """What was noted, by this process or by one that it forked."""
    if _page is None:
        return dict(_facts)
    length = int.from_bytes(_page[:8], "little")
    facts: dict[str, Any] = json.loads(_page[8 : 8 + length]) if length else {}
    return facts
