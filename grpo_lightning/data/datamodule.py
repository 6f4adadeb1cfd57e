"""Data module: training and held-out prompts for Lightning's trainer, and a look at them before the first step."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning import LightningDataModule
from torch.utils.data import DataLoader

from grpo_lightning.config.rules import DATA, problems
from grpo_lightning.data.sources import (
    CHUNK,
    Fits,
    GeneratedRows,
    Row,
    Source,
    StepSampler,
    Subset,
    even_batches,
    hold_out,
    keep,
    place,
)
from grpo_lightning.policy import Policy
from grpo_lightning.types import Prompts

_log = logging.getLogger(__name__)
_FINGERPRINT_ROWS = 32
_CHECKED_ROWS = 64


class Batches:
    """Batches of prompts, from a loader that is made anew each time they are iterated over.

    It is no ``DataLoader``, of which a trainer would replace the sampler.
    """

    def __init__(self, open_loader: Callable[[], DataLoader[Any]]) -> None:
        self._open_loader = open_loader

    def __iter__(self) -> Iterator[Prompts]:
        return iter(self._open_loader())


class SizedBatches(Batches):
    """Batches of which there are ``size`` each time; a training epoch may be shorter than the one before."""

    def __init__(self, open_loader: Callable[[], DataLoader[Any]], size: int) -> None:
        super().__init__(open_loader)
        self._size = size

    def __len__(self) -> int:
        return self._size


class PromptData(LightningDataModule):
    """Training and held-out prompts, as text.

    Every epoch of the trainer is the stretch of steps up to the next validation: each time the training prompts are
    iterated over, they begin after the last completed step. All processes read the same batches and divide them later.

    Args:
        train: The training source, or a callable that opens it in ``load``.
        validation: The held-out source, likewise; None holds out rows of the training source, see ``hold_out``.
        prompts_per_step: P, prompts of one rollout over all devices.
        tries: How often a rollout may ask for that many; a batch holds the prompts of all its tries.
        steps: Rollouts of the whole run.
        validate_every: Steps between validations; None or 0 means one stretch until the end.
        validation_size: The most held-out prompts that are used.
        validation_batch_size: The most held-out prompts answered at once on one device.
        max_prompt_length: The most tokens of a prompt, or None for any length; applied by ``limit_prompts``.
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

    def limit_prompts(self, fits: Fits) -> None:
        """Drop the prompts that do not fit into ``max_prompt_length`` tokens; raises ValueError if too few are left."""
        if self.max_prompt_length is None:
            return
        try:
            (train, lost), (validation, lost_held_out) = (keep(source, fits) for source in self.load())
            self._sources = self._checked(train, validation)
        except ValueError as error:
            raise ValueError(f"data.max_prompt_length={self.max_prompt_length}: {error}") from error
        if lost or lost_held_out:
            counts = lost, lost_held_out, self.max_prompt_length
            _log.warning("dropped %d training and %d held-out prompts longer than data.max_prompt_length=%d", *counts)

    def fingerprint(self) -> dict[str, Any]:
        """What tells these prompts from others: how many there are, and a hash of some rows of both sources."""
        digest = hashlib.blake2b(digest_size=16)
        for source in (self.train, self.validation):
            for index in sorted({len(source) * number // _FINGERPRINT_ROWS for number in range(_FINGERPRINT_ROWS)}):
                row = json.dumps(source[index], default=lambda value: type(value).__name__, skipkeys=True)
                digest.update(row.encode())
        return {"training": len(self.train), "held_out": len(self.validation), "rows": digest.hexdigest()}

    def setup(self, stage: str) -> None:
        """Refuse steps that would leave a process without a prompt."""
        self._begin()
        if stage == "fit" and self.prompts_per_step < self._processes():
            raise ValueError(
                f"data.prompts_per_step={self.prompts_per_step}: expected at least the number of processes, "
                f"{self._processes()}"
            )

    def train_dataloader(self) -> Batches:
        """The batches from the last completed step to the next validation, or to the end of the run."""
        self._begin()
        return Batches(lambda: self._loader(self.train, self._stretch()))

    def val_dataloader(self) -> Batches:
        """The held-out prompts, always in the same order."""
        self._begin()
        batches = even_batches(len(self.validation), self.validation_batch_size, self._processes())
        return SizedBatches(lambda: self._loader(self.validation, batches), len(batches))

    def _begin(self) -> None:
        """Make a row of each source, so that workers inherit what it computes once."""
        for source in self.load():
            _ = source[0]

    def _stretch(self) -> StepSampler:
        start = self._completed_steps()
        left = max(self.steps - start, 0)
        num_steps = min(self.validate_every - start % self.validate_every, left) if self.validate_every else left
        return StepSampler(len(self.train), self.prompts_per_batch, self.seed, start, num_steps)

    def _checked(self, train: Source, validation: Source) -> tuple[Source, Source]:
        if self.prompts_per_step > len(train):
            raise ValueError(
                f"data.prompts_per_step={self.prompts_per_step}: expected at most {len(train)}, the number of training "
                "prompts"
            )
        if not len(validation):
            raise ValueError("data.validation: no held-out prompt is left; at least 1 is needed")
        _ = validation[0]  # a generator that cannot make one row says so now
        if len(validation) > self.validation_size:
            validation = Subset(validation, range(self.validation_size))
        return train, validation

    def follow(self, completed_steps: Callable[[], int]) -> None:
        """Begin after the steps that ``completed_steps`` counts, instead of those of the trainer's module."""
        self._followed = completed_steps

    def _completed_steps(self) -> int:
        if self._followed is not None:
            return self._followed()
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


def check_prompts(data: PromptData, policy: Policy, config: Mapping[str, Any]) -> None:
    """Check that the prompts, those that are made on access only in part, fit into the policy's context.

    Raises:
        ValueError: One does not, together with the longest completion; names its row.
    """
    if "rollout" not in config["module"]:  # supervised
        return
    train, context, limit = data.train, policy.context, data.max_prompt_length
    parts = {"rollout": train, "validation": data.validation}
    if config["mode"] not in ("fit", "preflight"):
        del parts["rollout"]
    for part, source in parts.items():
        size = min(len(source), _CHECKED_ROWS) if isinstance(source, GeneratedRows) else len(source)
        key, new = f"{part}.max_new_tokens", config[part]["max_new_tokens"]
        if context is None or not isinstance(new, int) or (limit is not None and limit + new <= context):
            continue
        remedy = f"{key} below {context}"
        if new < context:
            remedy = f"data.max_prompt_length={context - new}, which leaves out longer prompts, or a lower {key}"
        for start in range(0, size, CHUNK):
            numbers = range(start, min(start + CHUNK, size))
            for number, length in zip(numbers, policy.count_tokens([source[i][0] for i in numbers]), strict=True):
                if length + new > context:
                    raise ValueError(
                        f"{place(source, number)}: the prompt has {length} tokens, which with {key}={new} are more "
                        f"than the model's context of {context}; set {remedy}"
                    )
