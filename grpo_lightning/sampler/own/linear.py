"""Copies of linear layers for products with few rows, which are limited by how fast the weights can be read."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

_BATCH = 32
"""Rows for which oneDNN chooses the layout; any other number is allowed."""


class Linear(Protocol):
    """A linear layer that takes and gives its own dtype."""

    def __call__(self, x: Tensor) -> Tensor:
        """The layer applied: [b, in] -> [b, out]."""
        ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The layer applied and ``other`` [b, out] added, in the dtype of ``other``: [b, in] -> [b, out]."""
        ...


class Packed:
    """A linear layer on a CPU as oneDNN reads it.

    Args:
        weight: [out, in] in float32 or bfloat16.
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _BATCH)
        self._bias, self._features = bias, len(weight)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        if other.dtype != x.dtype:
            return other + self(x)
        if other.shape != (*x.shape[:-1], self._features):  # which oneDNN does not compare
            raise ValueError(f"{list(other.shape)} is added to {self._features} features of {list(x.shape)}")
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")
        return y


class Dense:
    """A linear layer as torch has it.

    Args:
        weight: [out, in]
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self._weight, self._bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return other + self(x)


def copied(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """A layer that computes in ``dtype``, in the form that is fastest on the weight's device.

    Args:
        weight: [out, in]
        bias: [out] or None.
        dtype: Of its inputs and outputs; what has it already is not copied where it may stay as it is.
    """
    weight, bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
    return Packed(weight, bias) if packs(weight.device, dtype) else Dense(weight, bias)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN computes products of this dtype on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    has_bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16)


def plain_weight(layer: Any) -> tuple[Tensor, Tensor | None]:
    """The weight [out, in] and bias [out] of a linear layer.

    Raises:
        TypeError: It is another layer: what inherits from a linear one, such as an adapter or a quantized layer,
            computes something else.
    """
    if type(layer) is not nn.Linear:
        raise TypeError(f"{type(layer).__name__} is not a plain linear layer")
    return layer.weight, layer.bias
