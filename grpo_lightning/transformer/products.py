"""Products of 16-bit matrices that are not rounded to 16 bits again, where the device makes such.

Tensor cores multiply 16-bit numbers and add up in float32; by default the sums are then rounded to 16 bits.
"""

import logging
from functools import cache

import torch
from torch import Tensor

log = logging.getLogger(__name__)


@cache
def keeps_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of matrices of ``dtype`` can be had in float32 on a device; tried once for each.

    Never on a CPU: PyTorch 2.13 has no such product there.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        return _adds_up(device, dtype)
    except (RuntimeError, TypeError) as error:
        log.info("products of %s matrices are rounded to it on %s: %s", dtype, device, error)
        return False


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer, weight h + bias for every row h, in float32.

    Args:
        hidden: [n, H]
        weight: [V, H]
        bias: [V] or None

    Returns:
        [n, V], rounded to the type of the factors only where the device has no other product.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            return linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if keeps_sums(hidden.device, weight.dtype):
        sums = _sums(hidden, weight.T)
        return sums if bias is None else sums.add_(bias)
    return torch.nn.functional.linear(hidden, weight, bias).float()


def add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add the product of ``one`` [m, n] and ``other`` [n, k] to ``total`` [m, k], which is float32, in place."""
    if one.dtype == torch.float32:
        total.addmm_(one, other)
    elif keeps_sums(one.device, one.dtype):
        with torch.autocast(one.device.type, enabled=False):
            _add_sums(total, one, other)
    else:
        # addmm_ wants one dtype for all: the product is made in 16 bits, its sum over chunks in float32.
        total += one @ other


def _adds_up(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether 1 + 2^-12, which 16 bits do not hold, is kept as a sum of products, and added to itself."""
    one = torch.zeros(16, 16, device=device, dtype=dtype)
    one[:, 0], one[:, 1] = 1.0, 2.0**-5
    other = torch.zeros_like(one)
    other[0], other[1] = 1.0, 2.0**-7
    sums = _sums(one, other)
    _add_sums(sums, one, other)
    return bool((sums == 2.0 + 2.0**-11).all())


def _sums(one: Tensor, other: Tensor) -> Tensor:
    made: Tensor = torch.mm(one, other, out_dtype=torch.float32)
    return made


def _add_sums(total: Tensor, one: Tensor, other: Tensor) -> None:
    torch.addmm(total, one, other, out_dtype=torch.float32, out=total)
