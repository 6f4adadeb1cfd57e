"""Whether what torch has read is plain values and dense tensors, whatever it says of itself."""

from collections import Counter, OrderedDict
from types import NoneType
from typing import Any

import torch
from torch import Tensor

_MAPPINGS = (dict, OrderedDict, Counter)
_LISTS = (list, tuple, set, frozenset, torch.Size)
_VALUES = (bool, bytes, bytearray, complex, float, int, str, NoneType, torch.device, torch.dtype)


def not_plain(content: Any, *, has_numbers: bool = False) -> str | None:
    """What in a checkpoint is neither a plain value nor a dense tensor of torch's own; None if nothing is.

    Torch does not look at the indices of other tensors, which could lead beyond their memory. What has attributes of
    its own may answer otherwise than its class does: ``OrderedDict().values`` may be any class that torch reads.

    Args:
        content: As torch reads it: mappings and lists, to any depth.
        has_numbers: Whether more than the shapes of tensors is read, so that none may be one on ``meta``.
    """
    seen, left = set[int](), [content]
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Tensor) and type(node) not in (Tensor, torch.nn.Parameter):
            return f"a tensor that is {type(node).__name__}"
        if {*getattr(node, "__dict__", ())} - {"_metadata"}:
            return f"an object of {type(node).__name__} with attributes of its own"
        if isinstance(node, OrderedDict) and (about := vars(node).get("_metadata")) is not None:
            if not _says_versions(about):  # others would have torch put the file's tensors in place of the weights
                return "other metadata of a state than versions"
            left.append(about)
        if isinstance(node, Tensor):
            if has_numbers and node.is_meta:
                return "a tensor without numbers"
            if kind := _not_dense(node):
                return f"a tensor that is {kind}, which could lead beyond its memory"
        elif type(node) in _MAPPINGS:
            left += [*dict.keys(node), *dict.values(node)]
        elif type(node) in _LISTS:
            left += node
        elif type(node) not in _VALUES:
            return f"an object of {type(node).__name__}"
    return None


def _says_versions(about: Any) -> bool:
    """Whether it is what torch notes of a module's state: the version of each part."""
    if type(about) not in _MAPPINGS:
        return False
    return all(type(part) in _MAPPINGS and {*dict.keys(part)} <= {"version"} for part in dict.values(about))


def _not_dense(tensor: Tensor) -> str | None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
    if tensor.is_leaf and tensor.grad is not None:  # to which a backward pass would add, whatever it is
        return "one with a gradient"
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        return "one with hooks"
    return "overlapping itself" if _overlaps(tensor) else None


def _overlaps(tensor: Tensor) -> bool:
    """Whether numbers of a tensor may share memory, which kernels that write to it as one block would go beyond."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += stride * (size - 1) if size > 1 else 0
    return False
