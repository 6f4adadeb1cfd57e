"""What is read of files that may be a stranger's: tensors and plain values, never what could run code."""

import os
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
        content = load(file, *args, **options)
        if found := not_plain(content):
            raise NotPlain(f"a file of weights holds {found}; allowed are dense tensors and plain values")
        return content

    before = {name: os.environ.pop(name, None) for name in (_FORCED, _OPPOSITE)}
    os.environ[_FORCED] = "1"
    torch.load = load_plain  # type: ignore[assignment]
    try:
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
    before = _is_readable.set(is_readable)
    try:
        yield
    finally:
        _is_readable.reset(before)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and (is_readable := _is_readable.get()) and not is_readable(*arguments[-2:]):
        raise UnpicklingError(f"a pickle that names {'.'.join(map(str, arguments[-2:]))}")


sys.addaudithook(_refuse)
