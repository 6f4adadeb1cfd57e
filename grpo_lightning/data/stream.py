"""Training prompts that are too many to hold: read in order, shuffled by a buffer, resumed by counting."""

import copy
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from grpo_lightning.data.datamodule import ENDLESS, Fits, GeneratedRows, Row

_RECENT = 1024  # rows that can be asked for again without reading from the start


class Stream(GeneratedRows):
    """Row i is the i-th that a shuffle buffer gives; after the last, reading begins anew with another shuffling.

    In memory are the buffer and the newest rows. A row before those is found by reading from the start, and so is the
    first of a continued run.

    Args:
        read: Opens the rows and where each comes from, each time from the first.
        buffer: How many rows one is drawn from; 1 keeps the order.
        seed: Decides what is drawn.
    """

    def __init__(self, read: Callable[[], Iterable[tuple[str, Row]]], buffer: int, seed: int) -> None:
        super().__init__(ENDLESS, 0)
        self._read, self._buffer, self._buffer_seed = read, buffer, seed
        self._fits: tuple[Fits, ...] = ()
        self._rewind()

    def keep(self, fits: Fits) -> "tuple[Stream, int]":
        """The same rows without those that do not fit, which are not counted."""
        source = copy.copy(self)
        source._fits = (*self._fits, fits)
        source._rewind()
        return source, 0

    def run_order(self, order: str, seed: int) -> Callable[[int], int]:
        """The run's prompt i is row i."""
        return lambda i: i

    def origin(self, index: int) -> str:
        """The file and line, or the like, of a row."""
        return self._find(index)[0]

    def _row(self, number: int) -> Row:
        return self._find(number)[1]

    def _find(self, index: int) -> tuple[str, Row]:
        if index < self._count - len(self._recent):
            self._rewind()
        while self._count <= index:
            self._recent.append(next(self._drawn))
            self._count += 1
        return self._recent[index - self._count]

    def _rewind(self) -> None:
        self._drawn, self._count = self._draw(), 0
        self._recent: deque[tuple[str, Row]] = deque(maxlen=_RECENT)

    def _draw(self) -> Iterator[tuple[str, Row]]:
        for epoch in itertools.count():
            rng = random.Random(f"{self._buffer_seed} {epoch}")
            buffer: list[tuple[str, Row]] = []
            is_empty = True
            for placed in self._read():
                if not all(fits([placed[1][0]])[0] for fits in self._fits):
                    continue
                is_empty = False
                buffer.append(placed)
                if len(buffer) == self._buffer:
                    number = rng.randrange(len(buffer))
                    buffer[number], buffer[-1] = buffer[-1], buffer[number]
                    yield buffer.pop()
            rng.shuffle(buffer)
            yield from buffer
            if is_empty:
                raise ValueError("data.streaming: no prompt is left to train on; the first ones are held out")
