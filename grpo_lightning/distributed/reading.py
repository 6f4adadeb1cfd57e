"""What is read of files that may be a stranger's: tensors and plain values, never what could run code."""

import copyreg
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pickle import UnpicklingError
from typing import Any

_FORCED, _OPPOSITE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_ARCHIVE = b"PK\x03\x04"
"""By which torch tells an archive from an older file."""
_is_readable: ContextVar[Callable[[str, str], bool] | None] = ContextVar("_is_readable", default=None)
"""What this thread reads of pickles, all if None; other threads may have results of worker processes to read."""


_NAMES = {
    *("collections.OrderedDict", "collections.Counter", "torch.Size", "torch.device"),
    *("builtins.bytearray", "builtins.set", "builtins.complex"),
    *(f"torch._utils._rebuild_{what}" for what in ("parameter", "tensor_v2", "tensor_v3")),
}
"""What tensors and plain values are made by, besides names of types of numbers and of their storages."""
_PLACE = re.compile(r"cpu|meta|(cuda|mps|xpu|hpu)(:[0-9]+)?")
_QUANTIZED = re.compile(r"\bq(u?)int", re.IGNORECASE)


class NotPlain(ValueError):
    """Torch was to read more than dense tensors and plain values."""


def _nothing(module: str, name: str) -> bool:
    return False


def is_archive(file: Any) -> bool:
    """Whether a file, or what is open for reading, is an archive to torch, as it writes since version 1.6.

    What older files say of memory and of views of it, torch does not look at.
    """
    if hasattr(file, "seek"):
        place = file.tell()
        begin = file.read(len(_ARCHIVE))
        file.seek(place)
        return bool(begin == _ARCHIVE)
    with open(file, "rb") as content:
        return content.read(len(_ARCHIVE)) == _ARCHIVE


@contextmanager
def only_plain_names() -> Iterator[None]:
    """Inside, ``torch.load(weights_only=True)`` calls what makes dense tensors and plain values, and nothing else.

    By itself torch calls a hundred things more: those for tensors of other kinds, one of which makes tensors that lie
    wherever in memory a file says, and what libraries have added. Nor does it turn bytes around where a file says that
    another kind of machine has written it, which may be said of tensors without memory.
    """
    from torch import Tensor, UntypedStorage
    from torch import _weights_only_unpickler as unpickler

    plain = _plain_names()
    names, added = unpickler._get_allowed_globals, unpickler._get_user_allowed_globals
    swap = UntypedStorage.byteswap
    unpickler._get_allowed_globals = lambda: plain  # type: ignore[assignment]
    unpickler._get_user_allowed_globals = dict
    UntypedStorage.byteswap = _refuse_other_order  # type: ignore[method-assign]
    Tensor.set_ = _set_inside  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del Tensor.set_  # which hides that of the class below
        unpickler._get_allowed_globals, unpickler._get_user_allowed_globals = names, added
        UntypedStorage.byteswap = swap  # type: ignore[method-assign]


@functools.cache
def _plain_names() -> dict[str, Any]:
    import torch
    from torch._weights_only_unpickler import _get_allowed_globals
    from torch.serialization import StorageType

    def is_plain(name: str, made: Any) -> bool:
        is_number = isinstance(made, torch.dtype | StorageType) and not _QUANTIZED.search(name)
        return name in _NAMES or is_number

    known = {name: made for name, made in _get_allowed_globals().items() if is_plain(name, made)}
    return known | {"_codecs.encode": _bytes, "torch.storage.UntypedStorage": _Bytes(torch.uint8)}


class _Bytes:
    """Stands for the storage of bytes where a file says what its tensors lie in; called it would make one of its own.

    That one would hold whatever this process had in its memory before.
    """

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def __call__(self, *_: Any) -> None:
        raise UnpicklingError("memory that no file holds")


