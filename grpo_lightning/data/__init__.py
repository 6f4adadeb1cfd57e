"""Data: text prompts and the columns rewards read, in an order that is a function of the seed and the step."""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from lightning import LightningDataModule
from torch.utils.data import DataLoader

from grpo_lightning.batch import Prompt, Prompts
from grpo_lightning.data.order import StepSampler, even_batches, permutation

_log = logging.getLogger(__name__)
_CHUNK = 1024  # prompts measured at once

Row = tuple[Prompt, dict[str, Any]]
"""A prompt and its columns."""
Fits = Callable[[list[Prompt]], list[bool]]
"""Which of some prompts may be used."""


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


class Subset:
    """Some rows of a source."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Row:
        return self._source[self._indices[index]]


def keep(source: Source, fits: Fits) -> tuple[Source, int]:
    """The source without the prompts that do not fit; a stored source is read through once.

    Args:
        source: Where the prompts are.
        fits: Says which of a list of prompts may stay.

    Returns:
        The remaining source, in the same order, and how many rows it has lost.
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
        size: Most rows to hold out; never more than a fifth of them, but at least one.

    Returns:
        The training source and the validation source, both in the source's order.

    Raises:
        ValueError: If there are fewer than two rows.
    """
    if len(source) < 2:
        raise ValueError(f"data: {len(source)} rows; allowed: at least 2, as some are held out for validation")
    share = min(size, max(len(source) // 5, 1))
    if share < size:
        _log.warning("held out %d of %d rows, fewer than data.validation_size=%d", share, len(source), size)
    order = permutation(0, 0, len(source)).tolist()
    training, validation = Subset(source, sorted(order[:-share])), Subset(source, sorted(order[-share:]))
    held_out = {repr(validation[i][0]) for i in range(share)}
    distinct, repeated = keep(training, lambda prompts: [repr(prompt) not in held_out for prompt in prompts])
    if repeated:
        _log.warning("left out %d training rows that repeat a held-out prompt", repeated)
    return distinct, validation


class PromptData(LightningDataModule):
    """Training and held-out prompts, as text.

    Every epoch of the trainer is the stretch of steps up to the next validation, so the trainer must reload its
    dataloaders every epoch, and must not insert samplers of its own.

    Args:
        train: The training source, or a callable that opens it in ``load``.
        validation: The held-out source, likewise; None holds out rows of the training source, see ``hold_out``.
        prompts_per_step: P, prompts of one rollout over all devices.
        tries: How often a rollout may ask for that many; a batch holds the prompts of all its tries.
        steps: Rollouts of the whole run.
        validate_every: Steps between validations; None or 0 means one stretch until the end.
        validation_size: Most held-out prompts that are used.
        validation_batch_size: Most held-out prompts answered at once on one device.
        max_prompt_length: Most tokens of a prompt, or None for any length; applied by ``limit_prompts``.
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
        least = {
            "data.prompts_per_step": (prompts_per_step, 1),
            "data.tries": (tries, 1),
            "steps": (steps, 0),
            "data.validate_every": (validate_every or 0, 0),
            "data.validation_size": (validation_size, 1),
            "data.validation_batch_size": (validation_batch_size, 1),
            "data.max_prompt_length": (1 if max_prompt_length is None else max_prompt_length, 1),
            "data.num_workers": (num_workers, 0),
        }
        wrong = [f"{key}={value}: allowed: {low} or more" for key, (value, low) in least.items() if value < low]
        if wrong:
            raise ValueError("\n".join(wrong))
        self._open_train, self._open_validation = train, validation
        self.tries = tries
        self.prompts_per_step, self.steps, self.validate_every = prompts_per_step, steps, validate_every
        self.validation_size, self.validation_batch_size = validation_size, validation_batch_size
        self.max_prompt_length, self.seed = max_prompt_length, seed
        self.verifier, self.verifier_timeout = verifier, verifier_timeout
        self.num_workers = num_workers
        self.dropped = 0
        self._sources: tuple[Source, Source] | None = None

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
        """Names that rewards may ask for."""
        return tuple(self.validation[0][1])

    def load(self) -> tuple[Source, Source]:
        """Open both sources, the first time it is called.

        Returns:
            The training prompts and the held-out ones that are used.

        Raises:
            ValueError: If a source is malformed or has too few prompts.
        """
        if self._sources is None:
            train = _open(self._open_train)
            if self._open_validation is None:
                train, validation = hold_out(train, self.validation_size)
            else:
                validation = _open(self._open_validation)
            self._sources = self._checked(train, validation)
        return self._sources

    def limit_prompts(self, fits: Fits) -> None:
        """Drop the prompts that are longer than ``max_prompt_length``, and say how many they were.

        Args:
            fits: Which of some prompts have at most ``max_prompt_length`` tokens.

        Raises:
            ValueError: If too few are left.
        """
        if self.max_prompt_length is None:
            return
        try:
            (train, lost), (validation, lost_held_out) = (keep(source, fits) for source in self.load())
            self._sources = self._checked(train, validation)
        except ValueError as error:
            raise ValueError(f"data.max_prompt_length={self.max_prompt_length}: {error}") from error
        self.dropped += lost + lost_held_out
        if lost or lost_held_out:
            _log.warning(
                "dropped %d training and %d held-out prompts longer than data.max_prompt_length=%d tokens",
                lost,
                lost_held_out,
                self.max_prompt_length,
            )

    def describe(self) -> dict[str, Any]:
        """What there is, for people to read."""
        return {
            "training prompts": len(self.train),
            "held-out prompts": len(self.validation),
            "dropped prompts": self.dropped,
            "columns": list(self.columns),
        }

    def setup(self, stage: str) -> None:
        """Refuse steps that would leave a process without a prompt, before the first validation."""
        if stage == "fit" and self.prompts_per_step < self._processes():
            raise ValueError(
                f"data.prompts_per_step={self.prompts_per_step}: allowed: at least the number of processes, "
                f"{self._processes()}"
            )

    def train_dataloader(self) -> DataLoader[Row]:
        """The steps from the last completed one to the next validation, or to the end of the run."""
        start = self._completed_steps()
        left = max(self.steps - start, 0)
        num_steps = min(self.validate_every - start % self.validate_every, left) if self.validate_every else left
        _ = self.train[0]  # here, so that workers inherit what a source computes once
        prompts = self.prompts_per_step * self.tries
        sampler = StepSampler(len(self.train), prompts, self.seed, start, num_steps)
        return self._loader(self.train, sampler)

    def val_dataloader(self) -> DataLoader[Row]:
        """The held-out prompts, always in the same order."""
        batches = even_batches(len(self.validation), self.validation_batch_size, self._processes())
        return self._loader(self.validation, batches)

    def _checked(self, train: Source, validation: Source) -> tuple[Source, Source]:
        if self.prompts_per_step > len(train):
            raise ValueError(
                f"data.prompts_per_step={self.prompts_per_step}: allowed: at most {len(train)} "
                "(the training prompts there are)"
            )
        if not len(validation):
            raise ValueError("data.validation: no held-out prompt is left; allowed: at least 1")
        _ = validation[0]  # a generator that cannot make one row says so now
        if len(validation) > self.validation_size:
            validation = Subset(validation, range(self.validation_size))
        return train, validation

    def _completed_steps(self) -> int:
        return int(self.trainer.lightning_module.completed_steps) if self.trainer else 0  # type: ignore[arg-type]

    def _processes(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _loader(self, source: Source, batches: StepSampler | list[list[int]]) -> DataLoader[Row]:
        return DataLoader(
            source,  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=Prompts.collate,
            num_workers=self.num_workers,
        )


def _open(source: Source | Callable[[], Source]) -> Source:
    return source() if callable(source) else source
