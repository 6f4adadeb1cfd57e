"""Batches of prompts that no trainer takes apart."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from grpo_lightning.batch import Prompts


class Batches:
    """Batches of prompts, from a loader that is made anew each time they are iterated over.

    It has no length, since an epoch may be shorter than the one before, and is no ``DataLoader``, of which a trainer
    would replace the sampler.

    Args:
        open_loader: Makes the loader.
    """

    def __init__(self, open_loader: Callable[[], DataLoader[Any]]) -> None:
        self._open_loader = open_loader

    def __iter__(self) -> Iterator[Prompts]:
        return iter(self._open_loader())


class SizedBatches(Batches):
    """Batches of which there are as many each time, so that they have a length."""

    def __init__(self, open_loader: Callable[[], DataLoader[Any]], size: int) -> None:
        super().__init__(open_loader)
        self._size = size

    def __len__(self) -> int:
        return self._size
