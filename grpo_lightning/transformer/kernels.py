"""Kernels: compiled functions, float32 sums of 16-bit products, and sums over a softmax.

Tensor cores multiply 16-bit numbers and add up in float32; by default the sums are then rounded to 16 bits. Operations
one by one would read and write all numbers again; compiled they are few kernels.

Shapes: n tokens, H the size of a hidden state, V of the vocabulary.
"""

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

COMPILE_MIN_SIZE = 1 << 22
"""Numbers from which on compiling pays: it takes seconds, in which small tensors are done without it."""
MIN_LOGPROB = -1e4
"""A log-probability below which exp gives 0; a finite stand-in for -inf."""


def worth_compiling(tensor: Tensor) -> bool:
    """Whether a function of a tensor is to be compiled."""
    return tensor.device.type == "cuda" and tensor.numel() >= COMPILE_MIN_SIZE


def compiled(function: Callable[..., Any], *, dynamic: bool | None = None, or_plain: bool = True) -> Callable[..., Any]:
    """A function as torch compiles it, once, with the roundings that it has otherwise.

    Args:
        function: It looks at no value of a tensor.
        dynamic: Whether sizes may vary from the start; None: those that turn out to.
        or_plain: Whether to call it uncompiled, with a warning, where torch cannot compile (no C compiler).
    """
    made = _compiled(function, dynamic)

    def call(*args: Any, **kwargs: Any) -> Any:
        if function in _NOT_COMPILED:
            return function(*args, **kwargs)
        from torch._dynamo.exc import TorchDynamoException  # which nobody else needs

        with compiling():
            try:
                return made(*args, **kwargs)
            except (TorchDynamoException, RuntimeError) as error:
                if not or_plain or not (isinstance(error, TorchDynamoException) or "C compiler" in str(error)):
                    raise
                log.warning("torch cannot compile here, which makes sampling slower: %s", single_line(str(error)[:300]))
                _NOT_COMPILED.add(function)
        return function(*args, **kwargs)

    return call


_NOT_COMPILED: set[Callable[..., Any]] = set()
"""Functions that torch cannot compile on this machine."""
_local = threading.local()


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, torch compiles as these functions want it; around many calls it saves each of them a tenth of a ms."""
    if getattr(_local, "is_compiling", False):
        yield
        return
    # Under DDP torch cuts a graph where its gradients are exchanged, which these do not need, and older versions
    # cannot do in FlexAttention (pytorch#137481). The limit leaves room for several models, with and without
    # gradients. Sizes that are equal by chance, such as 2 key heads and 2 blocks, must not count as one.
    import torch._dynamo

    settings: Any = torch._dynamo.config
    shapes: Any = torch.fx.experimental._config
    with settings.patch(optimize_ddp=False, recompile_limit=64), shapes.patch(use_duck_shape=False):
        _local.is_compiling = True
        try:
            yield
        finally:
            _local.is_compiling = False


@cache
def _compiled(function: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
    return torch.compile(function, dynamic=dynamic, options={"emulate_precision_casts": True})


def dot(one: Tensor, other: Tensor) -> Tensor:
    """Sums of products over the last dimension, [..., V] and [..., V] -> [...], in their dtype under autocast, too."""
    kind = one.device.type
    if not torch.is_autocast_enabled(kind):
        sums: Tensor = torch.linalg.vecdot(one, other)
        return sums
    with torch.autocast(kind, enabled=False):  # which would round both, and the sums, to 16 bits
        return dot(one, other)


def expected(logits: Tensor, log_total: Tensor) -> Tensor:
    """The mean [n] of the logits [n, V] under their own softmax."""
    logp = (logits - log_total).clamp_(min=MIN_LOGPROB)
    return dot(logp.exp(), logp) + log_total.squeeze(-1)


def log_sum(logits: Tensor) -> Tensor:
    """The log-sum-exp [n, 1] of logits [n, V]."""
    return (compiled(_logsumexp) if worth_compiling(logits) else _logsumexp)(logits)


def _logsumexp(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1, keepdim=True)


def softmax_gradient(logits: Tensor, log_total: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax of logits [n, V] less 1 for the chosen tokens [n, 1], in ``dtype``, by one kernel."""
    made: Tensor = compiled(_softmax_gradient)(logits, log_total, chosen, dtype)
    return made


def _softmax_gradient(logits: Tensor, log_total: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    places = torch.arange(logits.shape[-1], device=logits.device)
    return ((logits - log_total).exp() - (places == chosen).to(logits.dtype)).to(dtype)


@cache
def keeps_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device gives products of 16-bit matrices in float32, tried once; a CPU does not (PyTorch 2.13)."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    one = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        sums = torch.mm(one, one, out_dtype=torch.float32)
        torch.addmm(sums, one, one, out_dtype=torch.float32, out=sums)
    except (RuntimeError, TypeError):
        return False
    return True


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer: hidden [n, H], weight [V, H] and bias [V] -> [n, V] in float32.

    Rounded to the dtype of the factors only where the device has no other product.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            return linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if keeps_sums(hidden.device, weight.dtype):
        sums: Tensor = torch.mm(hidden, weight.T, out_dtype=torch.float32)
        return sums if bias is None else sums.add_(bias)
    return torch.nn.functional.linear(hidden, weight, bias).float()


def add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add the product of ``one`` [m, n] and ``other`` [n, k] to ``total`` [m, k], which is float32, in place."""
    if one.dtype == torch.float32:
        total.addmm_(one, other)
    elif keeps_sums(one.device, one.dtype):
        with torch.autocast(one.device.type, enabled=False):
            torch.addmm(total, one, other, out_dtype=torch.float32, out=total)
    else:
        # addmm_ wants one dtype for all: the product is made in 16 bits, its sum over chunks in float32.
        total += one @ other
