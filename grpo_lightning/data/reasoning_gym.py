"""Prompts made by reasoning_gym: over a hundred tasks, each with its own verifier, made on access."""

import copy
import functools
import random
from collections.abc import Mapping
from typing import Any

import numpy
from lightning.pytorch.utilities.seed import isolate_rng
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS, create_dataset

from grpo_lightning.config.settings import nearest
from grpo_lightning.data.datamodule import Fits, GeneratedRows, PromptData, Row

# Entries are made from consecutive seeds. Of every block of 2^29, the first half serves as a source's entries and the
# second replaces unfit ones: training has the first block, validation the second, so that no seed serves twice.
_TRAIN_SEED, _VALIDATION_SEED, _SPARE_OFFSET = 0, 2**29, 2**28
_NUM_SPARES = 2**14
_SPARE_STRIDE = 167  # odd, so that successive tries of an entry meet different spares
_TRIES = 100
_CACHE_SIZE = 1024  # entries; some tasks need a second for each


def _dataset(task: str, config: Mapping[str, Any], size: int, seed: int) -> ProceduralDataset:
    if task not in DATASETS:
        hint = f"the nearest is {match}" if (match := nearest(task, DATASETS)) else f"there are {', '.join(DATASETS)}"
        raise ValueError(f"data.task={task}: reasoning_gym has no such task; {hint}")
    try:
        specs = {"datasets": [DatasetSpec(**spec) for spec in config["datasets"]]} if "datasets" in config else {}
        return create_dataset(task, size=size, seed=seed, **{**config, **specs})
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"data.task_config={dict(config)}: refused by data.task={task!r}: {error}") from error


class ReasoningGym(GeneratedRows):
    """Entries of one reasoning_gym task, made from the seeds [seed, seed + size) when they are asked for.

    Its columns are ``answer`` (text, empty where only the verifier can tell), ``task``, ``metadata`` and
    ``task_config``. A few tasks (such as word_ladder) make the same entries in every process only if PYTHONHASHSEED is
    set.

    Args:
        task: Name of a reasoning_gym data set.
        task_config: Its settings, without size and seed; the others keep reasoning_gym's defaults.
        size: How many entries there are, up to 2^28.
        seed: Seed of the first entry.
        held_out: Entries whose questions are replaced by others here; ignored where fewer than half of its questions
            are distinct, as the task has too few then.

    Raises:
        ValueError: Task, settings or size are not allowed.
    """

    def __init__(
        self, task: str, task_config: Mapping[str, Any], size: int, seed: int, held_out: "ReasoningGym | None" = None
    ) -> None:
        if not 1 <= size <= _SPARE_OFFSET:
            raise ValueError(f"data.train_size, data.validation_size: expected 1 to {_SPARE_OFFSET}, got {size}")
        super().__init__(size, seed)
        self._task, self._task_config, self._held_out = task, dict(task_config), held_out
        self._entries = _dataset(task, task_config, size, seed)
        self._spares = functools.cache(lambda: _dataset(task, task_config, _NUM_SPARES, seed + _SPARE_OFFSET))
        self._candidate = functools.lru_cache(_CACHE_SIZE)(self._make_candidate)
        self._fits: tuple[Fits, ...] = ()
        self._held_out_questions: frozenset[str] | None = None

    def _row(self, number: int) -> Row:
        for attempt in range(_TRIES):
            entry = self._candidate(number - self._seed, attempt)
            if self._is_trainable(entry["question"]):
                answer = "" if entry["answer"] is None else str(entry["answer"])
                columns = {"answer": answer, "task": self._task, "metadata": entry["metadata"]}
                return entry["question"], columns | {"task_config": self._task_config}
        raise ValueError(
            f"data.task={self._task!r}: none of {_TRIES} questions is within data.max_prompt_length and not held out"
        )

    def keep(self, fits: Fits) -> "tuple[ReasoningGym, int]":
        """The same entries, with others in place of those that do not fit; 0 are lost."""
        source = copy.copy(self)
        source._fits = (*self._fits, fits)
        source._held_out = self._held_out and self._held_out.keep(fits)[0]
        source._held_out_questions = None
        return source, 0

    def _make_candidate(self, index: int, attempt: int) -> dict[str, Any]:
        entries = self._spares() if attempt else self._entries
        position = (index + attempt * _SPARE_STRIDE) % _NUM_SPARES if attempt else index
        with isolate_rng(include_cuda=False):  # some tasks draw from global generators, or seed them themselves
            random.seed(entries.seed + position)
            numpy.random.seed(entries.seed + position)
            entry: dict[str, Any] = entries[position]
        return entry

    def _is_trainable(self, question: str) -> bool:
        if self._held_out_questions is None:
            questions = frozenset(str(prompt) for prompt, _ in self._held_out or ())
            self._held_out_questions = questions if 2 * len(questions) >= len(self._held_out or ()) else frozenset()
        return question not in self._held_out_questions and all(fits([question])[0] for fits in self._fits)


def prompts(
    *,
    task: str,
    task_config: Mapping[str, Any] | None,
    levels: Mapping[str, Mapping[str, Any]],
    train_size: int,
    validation_size: int,
    **settings: Any,
) -> PromptData:
    """Data module of one reasoning_gym task, whose settings are ``task_config`` before those of ``levels[task]``.

    No training entry has a held-out entry's seed or, if that can be avoided, its question. Which entries there are does
    not depend on the run's seed, so that all runs are validated on the same ones.
    """
    config = {**levels.get(task, {}), **(task_config or {})}
    validation = functools.cache(lambda: ReasoningGym(task, config, validation_size, _VALIDATION_SEED))
    return PromptData(
        train=lambda: ReasoningGym(task, config, train_size, _TRAIN_SEED, held_out=validation()),
        validation=validation,
        validation_size=validation_size,
        **settings,
    )
