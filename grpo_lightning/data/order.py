"""Which prompt comes when: a pure function of the seed and a counter, so a resumed run needs no sampler state."""

import functools
import hashlib
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler


@functools.lru_cache(maxsize=2)  # a step may straddle two epochs; no more are ever in use
def permutation(seed: int, epoch: int, size: int) -> Tensor:
    """A random order of ``range(size)`` that depends on nothing but the arguments.

    Args:
        seed: Of the run.
        epoch: Each has an order of its own.
        size: How many indices there are.

    Returns:
        [size] every index once.
    """
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()  # torch's CPU generator only reads 32 bits of a seed
    return torch.randperm(size, generator=torch.Generator().manual_seed(int.from_bytes(digest[:4], "big")))


def prompt_index(seed: int, i: int, size: int) -> int:
    """Where prompt i of the run lies in the data: permutation(seed, i // size)[i % size].

    Args:
        seed: Of the run.
        i: How many prompts the run has consumed before this one, over all devices.
        size: Prompts in the data.

    Returns:
        An index in [0, size).
    """
    epoch, position = divmod(i, size)
    return int(permutation(seed, epoch, size)[position])


class StepSampler(Sampler[list[int]]):
    """Indices of this device's prompts, one list per step.

    Step s consumes prompts s·P to (s + 1)·P - 1 of the run; each device takes an equal contiguous slice of them.

    Args:
        size: Prompts in the data.
        prompts_per_step: P, over all devices.
        seed: Of the run.
        start_step: First step.
        num_steps: How many steps.
        rank: This device's number.
        world_size: How many devices share a step.

    Raises:
        ValueError: If P is not a multiple of ``world_size``.
    """

    def __init__(
        self,
        size: int,
        prompts_per_step: int,
        seed: int,
        start_step: int,
        num_steps: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if prompts_per_step % world_size:
            raise ValueError(
                f"data.prompts_per_step={prompts_per_step}: allowed: a multiple of the number of devices, {world_size}"
            )
        self._size, self._seed = size, seed
        self._steps = range(start_step, start_step + num_steps)
        self._prompts_per_step = prompts_per_step
        share = prompts_per_step // world_size
        self._slice = range(rank * share, (rank + 1) * share)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._steps:
            first = step * self._prompts_per_step
            yield [prompt_index(self._seed, first + position, self._size) for position in self._slice]


def even_batches(size: int, batch_size: int, rank: int, world_size: int) -> list[list[int]]:
    """``range(size)`` in order: a contiguous slice per device, in as many batches on each device.

    Devices that share a model must call it equally often, so batches are evened out: none is larger than
    ``batch_size`` (unless a device would be left with an empty batch) and sizes differ by at most one.

    Args:
        size: Prompts in all.
        batch_size: Most prompts in a batch.
        rank: This device's number.
        world_size: How many devices share the prompts.

    Returns:
        This device's batches of indices.

    Raises:
        ValueError: If there are fewer prompts than devices.
    """
    if size < world_size:
        raise ValueError(f"data.validation_size={size}: allowed: at least the number of devices, {world_size}")
    largest_share = -(-size // world_size)
    num_batches = min(-(-largest_share // batch_size), size // world_size)
    start, stop = (size * r // world_size for r in (rank, rank + 1))
    borders = [start + (stop - start) * b // num_batches for b in range(num_batches + 1)]
    return [list(range(first, last)) for first, last in itertools.pairwise(borders)]
