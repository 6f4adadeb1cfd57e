"""Where prompts come from, as rows by index; which of them may be used, and which are held out."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from grpo_lightning.data.order import permutation
from grpo_lightning.types import Prompt

_log = logging.getLogger(__name__)
_CHUNK = 1024  # prompts measured at once

Row = tuple[Prompt, dict[str, Any]]
"""A prompt, and the values of its row in the columns by name."""
Fits = Callable[[list[Prompt]], list[bool]]
"""Prompts -> which of them may be used."""


class Source(Protocol):
    """Prompts by index. Every row has the same columns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


@runtime_checkable
class Generated(Source, Protocol):
    """A source that makes its rows on access and replaces an unfit one, where a stored source would lose it."""

    def keep(self, fits: Fits) -> "tuple[Source, int]":
        """The source with fit prompts only, and how many rows it has lost."""
        ...


class Made(Sequence[Row]):
    """Rows that are made on access, each from a number.

    Args:
        size: How many there are.
        seed: The number of the first one; that of the next one is greater by 1.
    """

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError(f"size: {size}; allowed: 1 or more")
        self._size, self._seed = size, seed

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        """Prompt and columns of one row.

        Raises:
            IndexError: If the index is not in [0, size).
        """
        if not 0 <= index < self._size:
            raise IndexError(f"index: {index}; allowed: 0 to {self._size - 1}")
        return self._row(self._seed + index)

    @abstractmethod
    def _row(self, number: int) -> Row: ...


def rate(name: str, value: float) -> float:
    """The same, checked.

    Raises:
        ValueError: It is no probability.
    """
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: {value}; allowed: 0 to 1")
    return value


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
    known = getattr(source, "place", None)
    return known(index) if known else f"data, prompt {index + 1}"


def keep(source: Source, fits: Fits) -> tuple[Source, int]:
    """The source without the prompts that do not fit; a stored source is read through once.

    Args:
        source: The rows.
        fits: Says which of a list of prompts may stay.

    Returns:
        The remaining rows in the same order, and how many were lost.
    """
    if isinstance(source, Generated):
        return source.keep(fits)
    remaining: list[int] = []
    indices: Iterator[int] = iter(range(len(source)))
    while chunk := list(islice(indices, _CHUNK)):
        verdicts = fits([source[i][0] for i in chunk])
        remaining += [i for i, verdict in zip(chunk, verdicts, strict=True) if verdict]
    return Subset(source, remaining), len(source) - len(remaining)


def hold_out(source: Source, size: int) -> tuple[Source, Source]:
    """Training and validation rows of one source: the last ones of a fixed random order validate.

    The order does not depend on the run's seed, so all runs on a file are validated on the same rows. A training row
    whose prompt is also held out is left out.

    Args:
        source: All rows.
        size: The most rows to hold out; never more than a fifth of them, but at least one.

    Returns:
        The training source and the validation source, both in the source's order.

    Raises:
        ValueError: If there are fewer than two rows, or no two different prompts.
    """
    if len(source) < 2:
        raise ValueError(f"data: {len(source)} rows; allowed: at least 2, as some are held out for validation")
    count = min(size, max(len(source) // 5, 1))
    if count < size:
        _log.warning("held out %d of %d rows, fewer than data.validation_size=%d", count, len(source), size)
    order = permutation(0, 0, len(source)).tolist()
    training, validation = Subset(source, sorted(order[:-count])), Subset(source, sorted(order[-count:]))
    held_out = {repr(validation[i][0]) for i in range(count)}
    distinct, repeated = keep(training, lambda prompts: [repr(prompt) not in held_out for prompt in prompts])
    if not len(distinct):
        raise ValueError(
            f"data: all {len(source)} rows have the same prompt or one of {count} prompts that are held out, so "
            "that none is left to train on; allowed are at least 2 different prompts, or held-out ones of their own "
            "(data.validation_path)"
        )
    if repeated:
        _log.warning("left out %d training rows that repeat a held-out prompt", repeated)
    return distinct, validation
