"""Data module: training and held-out prompts for Lightning's trainer, their order, and a look before the first step.

Which prompt comes when is a pure function of the seed and a counter, so that a resumed run needs no sampler state.
"""

import functools
import hashlib
import itertools
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from grpo_lightning.config.rules import DATA, problems
from grpo_lightning.types import Prompt, Prompts

if TYPE_CHECKING:
    from grpo_lightning.policy import Policy

_log = logging.getLogger(__name__)
_CHUNK = 1024  # prompts that are measured at once
_FINGERPRINT_ROWS = 32
_CHECKED_ROWS = 64

Row = tuple[Prompt, dict[str, Any]]
"""A prompt, and the values of its row in the columns by name."""
Fits = Callable[[list[Prompt]], list[bool]]
"""Prompts -> which of them may be used."""


class Source(Protocol):
    """Prompts by index. Every row has the same columns.

    A source may have a method ``origin(index) -> str``, which names a row in messages, and a method ``keep(fits)``, in
    place of the function `keep`.
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

    def origin(self, index: int) -> str:
        """Where a row comes from."""
        return origin(self._source, self._indices[index])


def origin(source: Source, index: int) -> str:
    """Where a row comes from, such as a file and a line, for messages."""
    method = getattr(source, "origin", None)
    return method(index) if method else f"data, prompt {index + 1}"


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


@functools.lru_cache(maxsize=2)  # a step may straddle two epochs; no more are ever in use
def permutation(seed: int, epoch: int, size: int) -> Tensor:
    """A random order of ``range(size)``, another one for every ``epoch``, that depends on the arguments alone."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()  # torch's CPU generator only reads 32 bits of a seed
    return torch.randperm(size, generator=torch.Generator().manual_seed(int.from_bytes(digest[:4], "big")))


def prompt_index(seed: int, i: int, size: int) -> int:
    """The index, of ``size`` prompts, of the run's prompt i: permutation(seed, i // size)[i % size]."""
    epoch, position = divmod(i, size)
    return int(permutation(seed, epoch, size)[position])


def step_batches(size: int, prompts_per_step: int, seed: int, start: int, num_steps: int) -> Iterator[list[int]]:
    """The indices of every step's prompts; the same in all processes, which divide them.

    Step s consumes prompts s·P to (s + 1)·P - 1 of the run, where P is ``prompts_per_step``.
    """
    for step in range(start, start + num_steps):
        first = step * prompts_per_step
        yield [prompt_index(seed, i, size) for i in range(first, first + prompts_per_step)]


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


