"""Whether what torch has read is plain values and dense tensors, whatever it says of itself."""

from collections import Counter, OrderedDict
from types import NoneType
from typing import Any

import torch
from torch import Tensor

_MAPPINGS = (dict, OrderedDict, Counter)
_LISTS = (list, tuple, set, frozenset, torch.Size)
_VALUES = (bool, bytes, bytearray, complex, float, int, str, NoneType, torch.device, torch.dtype)


def not_plain(content: Any) -> str | None:
    """What in a checkpoint is neither a plain value nor a dense tensor of torch's own; None if nothing is.

    Tensors of other kinds are not even made, see `reading.only_plain_names`. What has attributes of its own may answer
    otherwise than its class does: ``OrderedDict().values`` may be any class that torch reads.

    Args:
        content: As torch reads it: mappings and lists, to any depth.
    """
    seen, left = set[int](), [content]
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Tensor) and type(node) not in (Tensor, torch.nn.Parameter):
            return f"a tensor that is {type(node).__name__}"
        if {*getattr(node, "__dict__", ())} - ({"_metadata"} if type(node) is OrderedDict else set()):
            return f"an object of {type(node).__name__} with attributes of its own"
        if isinstance(node, OrderedDict) and (about := vars(node).get("_metadata")) is not None:
            if not _says_versions(about):  # others would have torch put the file's tensors in place of the weights
                return "other metadata of a state than versions"
            left.append(about)
        if isinstance(node, Tensor):
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
    parts = [*dict.values(about)]
    if not all(type(part) in _MAPPINGS and {*dict.keys(part)} <= {"version"} for part in parts):
        return False
    return all(type(version) in (int, NoneType) for part in parts for version in dict.values(part))


def _not_dense(tensor: Tensor) -> str | None:
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        return "one with hooks"
    if not tensor.is_meta and not _is_in_its_memory(tensor):
        return "outside of its storage"
    return "overlapping itself" if _overlaps(tensor) else None


def _is_in_its_memory(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor lie in its storage, and this in memory."""
    if not tensor.numel():
        return True
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    storage, begin = tensor.untyped_storage(), tensor.storage_offset()
    try:
        address = storage.data_ptr()
    except RuntimeError:  # there is no memory
        return False
    return address != 0 and begin >= 0 and (begin + last + 1) * tensor.element_size() <= storage.nbytes()


def _overlaps(tensor: Tensor) -> bool:
    """Whether numbers of a tensor may share memory, which kernels that write to it as one block would go beyond."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += stride * (size - 1) if size > 1 else 0
    return False
