"""What draws completions: the policy itself, or an engine beside it that is given the policy's weights.

P prompts, G completions of each, B = P * G rows with a prompt's rows adjacent, T tokens of the longest completion.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from grpo_lightning.batch import Sampling
from grpo_lightning.clock import Clock
from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.sampler.own.decode import Decoded, Poll
from grpo_lightning.sampler.own.slots import StopTest


@dataclass(frozen=True)
class Completion:
    """One completion as an engine has drawn it.

    Example:
        ``Completion([7, 2], [-0.3, -0.1], finished=True)`` with 2 the end of sequence.
    """

    ids: Sequence[int]
    """[T] token ids, the one that ends it included."""
    logprobs: Sequence[float]
    """[T] in nats, under logits / temperature, out of the set where sampling is truncated."""
    finished: bool
    """Whether it ended of itself."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The completions that an engine is to draw.

    Example:
        Two completions of the prompt 5 6: ``Asked(prompts=[[5, 6]], group_size=2, sampling=sampling, seed=7,
        end_ids=[2])``.
    """

    prompts: Sequence[Sequence[int]]
    """[P] the token ids of each."""
    group_size: int
    """Completions of each, G."""
    sampling: Sampling
    """How tokens are drawn."""
    seed: int
    """Decides all of them, with the numbers of their prompt and of their place in the group."""
    end_ids: Sequence[int]
    """The token ids that end a completion."""
    first_prompt: int = 0
    """Number of the first prompt here, among all that are drawn with this seed."""
    stops: StopTest | None = None
    """Which completions end for another reason."""
    poll: Poll | None = None
    """Called between tokens, where the engine can; what it raises is passed on."""
    on_finished: Callable[[int, Sequence[int]], None] | None = None
    """Called with the row and the token ids of a completion that ended of itself."""

    @property
    def rows(self) -> list[tuple[Sequence[int], int]]:
        """[B] token ids of the prompt, and the seed of every completion."""
        return [
            (ids, row_seed(self.seed, self.first_prompt + number, member))
            for number, ids in enumerate(self.prompts)
            for member in range(self.group_size)
        ]


class Engine(Protocol):
    """Draws completions with the weights that it was given last."""

    def draw(self, asked: Asked) -> Sequence[Completion]:
        """[B] completions."""
        ...


class WeightSource(Protocol):
    """What an engine needs of a policy."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight with its name in the model's files, adapters merged, whole where weights are sharded.

        A tied one comes under each of its names.
        """
        ...

    def describe(self, directory: Path) -> torch.dtype:
        """Write the model's configuration, with an untied head; returns the type in which it computes."""
        ...

    def sampled_by(self, engine: Engine) -> AbstractContextManager[None]:
        """Inside, the policy's completions are the engine's."""
        ...


class Sampler(Protocol):
    """Says what draws a policy's completions."""

    @property
    def is_engine(self) -> bool:
        """Whether it computes log-probabilities elsewhere than the policy does."""
        ...

    @property
    def is_coarse(self) -> bool:
        """Whether it rounds to 16 bits, whatever the policy does."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """What there is to say of the last step."""
        ...

    def ready(self, policy: WeightSource, *, version: int, clock: Clock, ranks: Ranks) -> AbstractContextManager[None]:
        """Inside, the policy may be sampled from, with its weights as they are at the beginning.

        All processes enter together.

        Args:
            policy: Whose weights are used.
            version: The steps that these weights have behind them.
            clock: Adds up the seconds of handing weights over, as ``sync``, and of waking an engine, as ``wake``.
            ranks: The processes of the run.
        """
        ...


def row_seed(seed: int, prompt: int, member: int) -> int:
    """A seed in [0, 2^63) for one completion, which no other one has.

    Args:
        seed: Of all that is sampled together.
        prompt: Number of the prompt.
        member: Number of the completion in its group.
    """
    key = repr((seed, prompt, member)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1


def as_decoded(completions: Sequence[Completion], *, pad_id: int, device: torch.device) -> Decoded:
    """Completions [B] as tensors [B, T].

    Engines tell no entropies. In their place is -log p of the token that was drawn, whose expectation is the entropy.

    Args:
        completions: At least one, each of at least one token.
        pad_id: Fills the shorter ones.
        device: Of the tensors.
    """
    length = max(len(one.ids) for one in completions)

    def filled(rows: Sequence[Sequence[float]], value: float) -> list[list[float]]:
        return [[*row, *[value] * (length - len(row))] for row in rows]

    ids = torch.tensor(filled([one.ids for one in completions], pad_id), dtype=torch.long, device=device)
    logprobs = torch.tensor(filled([one.logprobs for one in completions], 0.0), device=device)
    sizes = torch.tensor([len(one.ids) for one in completions], device=device)
    mask = torch.arange(length, device=device) < sizes.unsqueeze(-1)  # [B, T]
    return Decoded(
        ids=ids,
        mask=mask,
        seen=mask,
        logprobs=logprobs,
        entropies=-logprobs,
        finished=torch.tensor([one.finished for one in completions], device=device),
    )


def check(asked: Asked, key: str) -> None:
    """Refuse what engines cannot do.

    Args:
        asked: What is to be drawn.
        key: The setting that chooses the engine.

    Raises:
        ValueError: It was asked for.
    """
    sampling = asked.sampling
    if sampling.kv_cache_gib is not None:
        raise ValueError(
            f"kv_cache_gib={sampling.kv_cache_gib}: allowed with {key} is null; an engine has a cache of its own size"
        )


class CopiedWeights:
    """What holds for both ways to vLLM: the engine has a copy of the policy's weights.

    Args:
        dtype: Of the weights: float32, bfloat16 or float16; None: the type in which the policy computes.
    """

    is_engine = True

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype
        self._version: int | None = None
        """The steps behind the weights with which it has drawn last; None before, and after an error."""

    @property
    def is_coarse(self) -> bool:
        return self.dtype in ("bfloat16", "float16")

    @property
    def metrics(self) -> Mapping[str, float]:
        return {} if self._version is None else {"sampler/weight_version": float(self._version)}
