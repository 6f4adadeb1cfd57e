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
        seed: The run's seed.
        epoch: The number of the pass over the data; each has an order of its own.
        size: How many indices there are.
    """
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()  # torch's CPU generator only reads 32 bits of a seed
    return torch.randperm(size, generator=torch.Generator().manual_seed(int.from_bytes(digest[:4], "big")))


def prompt_index(seed: int, i: int, size: int) -> int:
    """The index, of ``size`` prompts, of the run's prompt i: permutation(seed, i // size)[i % size]."""
    epoch, position = divmod(i, size)
    return int(permutation(seed, epoch, size)[position])


class StepSampler(Sampler[list[int]]):
    """The indices of every step's prompts, one list per step; the same in all processes, which divide them.

    Step s consumes prompts s·P to (s + 1)·P - 1 of the run.

    Args:
        size: How many prompts the data have.
        prompts_per_step: Prompts of one step over all processes, P.
        seed: The run's seed.
        start_step: The first step.
        num_steps: How many steps there are.
    """

    def __init__(self, size: int, prompts_per_step: int, seed: int, start_step: int, num_steps: int) -> None:
        self._size, self._seed, self._prompts_per_step = size, seed, prompts_per_step
        self._steps = range(start_step, start_step + num_steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._steps:
            first = step * self._prompts_per_step
            yield [prompt_index(self._seed, i, self._size) for i in range(first, first + self._prompts_per_step)]


def even_batches(size: int, batch_size: int, processes: int) -> list[list[int]]:
    """Divide ``range(size)`` in order into batches whose sizes differ by at most one.

    Args:
        size: How many prompts there are.
        batch_size: The most prompts of a batch for one process, unless another would be left with none.
        processes: Over how many processes a batch is divided; each gets at least one prompt.

    Raises:
        ValueError: There are fewer prompts than processes.
    """
    if size < processes:
        raise ValueError(f"data.validation_size={size}: expected at least the number of processes, {processes}")
    num_batches = min(-(-size // (batch_size * processes)), size // processes)
    borders = [size * b // num_batches for b in range(num_batches + 1)]
    return [list(range(first, last)) for first, last in itertools.pairwise(borders)]
