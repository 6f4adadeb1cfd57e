"""What torch reads of a checkpoint in parts: never what could run code."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_FORCED, _OPPOSITE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@contextmanager
def weights_only() -> Iterator[None]:
    """Inside, ``torch.load`` reads tensors and plain values only, whatever its caller asks for.

    torch.distributed.checkpoint asks for everything. Only while parts are read: a user's own code may load more.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCED, _OPPOSITE)}
    os.environ[_FORCED] = "1"
    try:
        yield
    finally:
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in before.items() if value is not None})
