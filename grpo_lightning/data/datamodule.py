"""Data module: training and held-out prompts for Lightning's trainer, their order, and a look before the first step.

Which prompt comes when is a pure function of the seed and a counter, so that a resumed run needs no sampler state.
"""

import functools
import hashlib
import itertools
import json
import logging
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from grpo_lightning.config.rules import DATA, problems
from grpo_lightning.types import Prompt, Prompts

if TYPE_CHECKING:
    from grpo_lightning.policy import Policy
    from grpo_lightning.policy.chat import ChatTokenizer

_log = logging.getLogger(__name__)
_CHUNK = 1024  # prompts that are measured at once
_FINGERPRINT_ROWS = 32
_CHECKED_ROWS = 64
ENDLESS = sys.maxsize
"""The length of a source whose rows are read in order, as often as they are needed, and never counted."""

Row = tuple[Prompt, dict[str, Any]]
"""A prompt, and the values of its row in the columns by name."""
Fits = Callable[[list[Prompt]], list[bool]]
"""Prompts -> which of them may be used."""


class Source(Protocol):
    """Prompts by index. Every row has the same columns.

    A source may have a method ``origin(index) -> str``, which names a row in messages, and methods ``keep(fits)`` and
    ``run_order(order, seed)`` in place of the functions `keep` and `run_order`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


class GeneratedRows(Sequence[Row]):
    """``size`` rows that are made on access, each a function of its number: ``seed`` for the first, then one more."""

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError(f"size={size}: expected 1 or more")
        self._size, self._seed = size, seed

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        return self._row(self._seed + range(self._size)[index])  # an IndexError ends a loop over them

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

    def origin(self, index: int) -> str:
        """Where a row comes from."""
        return origin(self._source, self._indices[index])


def origin(source: Source, index: int) -> str:
    """Where a row comes from, such as a file and a line, for messages."""
    method = getattr(source, "origin", None)
    return method(index) if method else f"data, prompt {index + 1}"


def checked_rows(source: Source, generated: int = _CHECKED_ROWS) -> Sequence[int]:
    """The rows that are looked at before a run: all, but of those that are made on access the first ``generated``."""
    if (parts := getattr(source, "parts", None)) is not None:
        return [start + index for start, part in parts() for index in checked_rows(part, generated)]
    return range(min(len(source), generated) if isinstance(source, GeneratedRows) else len(source))


def _chunks(size: int) -> Iterator[range]:
    return (range(start, min(start + _CHUNK, size)) for start in range(0, size, _CHUNK))


def keep(source: Source, fits: Fits) -> tuple[Source, int]:
    """Leave out the prompts that do not fit, in one pass; a source with a method ``keep`` may replace them instead.

    Returns:
        The remaining rows in the same order, and how many were lost.
    """
    if (method := getattr(source, "keep", None)) is not None:
        kept: tuple[Source, int] = method(fits)
        return kept
    remaining: list[int] = []
    for indices in _chunks(len(source)):
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


@functools.lru_cache(maxsize=16)  # a step may straddle two epochs, of each source of a mixture
def permutation(seed: int, epoch: int, size: int) -> Tensor:
    """A random order of ``range(size)``, another one for every ``epoch``, that depends on the arguments alone."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()  # torch's CPU generator only reads 32 bits of a seed
    return torch.randperm(size, generator=torch.Generator().manual_seed(int.from_bytes(digest[:4], "big")))