class PromptData(LightningDataModule):
    """Training and held-out prompts, as text.

    Every epoch of the trainer is the stretch of steps up to the next validation: each time the training prompts are
    iterated over, they begin after the last completed step. All processes read the same batches and divide them later.

    Args:
        train: The training source, or a callable that opens it when it is first needed.
        validation: The held-out source, likewise; None holds out rows of the training source, see `hold_out`.
        prompts_per_step: P, prompts of one rollout over all devices.
        tries: How often a rollout may ask for that many; a batch holds the prompts of all its tries.
        steps: Rollouts of the whole run.
        validate_every: Steps between validations; None or 0 means one stretch until the end.
        validation_size: The most held-out prompts that are used.
        validation_batch_size: The most held-out prompts answered at once on one device.
        max_prompt_length: The most tokens of a prompt, or None for any length; applied by `limit_prompts`.
        seed: Decides the order of the training prompts.
        verifier: Dotted path of the function that ``reward=accuracy`` judges these answers by.
        verifier_timeout: Seconds that it has for one answer in a worker process; None: it runs in this one.
        num_workers: Processes that prepare prompts; 0 prepares them in the training process.

    Raises:
        ValueError: On construction, if a number is out of range; all such numbers at once.
    """

    def __init__(
        self,
        *,
        train: Source | Callable[[], Source],
        validation: Source | Callable[[], Source] | None,
        prompts_per_step: int,
        tries: int = 1,
        steps: int,
        validate_every: int | None,
        validation_size: int,
        validation_batch_size: int,
        max_prompt_length: int | None,
        seed: int,
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
        self.max_prompt_length, self.seed = max_prompt_length, seed
        self.num_workers = num_workers
        self._sources: tuple[Source, Source] | None = None
        self._followed: Callable[[], int] | None = None

    @property
    def train(self) -> Source:
        """The training prompts."""
        return self.load()[0]

    @property
    def validation(self) -> Source:
        """The held-out prompts that are used."""
        return self.load()[1]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, which rewards may ask for."""
        return tuple(self.validation[0][1])

    def load(self) -> tuple[Source, Source]:
        """Open both sources, the first time it is called: the training prompts and the held-out ones that are used.

        Raises:
            ValueError: A source is malformed or has too few prompts.
        """
        if self._sources is None:
            train = self._open_train() if callable(self._open_train) else self._open_train
            validation = self._open_validation() if callable(self._open_validation) else self._open_validation
            if validation is None:
                train, validation = hold_out(train, self.validation_size)
            self._sources = self._checked(train, validation)
        return self._sources

    def limit_prompts(self, count_tokens: Callable[[list[Prompt]], list[int]]) -> None:
        """Drop the prompts that have more than ``max_prompt_length`` tokens; raises ValueError if too few are left."""
        if (limit := self.max_prompt_length) is None:
            return
        try:
            (train, lost), (validation, lost_held_out) = (
                keep(source, lambda prompts: [length <= limit for length in count_tokens(prompts)])
                for source in self.load()
            )
            self._sources = self._checked(train, validation)
        except ValueError as error:
            raise ValueError(f"data.max_prompt_length={limit}: {error}") from error
        if lost or lost_held_out:
            counts = lost, lost_held_out, limit
            _log.warning("dropped %d training and %d held-out prompts longer than data.max_prompt_length=%d", *counts)

    def fingerprint(self) -> dict[str, Any]:
        """What tells these prompts from others: how many there are, and a hash of some rows of both sources."""
        digest = hashlib.blake2b(digest_size=16)
        for source in self.load():
            for index in sorted({len(source) * number // _FINGERPRINT_ROWS for number in range(_FINGERPRINT_ROWS)}):
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
        return Batches(lambda: self._loader(self.train, self._stretch()))

    def val_dataloader(self) -> Batches:
        """The held-out prompts, always in the same order."""
        batches = even_batches(len(self.validation), self.validation_batch_size, self._processes())
        return Batches(lambda: self._loader(self.validation, batches), len(batches))

    def follow(self, completed_steps: Callable[[], int]) -> None:
        """Begin after the steps that ``completed_steps`` counts, instead of those of the trainer's module."""
        self._followed = completed_steps

    def _stretch(self) -> Iterator[list[int]]:
        start = self._completed_steps()
        left = max(self.steps - start, 0)
        num_steps = min(self.validate_every - start % self.validate_every, left) if self.validate_every else left
        return step_batches(len(self.train), self.prompts_per_batch, self.seed, start, num_steps)

    def _checked(self, train: Source, validation: Source) -> tuple[Source, Source]:
        if self.prompts_per_step > len(train):
            raise ValueError(
                f"data.prompts_per_step={self.prompts_per_step}: expected at most {len(train)}, the number of training "
                "prompts"
            )
        if not len(validation):
            raise ValueError("data.validation: no held-out prompt is left; at least 1 is needed")
        _ = train[0], validation[0]  # a generator that cannot make a row says so; workers inherit what it computes once
        if len(validation) > self.validation_size:
            validation = Subset(validation, range(self.validation_size))
        return train, validation

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


def check_prompts(data: PromptData, policy: "Policy", config: Mapping[str, Any]) -> None:
    """Check that the prompts, those that are made on access only in part, fit into the policy's context.

    Raises:
        ValueError: One does not, together with the longest completion; names its row.
    """
    if "rollout" not in config["module"]:  # supervised
        return
    context, limit = policy.context, data.max_prompt_length
    parts = {"rollout": data.train} if config["mode"] in ("fit", "preflight") else {}
    for part, source in {**parts, "validation": data.validation}.items():
        key, new = f"{part}.max_new_tokens", config[part]["max_new_tokens"]
        if context is None or not isinstance(new, int) or (limit is not None and limit + new <= context):
            continue
        remedy = f"{key} below {context}"
        if new < context:
            remedy = f"data.max_prompt_length={context - new}, which leaves out longer prompts, or a lower {key}"
        size = min(len(source), _CHECKED_ROWS) if isinstance(source, GeneratedRows) else len(source)
        for numbers in _chunks(size):
            for number, length in zip(numbers, policy.count_tokens([source[i][0] for i in numbers]), strict=True):
                if length + new > context:
                    raise ValueError(
                        f"{origin(source, number)}: the prompt has {length} tokens, which with {key}={new} are more "
                        f"than the model's context of {context}; set {remedy}"
                    )
