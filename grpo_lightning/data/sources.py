"""Sources of prompts: rows by index, the order in which they come, and rows that are held out.

Which prompt comes when is a pure function of the seed and a counter, so that a resumed run needs no sampler state.
"""

import functools
import hashlib
import itertools
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Sampler

from grpo_lightning.types import Prompt

_log = logging.getLogger(__name__)
CHUNK = 1024
"""Prompts that are measured at once."""

Row = tuple[Prompt, dict[str, Any]]
"""A prompt, and the values of its row in the columns by name."""
Fits = Callable[[list[Prompt]], list[bool]]
"""Prompts -> which of them may be used."""


class Source(Protocol):
    """Prompts by index. Every row has the same columns.

    A source may have a method ``place(index) -> str``, which names a row in messages, and a method ``keep(fits)``, in
    place of the function `keep`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


class GeneratedRows(Sequence[Row]):
    """Rows that are made on access, each a function of its number.

    Args:
        size: How many there are.
        seed: The number of the first row; that of the next one is greater by 1.
    """

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError(f"size={size}: expected 1 or more")
        self._size, self._seed = size, seed

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if not 0 <= index < self._size:
            raise IndexError(f"index: expected 0 to {self._size - 1}, got {index}")
        return self._row(self._seed + index)

    @abstractmethod
    def _row(self, number: int) -> Row: ...


class Subset:
    """Some rows of a source."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Row:
        return self._source[self._indices[index]]

    def place(self, index: int) -> str:
        """Where a row comes from, for messages."""
        return place(self._source, self._indices[index])


def place(source: Source, index: int) -> str:
    """Where a row comes from, such as a file and a line, for messages."""
    method = getattr(source, "place", None)
    return method(index) if method else f"data, prompt {index + 1}"


def keep(source: Source, fits: Fits) -> tuple[Source, int]:
    """Leave out the prompts that do not fit, in one pass; a source with a method ``keep`` may replace them instead.

    Returns:
        The remaining rows in the same order, and how many were lost.
    """
    if (method := getattr(source, "keep", None)) is not None:
        kept: tuple[Source, int] = method(fits)
        return kept
    remaining: list[int] = []
    for start in range(0, len(source), CHUNK):
        indices = range(start, min(start + CHUNK, len(source)))
        verdicts = fits([source[i][0] for i in indices])
        remaining += [i for i, verdict in zip(indices, verdicts, strict=True) if verdict]
    return Subset(source, remaining), len(source) - len(remaining)


def hold_out(source: Source, size: int) -> tuple[Source, Source]:
    """Split a source into training and validation rows, the same in every run, both in the source's order.

    At most ``size`` rows are held out, never more than a fifth but at least one. Training rows with a prompt
    that is also held out are left out.

    Raises:
        ValueError: There are fewer than two rows, or no two different prompts.
    """
    if len(source) < 2:
        raise ValueError(f"data: expected at least 2 rows, as some are held out for validation, got {len(source)}")
    count = min(size, max(len(source) // 5, 1))
    if count < size:
        _log.warning("held out %d of %d rows, fewer than data.validation_size=%d", count, len(source), size)
    order = permutation(0, 0, len(source)).tolist()
    training, validation = Subset(source, sorted(order[:-count])), Subset(source, sorted(order[-count:]))
    held_out = {repr(validation[i][0]) for i in range(count)}
    distinct, repeated = keep(training, lambda prompts: [repr(prompt) not in held_out for prompt in prompts])
    if not len(distinct):
        raise ValueError(
            f"data: all {len(source)} rows have one of {count} held-out prompts, so none is left to train on; give at "
            "least 2 different prompts, or held-out ones of their own (data.validation_path)"
        )
    if repeated:
        _log.warning("left out %d training rows that repeat a held-out prompt", repeated)
    return distinct, validation


@functools.lru_cache(maxsize=2)  # a step may straddle two epochs; no more are ever in use
def permutation(seed: int, epoch: int, size: int) -> Tensor:
    """A random order of ``range(size)``, another one for every ``epoch``, that depends on the arguments alone."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()  # torch's CPU generator only reads 32 bits of a seed
    return torch.randperm(size, generator=torch.Generator().manual_seed(int.from_bytes(digest[:4], "big")))


def prompt_index(seed: int, i: int, size: int) -> int:
    """The index, of ``size`` prompts, of the run's prompt i: permutation(seed, i // size)[i % size]."""
    epoch, position = divmod(i, size)
    return int(permutation(seed, epoch, size)[position])


class StepSampler(Sampler[list[int]]):
    """The indices of every step's prompts, one list per step; the same in all processes, which divide them.

    Step s consumes prompts s·P to (s + 1)·P - 1 of the run, where P is ``prompts_per_step``.
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

    A batch is divided over ``processes``, each of which gets 1 to ``batch_size`` prompts of it, or more where another
    would be left with none.
    """
    if size < processes:
        raise ValueError(f"data.validation_size={size}: expected at least the number of processes, {processes}")
    num_batches = min(-(-size // (batch_size * processes)), size // processes)
    borders = [size * b // num_batches for b in range(num_batches + 1)]
    return [list(range(first, last)) for first, last in itertools.pairwise(borders)]