def run_order(source: Source, order: str, seed: int) -> Callable[[int], int]:
    """A function that gives the index of the run's prompt i = 0, 1, 2, …; every epoch has each prompt once.

    Args:
        source: The training prompts.
        order: ``shuffled``, anew in every epoch; ``sequential``; or the name of a column, whose least values come
            first.
        seed: Decides what is shuffled.

    Raises:
        ValueError: There is no such column, or its values cannot be compared.
    """
    if (method := getattr(source, "run_order", None)) is not None:
        own: Callable[[int], int] = method(order, seed)
        return own
    size = len(source)
    if order == "shuffled":
        return lambda i: int(permutation(seed, i // size, size)[i % size])
    ranked: Sequence[int] = range(size)
    if order != "sequential":
        if order not in (columns := source[0][1]):
            raise ValueError(f"data.order={order}: expected shuffled, sequential or a column: {', '.join(columns)}")
        values = [source[index][1][order] for index in ranked]
        try:
            ranked = sorted(ranked, key=values.__getitem__)
        except TypeError as error:  # such as numbers and None
            raise ValueError(f"data.order={order}: the values of this column have no order: {error}") from error
    return lambda i: ranked[i % size]


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


class Batches:
    """Batches of prompts, from a loader that is made anew each time they are iterated over.

    It is no ``DataLoader``, of which a trainer would replace the sampler. Without a ``size`` it has no length: a
    training epoch may be shorter than the one before.
    """

    def __init__(self, open_loader: Callable[[], DataLoader[Any]], size: int | None = None) -> None:
        self._open_loader, self._size = open_loader, size

    def __iter__(self) -> Iterator[Prompts]:
        return iter(self._open_loader())

    def __len__(self) -> int:
        if self._size is None:
            raise TypeError("the number of batches is not fixed")
        return self._size


def _open_source(source: Source | Callable[[], Source] | None) -> Source:
    if source is None:
        raise ValueError("data.path: there are no prompts; name a file or a data set with data.path=PATH")
    return source() if callable(source) else source


class PromptData(LightningDataModule):
    """Lightning data module of training and held-out prompts, as text.

    Every epoch of the trainer is the stretch of steps up to the next validation: each time the training prompts are
    iterated over, they begin after the last completed step. All processes read the same batches and divide them later.

    Args:
        train: The training source, or a callable that opens it when it is first needed; None: validation only.
        validation: The held-out source, likewise; None holds out rows of the training source, see `hold_out`.
        prompts_per_step: P, prompts of one rollout over all devices.
        tries: How often a rollout may ask for that many; a batch holds the prompts of all its tries.
        steps: Rollouts of the whole run.
        validate_every: Steps between validations; None or 0 means one stretch until the end.
        validation_size: The most held-out prompts that are used.
        validation_batch_size: The most held-out prompts answered at once on one device.
        max_prompt_length: The most tokens of a prompt, or None for any length; applied by `limit_prompts`.
        seed: Decides the order of the training prompts.
        order: That order, see `run_order`.
        verifier: Dotted path of the function that ``reward=accuracy`` judges these answers by.
        verifier_timeout: Seconds that it has for one answer in a worker process; None: it runs in this one.
        num_workers: Processes that prepare prompts; 0 prepares them in the training process.

    Raises:
        ValueError: On construction, if a number is out of range; all such numbers at once.
    """

    def __init__(
        self,
        *,
        train: Source | Callable[[], Source] | None,
        validation: Source | Callable[[], Source] | None,
        prompts_per_step: int,
        tries: int = 1,
        steps: int,
        validate_every: int | None,
        validation_size: int,
        validation_batch_size: int,
        max_prompt_length: int | None,
        seed: int,
        order: str = "shuffled",
        verifier: str,
        verifier_timeout: float | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if errors := problems(DATA, dict(locals()), prefix="data."):
            raise ValueError("\n".join(errors))
        self._open_train, self._open_validation = train, validation
        self.prompts_per_batch = prompts_per_step * tries
        self.prompts_per_step, self.steps, self.validate_every = prompts_per_step, steps, validate_every
        self.validation_size, self.validation_batch_size = validation_size, validation_batch_size
        self.max_prompt_length, self.seed, self.order = max_prompt_length, seed, order
        self.num_workers = num_workers
        self._train: Source | None = None
        self._index: Callable[[int], int] | None = None
        self._validation: Source | None = None
        self._count_tokens: Callable[[list[Prompt]], list[int]] | None = None
        self._followed: Callable[[], int] | None = None
        self._clamps = False

    @property
    def train(self) -> Source:
        """The training prompts."""
        return self.load()[0]

    @property
    def validation(self) -> Source:
        """The held-out prompts that are used."""
        return self.load(training=False)[-1]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, which rewards may ask for."""
        return tuple(self.validation[0][1])

    def load(self, *, training: bool = True, clamp: bool | None = None) -> tuple[Source, ...]:
        """Open the training prompts and the held-out ones that are used, each the first time that it is needed.

        Args:
            training: Whether the training prompts are needed.
            clamp: Whether ``prompts_per_step`` is lowered to the number of training prompts, with a warning. It holds
                for later calls, too; None keeps what was chosen before, which is False at first.

        Returns:
            The training prompts, if needed, and the held-out ones.

        Raises:
            ValueError: A source is malformed or has too few prompts.
        """
        self._clamps = self._clamps if clamp is None else clamp
        if self._validation is None:
            held_out = self._open_validation
            if held_out is None:
                self._open_train, held_out = hold_out(_open_source(self._open_train), self.validation_size)
            self._validation = self._held_out_rows(self._limit(_open_source(held_out)))
        if not training:
            return (self._validation,)
        if self._train is None:
            train = self._check_size(self._limit(_open_source(self._open_train)))
            size = min(len(train), _CHECKED_ROWS)
            if size > 1 and len({repr(train[i][0]) for i in range(size)}) == 1:
                _log.warning("all of the first %d prompts are the same: %.80r", size, train[0][0])
            if apart := set(train[0][1]) ^ set(self._validation[0][1]):
                _log.warning(
                    "only one of the training and held-out prompts have the columns: %s", ", ".join(sorted(apart))
                )
            self._use(train)
        return cast(Source, self._train), self._validation

    def _use(self, train: Source) -> None:
        self._train, self._index = train, run_order(train, self.order, self.seed)

    def batch(self, first: int, size: int) -> list[int]:
        """The indices of the run's prompts ``first`` to ``first + size - 1``, of the training prompts."""
        self.load()
        index = cast(Callable[[int], int], self._index)
        return [index(i) for i in range(first, first + size)]

    def limit_prompts(self, count_tokens: Callable[[list[Prompt]], list[int]]) -> None:
        """Drop the prompts that have more than ``max_prompt_length`` tokens; raises ValueError if too few are left."""
        self._count_tokens = count_tokens
        train = self._train and self._check_size(self._limit(self._train))
        self._validation = self._validation and self._held_out_rows(self._limit(self._validation))
        if train is not None:
            self._use(train)

    def _limit(self, source: Source) -> Source:
        """The prompts that are not too long, once lengths are known."""
        limit, count_tokens = self.max_prompt_length, self._count_tokens
        if limit is None or count_tokens is None:
            return source
        shortest = math.inf

        def fits(prompts: list[Prompt]) -> list[bool]:
            nonlocal shortest
            lengths = count_tokens(prompts)
            shortest = min(shortest, *lengths)
            return [length <= limit for length in lengths]

        remaining, lost = keep(source, fits)
        if lost == len(source):
            raise ValueError(
                f"all {lost} prompts have more than data.max_prompt_length={limit} tokens, the shortest {shortest:,} "
                f"(first: {origin(source, 0)})"
            )
        if lost:
            text = "dropped %d of %d prompts longer than data.max_prompt_length=%d (first: %s)"
            _log.warning(text, lost, len(source), limit, origin(source, 0))
        return remaining

    def fingerprint(self) -> dict[str, Any]:
        """What tells these prompts from others: how many there are, and a hash of some rows of both sources."""
        digest = hashlib.blake2b(digest_size=16)
        for source in self.load():
            size = _FINGERPRINT_ROWS if len(source) == ENDLESS else len(source)
            for index in sorted({size * number // _FINGERPRINT_ROWS for number in range(_FINGERPRINT_ROWS)}):
                row = json.dumps(source[index], default=lambda value: type(value).__name__, skipkeys=True)
                digest.update(row.encode())
        return {"training": len(self.train), "held_out": len(self.validation), "rows": digest.hexdigest()}

    def setup(self, stage: str) -> None:
        """Refuse steps that would leave a process without a prompt."""
        if stage == "fit" and self.prompts_per_step < self._processes():
            raise ValueError(
                f"data.prompts_per_step={self.prompts_per_step}: expected at least the number of processes, "
                f"{self._processes()}"
            )

    def train_dataloader(self) -> Batches:
        """The batches from the last completed step to the next validation, or to the end of the run."""
        return Batches(lambda: self._loader(self.train, self._remaining_batches()))

    def val_dataloader(self) -> Batches:
        """The held-out prompts, always in the same order."""
        batches = even_batches(len(self.validation), self.validation_batch_size, self._processes())
        return Batches(lambda: self._loader(self.validation, batches), len(batches))

    def follow(self, completed_steps: Callable[[], int]) -> None:
        """Begin after the steps that ``completed_steps`` counts, instead of those of the trainer's module."""
        self._followed = completed_steps

    def _remaining_batches(self) -> Iterator[list[int]]:
        start = self._completed_steps()
        left = max(self.steps - start, 0)
        num_steps = min(self.validate_every - start % self.validate_every, left) if self.validate_every else left
        # the same in all processes, which divide them
        return (self.batch(s * self.prompts_per_batch, self.prompts_per_batch) for s in range(start, start + num_steps))

    def _check_size(self, train: Source) -> Source:
        if self.prompts_per_step > len(train):
            text = f"data.prompts_per_step={self.prompts_per_step} is more than the {len(train)} training prompts"
            if not self._clamps:
                raise ValueError(f"{text}: set it to {len(train)} or less")
            _log.warning("%s: a step has %d", text, len(train))
            tries = self.prompts_per_batch // self.prompts_per_step
            self.prompts_per_step, self.prompts_per_batch = len(train), len(train) * tries
        _ = train[0]  # a generator that cannot make a row says so; workers inherit what it computes once
        return train

    def _held_out_rows(self, validation: Source) -> Source:
        _ = validation[0]
        return Subset(validation, range(self.validation_size)) if len(validation) > self.validation_size else validation

    def _completed_steps(self) -> int:
        if self._followed is not None:
            return self._followed()
        return int(self.trainer.lightning_module.completed_steps) if self.trainer else 0  # type: ignore[arg-type]

    def _processes(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _loader(self, source: Source, batches: Iterable[list[int]]) -> DataLoader[Any]:
        return DataLoader(
            range(len(source)),  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=functools.partial(collate, source),
            num_workers=self.num_workers,
        )


def collate(source: Source, indices: Iterable[int]) -> Prompts:
    """A batch of some rows, which knows where each comes from."""
    indices = list(indices)
    return Prompts.collate([source[i] for i in indices], [origin(source, i) for i in indices])


def check_readable(data: PromptData, chat: "ChatTokenizer", *, training: bool) -> None:
    """Check that a tokenizer and its chat template show every prompt, of those that are made on access the first."""
    rows = [(source, index) for source in data.load(training=training) for index in checked_rows(source)]
    chat.check_prompts((source[index][0] for source, index in rows), lambda number: origin(*rows[number]))


def completion_limits(
    data: PromptData, policy: "Policy", config: Mapping[str, Any], *, fixed: Callable[[str], bool]
) -> dict[str, int]:
    """Most tokens of a completion behind the longest prompt, where the policy's context has less room than is set.

    Of prompts that are made on access only the first are measured.

    Args:
        data: The prompts.
        policy: Has the tokenizer and the context.
        config: Resolved settings of the run.
        fixed: Which keys keep their value.

    Returns:
        Key -> tokens, of ``rollout.max_new_tokens`` and ``validation.max_new_tokens``.

    Raises:
        ValueError: A number would have to fall that is fixed, or below a quarter; names the row of the prompt.
    """
    limits: dict[str, int] = {}
    context, limit = policy.context, data.max_prompt_length
    if context is None or "rollout" not in config["module"] or config["mode"] == "export":  # or supervised
        return limits
    parts = {"rollout": data.train} if config["mode"] != "validate" else {}
    for part, source in {**parts, "validation": data.validation}.items():
        key, new = f"{part}.max_new_tokens", config[part]["max_new_tokens"]
        if not isinstance(new, int) or (limit is not None and limit + new <= context):
            continue
        rows = checked_rows(source)
        lengths = [n for part in _chunks(len(rows)) for n in policy.count_tokens([source[rows[i]][0] for i in part])]
        number = rows[lengths.index(max(lengths))]
        room = context - max(lengths)
        if room >= new:
            continue
        if fixed(key) or isinstance(source, GeneratedRows) or room < new // 4:
            remedy = f"{key} below {context}"
            if new < context:
                remedy = f"data.max_prompt_length={context - new}, which leaves out longer prompts, or a lower {key}"
            raise ValueError(
                f"{origin(source, number)}: the prompt has {max(lengths)} tokens, which with {key}={new} are more "
                f"than the model's context of {context}; set {remedy}"
            )
        where = f"the longest prompt has {max(lengths)} tokens ({origin(source, number)})"
        _log.warning("%s=%d becomes %d: the context has %d tokens, and %s", key, new, room, context, where)
        limits[key] = room
    return limits
