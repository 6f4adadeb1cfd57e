"""Functions that become few kernels on a GPU, where operations one by one would read and write all numbers again."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor

from grpo_lightning.config.redaction import single_line

log = logging.getLogger(__name__)

LEAST = 1 << 22
"""Numbers from which on compiling pays: it takes seconds, in which small tensors are done without it."""
_MOST_GRAPHS = 64


def pays(tensor: Tensor) -> bool:
    """Whether what is computed of a tensor is to be compiled."""
    return tensor.device.type == "cuda" and tensor.numel() >= LEAST


def compiled(function: Callable[..., Any], *, dynamic: bool | None = None, or_plain: bool = True) -> Callable[..., Any]:
    """A function as torch compiles it, with the roundings that it has otherwise.

    Args:
        function: It looks at no value of a tensor. The same function is compiled once, whoever asks for it.
        dynamic: Whether sizes may vary from the start; None: those that turn out to.
        or_plain: Whether it is called as it is where torch cannot compile it, such as without a C compiler; with a
            warning, once.
    """
    made = _made(function, dynamic)

    def call(*args: Any, **kwargs: Any) -> Any:
        if function in _PLAIN:
            return function(*args, **kwargs)
        from torch._dynamo.exc import TorchDynamoException  # which nobody else needs

        with compiling():
            try:
                return made(*args, **kwargs)
            except (TorchDynamoException, RuntimeError) as error:
                if not or_plain or not (isinstance(error, TorchDynamoException) or "C compiler" in str(error)):
                    raise
                if not _PLAIN:
                    log.warning(
                        "torch cannot compile here, which makes sampling slower: %s", single_line(str(error)[:300])
                    )
                _PLAIN.add(function)
        return function(*args, **kwargs)

    return call


_PLAIN: set[Callable[..., Any]] = set()
"""What cannot be compiled here."""


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, torch compiles as these functions want it; around many calls it saves each of them a tenth of a ms."""
    if _inside.now:
        yield
        return
    # Under DDP torch cuts a graph where its gradients are exchanged, which these do not need, and older versions
    # cannot do in FlexAttention (pytorch#137481). The limit leaves room for several models, with and without
    # gradients. Sizes that are equal by chance, such as 2 key heads and 2 blocks, must not count as one.
    import torch._dynamo

    settings: Any = torch._dynamo.config
    shapes: Any = torch.fx.experimental._config
    with settings.patch(optimize_ddp=False, recompile_limit=_MOST_GRAPHS), shapes.patch(use_duck_shape=False):
        _inside.now = True
        try:
            yield
        finally:
            _inside.now = False


class _Inside(threading.local):
    """Whether this thread is inside of `compiling`."""

    now = False


@cache
def _made(function: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
    return torch.compile(function, dynamic=dynamic, options={"emulate_precision_casts": True})


_inside = _Inside()
