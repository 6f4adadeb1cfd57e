"""Activations in CPU RAM between the forward pass that makes them and the backward pass that reads them.

What a backward pass needs is copied off the device as soon as it is saved, and back when its turn comes; each is
computed with the same numbers, so no result changes. Weights stay where they are: they are there in any case. With
gradient checkpointing only the inputs of layers are saved at all, and only these are moved.

A tensor is often saved several times, as the input of queries, keys and values is: it is copied once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

MIN_BYTES = 1 << 20
"""Smaller tensors stay: moving one takes longer than the memory is worth."""

_View = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, int]
"""Where a tensor begins in its storage, its sizes, strides and type, and how often the storage had been written to."""


@dataclass(frozen=True)
class Moved:
    """A saved tensor that is in CPU RAM."""

    values: Tensor
    """In pinned memory where the device is a GPU, so that copies run beside its computations."""
    device: torch.device
    """Where it came from."""


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Inside, what is saved for a backward pass is moved to CPU RAM.

    The copies are queued like any other work of the device, in the order of its computations, so nobody waits for them
    and none is overtaken.

    Args:
        weights: Of the model: what has the sizes of one of them, in any order, stays on the device, such as its copy in
            16 bits under autocast.
        min_bytes: Tensors with fewer bytes stay, too.
    """

    def __init__(self, weights: Iterable[Tensor], *, min_bytes: int = MIN_BYTES) -> None:
        self._staying = {tuple(sorted(weight.shape)) for weight in weights}
        self._min_bytes = min_bytes
        self._moved: dict[int, tuple[StorageWeakRef, dict[_View, Moved]]] = {}
        super().__init__(self.pack, self.unpack)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._moved.clear()  # from here on the graph alone holds the copies, and drops each after its turn

    def pack(self, tensor: Tensor) -> Tensor | Moved:
        """What is kept in place of a tensor that is saved."""
        if tensor.nbytes < self._min_bytes or tuple(sorted(tensor.shape)) in self._staying:
            return tensor
        storage = tensor.untyped_storage()
        # While there is a weak reference to it, the storage's address is not given to another.
        _, views = self._moved.setdefault(storage._cdata, (StorageWeakRef(storage), {}))
        view = int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor._version
        if view not in views:
            views[view] = Moved(_in_memory(tensor), tensor.device)
        return views[view]

    def unpack(self, kept: Tensor | Moved) -> Tensor:
        """The tensor that was saved, on its own device again."""
        return kept.values.to(kept.device, non_blocking=True) if isinstance(kept, Moved) else kept


def _in_memory(tensor: Tensor) -> Tensor:
    values = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return values.copy_(tensor.detach(), non_blocking=True)