def _set_inside(tensor: Any, source: Any = None, offset: int = 0, size: Any = (), stride: Any = ()) -> Any:
    """``Tensor.set_``, to memory that there is; by itself it makes some, or more, with whatever was there before."""
    import torch

    held = source.untyped_storage() if isinstance(source, torch.Tensor) else source
    is_empty = any(number == 0 for number in size)
    last = offset + sum(step * (number - 1) for step, number in zip(stride, size, strict=True))
    if held is None or (not is_empty and (last + 1) * tensor.element_size() > held.nbytes()):
        raise UnpicklingError("memory that no file holds")
    return torch._C.TensorBase.set_(tensor, source, offset, size, stride)


def _refuse_other_order(storage: Any, dtype: Any) -> None:
    raise ValueError("the bytes of its numbers are in another order than this machine's")


def _known_place(_: Any, location: str) -> Any:
    """Let torch put a tensor where its file says if that is a device, and not a word for what programs add to torch."""
    if not _PLACE.fullmatch(location):
        raise UnpicklingError(f"a tensor at {location!r:.80}")


def _bytes(text: str, encoding: str) -> bytes:
    """Bytes, as Python writes them into pickles that every version reads."""
    if encoding != "latin1":
        raise UnpicklingError(f"bytes that are encoded as {encoding!r}")
    return text.encode("latin1")


@contextmanager
def weights_only() -> Iterator[None]:
    """Inside, ``torch.load`` reads dense tensors and plain values only, whatever its caller asks for.

    torch.distributed.checkpoint asks for everything. Only while parts are read: a user's own code may load more.

    Raises:
        NotPlain: By ``torch.load``: there is more, or it was written before version 1.6.
    """
    import torch

    from grpo_lightning.distributed.plain import not_plain

    load = torch.load

    def load_plain(file: Any, *args: Any, **options: Any) -> Any:
        # Tensors that another process of the run has sent come in the old form, by this function of torch's.
        if sys._getframe(1).f_code is torch.storage._load_from_bytes.__code__:
            return load(file, *args, **options)
        if not is_archive(file):
            raise NotPlain(
                "a file of weights is a plain pickle, as torch wrote before version 1.6, which could run code; allowed "
                "are safetensors, and what later versions write"
            )
        place = args[0] if args else options.pop("map_location", None)
        try:
            content = load(file, _known_place if place is None else place, *args[1:], **options)
        except UnpicklingError as error:  # which torch tells in five lines
            raise UnpicklingError(
                "a file of weights holds other objects than dense tensors and plain values, which could run code"
            ) from error
        if found := not_plain(content):
            raise NotPlain(f"a file of weights holds {found}; allowed are dense tensors and plain values")
        return content

    before = {name: os.environ.pop(name, None) for name in (_FORCED, _OPPOSITE)}
    os.environ[_FORCED] = "1"
    torch.load = load_plain  # type: ignore[assignment]
    try:
        with only_plain_names():
            yield
    finally:
        torch.load = load
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def no_pickles(is_readable: Callable[[str, str], bool] = _nothing) -> Iterator[None]:
    """Inside, nothing is unpickled that names a function or a class; `weights_only` has a reader of its own.

    Parts of a model may be of any package, which may have ways of its own to read what a configuration names.

    Args:
        is_readable: Whether a name may be unpickled all the same; its arguments are the module and the name in it.
    """
    before, codes = _is_readable.set(is_readable), copyreg._extension_cache.copy()  # type: ignore[attr-defined]
    copyreg._extension_cache.clear()  # type: ignore[attr-defined]  # a number in a pickle would stand for what it knows
    try:
        yield
    finally:
        copyreg._extension_cache.update(codes)  # type: ignore[attr-defined]
        _is_readable.reset(before)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and (is_readable := _is_readable.get()) and not is_readable(*arguments[-2:]):
        raise UnpicklingError(f"a pickle that names {'.'.join(map(str, arguments[-2:]))}")


sys.addaudithook(_refuse)
