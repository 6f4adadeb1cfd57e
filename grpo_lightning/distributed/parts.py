"""Checkpoints that are directories of parts, as several processes write them: checked before anything reads them.

torch.distributed.checkpoint reads ``.metadata``, and what is no tensor in the parts, with a plain ``pickle``, which
runs whatever code a file names. So both are read here first, by unpicklers that know a few harmless classes only.
"""

import io
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from itertools import combinations, starmap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException

from grpo_lightning.distributed.reading import NotPlain, no_pickles, weights_only
from grpo_lightning.output.terminal import one_line

METADATA = ".metadata"


class _Fixed:
    """Stands for a class or function whose results have no state: neither it nor what it makes can be changed."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(
            "it changes what no checkpoint changes, which is not loaded, since it could run code"
        )


def _record(known: type) -> type:
    """A subclass of a dataclass, of which a pickle can set the fields and nothing else."""
    names = {field.name for field in fields(known)}
    is_tuple = known is metadata.TensorProperties  # has a __setstate__ of its own, which only takes it apart

    def set_state(self: Any, state: Any) -> None:
        if is_tuple and type(state) is tuple and len(state) == len(names):
            return
        if is_tuple or type(state) is not dict or not all(type(key) is str and key in names for key in state):
            raise pickle.UnpicklingError(
                f"a {known.__name__} in it is not one, and not loaded, since it could run code"
            )
        self.__dict__.update(state)

    return type(known.__name__, (known,), {"__setstate__": set_state})


_Chunk, _Bytes, _Tensor = (
    _record(known)
    for known in (metadata.ChunkStorageMetadata, metadata.BytesStorageMetadata, metadata.TensorStorageMetadata)
)
_Place, _Index = _record(filesystem._StorageInfo), _record(metadata.MetadataIndex)
_PATHS: dict[str, type] = dict.fromkeys(
    ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"), _Fixed
)
_CLASSES: dict[str, dict[str, type]] = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata": _Bytes,
        "ChunkStorageMetadata": _Chunk,
        "Metadata": _record(metadata.Metadata),
        "MetadataIndex": _Index,
        "StorageMeta": _record(metadata.StorageMeta),
        "TensorProperties": _record(metadata.TensorProperties),
        "TensorStorageMetadata": _Tensor,
        "_MEM_FORMAT_ENCODING": _Fixed,
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": _Place},
    "torch.serialization": {"_get_layout": _Fixed},
    "torch": {"Size": torch.Size},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}


class _Reader(pickle.Unpickler):
    """Knows what a true ``.metadata`` names, by stand-ins: nothing that it reads reaches the classes themselves.

    It is the reader that torch uses, so both take the same file for the same; what changes more than fields of the
    records is refused here, and never reaches torch.
    """

    def find_class(self, module: str, name: str) -> Any:
        if not _is_known(module, name):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not loaded, since it could run code")
        return _CLASSES[module][name] if name in _CLASSES.get(module, {}) else getattr(torch, name)


def _is_known(module: str, name: str) -> bool:
    """Whether a true ``.metadata`` may name this."""
    is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
    return is_dtype or name in _CLASSES.get(module, {})


@contextmanager
def values_only() -> Iterator[None]:
    """Inside, torch reads of a directory what `problem` looks at: values and tensors, as ``.metadata`` describes them.

    Where that cannot be read, torch by itself goes on with any file that is called as one of each process may be.

    Raises:
        ValueError: A part is no dense tensor, or holds what could run code.
    """
    read = filesystem.FileSystemReader.read_metadata

    def read_known(self: filesystem.FileSystemReader) -> metadata.Metadata:  # torch passes a rank if there is a place
        with no_pickles(_is_known):
            return read(self)

    filesystem.FileSystemReader.read_metadata = read_known  # type: ignore[method-assign]
    try:
        with weights_only():
            yield
    except CheckpointException as error:
        first = next((failure for failure, _ in error.failures.values()), error)
        told = one_line(str(first).strip().partition("\n")[0])[:200]
        raise ValueError(f"the checkpoint's parts cannot be read: {told}") from error
    finally:
        filesystem.FileSystemReader.read_metadata = read  # type: ignore[method-assign]


@contextmanager
def plainly_written() -> Iterator[None]:
    """Inside, torch writes a ``.metadata`` that names nothing else, whichever Python it is.

    Up to Python 3.11.3 members of an ``Enum`` are pickled as ``getattr(CLASS, NAME)``, and what may call ``getattr``
    could run code.
    """
    with patch.object(metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", _by_value):
        yield


def _by_value(member: Enum, protocol: Any) -> tuple[type, tuple[Any]]:
    return type(member), (member.value,)


def problem(directory: Path) -> str | None:
    """What is wrong with a directory of parts, to be read behind its name; None if nothing is.

    Args:
        directory: The checkpoint. Nothing in it is run.
    """
    try:
        other = next(filter(_is_of_one_process, sorted(directory.iterdir())), None)
    except OSError as error:
        return f"is a directory whose files cannot be listed: {error.strerror}"
    if other:
        return f"has a {one_line(other.name)}, which this program has not written and which could run code"
    try:
        with no_pickles(_is_known):
            described: Any = _Reader(io.BytesIO((directory / METADATA).read_bytes())).load()
        places, kinds = described.storage_data, described.state_dict_metadata
    except FileNotFoundError:
        return f"lacks {METADATA}: it was not written to its end"
    except Exception as error:  # a pickle may raise anything
        return f"has a {METADATA} that cannot be read: {one_line(str(error)[:200])}"
    if type(places) is not dict or type(kinds) is not dict:
        return f"has a {METADATA} that cannot be read: it says nothing of the parts"
    for name, kind in kinds.items():
        if type(kind) is _Tensor and not _is_covered(kind):
            return f"has no whole {one_line(str(name)[:80])}: its parts leave some of it out, or overlap"
    for index, place in places.items():
        if found := _problem_of_part(directory, index, place, kinds):
            return found
    try:
        with values_only():
            filesystem.FileSystemReader(directory).read_metadata()
    except Exception as error:  # the classes themselves may refuse what their stand-ins take
        return f"has a {METADATA} that cannot be read: {one_line(str(error)[:200])}"
    return None


def _is_covered(kind: Any) -> bool:
    """Whether the parts of a tensor are all of it, once: what is in none would be what lies in memory."""
    try:
        parts = [[*zip(part.offsets, part.sizes, kind.size, strict=True)] for part in kind.chunks]
        count = math.prod(kind.size)
    except (AttributeError, TypeError, ValueError):
        return False
    numbers = [number for part in parts for axis in part for number in axis]
    if not all(type(number) is int and number >= 0 for number in (*kind.size, *numbers)):
        return False
    parts = [part for part in parts if all(length for _, length, _ in part)]
    is_inside = all(begin + length <= size for part in parts for begin, length, size in part)
    is_whole = sum(math.prod(length for _, length, _ in part) for part in parts) == count
    return is_inside and is_whole and not any(starmap(_overlap, combinations(parts, 2)))


def _overlap(one: Sequence[tuple[int, ...]], other: Sequence[tuple[int, ...]]) -> bool:
    return all(a < b + n and b < a + m for (a, m, _), (b, n, _) in zip(one, other, strict=True))


def _is_of_one_process(path: Path) -> bool:
    """Whether torch could read this, unchecked, where reading ``.metadata`` raises; this program writes none such.

    Many file systems tell no upper from lower case, and some leave out letters that are not seen.
    """
    name = "".join(filter(str.isascii, path.name)).casefold()
    return path.name != METADATA and name.endswith(METADATA)


def _problem_of_part(directory: Path, index: Any, place: Any, kinds: Mapping[Any, Any]) -> str | None:
    try:
        name, offset, length = place.relative_path, place.offset, place.length
        path, kind = directory / name, type(kinds[index.fqn])
        is_known = type(place) is _Place and type(index) is _Index and kind in (_Tensor, _Bytes)
        if not is_known or type(name) is not str or path.parent != directory or place.transform_descriptors:
            return f"has a {METADATA} that this program has not written ({str(name)[:80]})"
        if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
            raise TypeError(f"bytes {offset!r:.80} to {length!r:.80} more")
        if path.stat().st_size < offset + length:
            return f"is cut off: {name} has {path.stat().st_size} bytes"
        if kind is _Bytes:
            with path.open("rb") as file:
                file.seek(offset)
                held = io.BytesIO(file.read(length))
            with weights_only():
                torch.load(held, weights_only=True)
    except FileNotFoundError:
        return f"lacks {name}"
    except NotPlain as error:
        return f"is not read, for its {name}: {error}"
    except pickle.UnpicklingError:
        return (
            f"holds objects that are not loaded, since they could run code, beside tensors and plain values in {name}"
        )
    except Exception as error:
        return f"is damaged: {type(error).__name__} in {str(getattr(place, 'relative_path', METADATA))[:80]}"
    return None
