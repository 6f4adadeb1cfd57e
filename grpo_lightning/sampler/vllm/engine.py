"""What both vLLM modes share: completions that are generated elsewhere, with a copy of the policy's weights.

P prompts, G completions of each, B = P * G rows with a prompt's rows adjacent, T tokens of the longest completion.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_lightning.sampler.base import Decoded, OnFinished, Poll, Responder, Sampler
from grpo_lightning.sampler.text import Conversation, StopStrings, as_sampled, one_by_one
from grpo_lightning.types import Prompt, Sampled, Sampling


@dataclass(frozen=True)
class Completion:
    """One completion, or one turn of it, as an engine has generated it.

    Example:
        ``Completion([7, 2], [-0.3, -0.1], finished=True)`` with 2 the end of sequence.
    """

    ids: Sequence[int]
    """[T] token ids, the one that ends it included."""
    logprobs: Sequence[float]
    """[T] in nats, under logits / temperature, within the sampling support where sampling is truncated."""
    finished: bool
    """Whether it ended by an end token or a stop string."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """The completions that an engine is to generate.

    Example:
        Two completions of the prompt 5 6: ``GenerationRequest(prompts=[[5, 6]], seeds=[[7, 8]], max_new_tokens=[9],
        sampling=sampling, end_ids=[2])``.
    """

    prompts: Sequence[Sequence[int]]
    """[P] the token ids of each."""
    seeds: Sequence[Sequence[int]]
    """[P] those of each one's completions."""
    max_new_tokens: Sequence[int]
    """[P] the most tokens of a completion."""
    sampling: Sampling
    """How tokens are drawn."""
    end_ids: Sequence[int]
    """The token ids that end a completion."""
    stops: StopStrings | None = None
    """Which completions end with a stop string."""
    poll: Poll | None = None
    """Called between tokens, where the engine can; what it raises is passed on."""
    on_finished: Callable[[int, Sequence[int]], None] | None = None
    """Called with the row and the token ids of a completion that has finished."""

    @property
    def rows(self) -> list[tuple[Sequence[int], int, int]]:
        """[B] token ids of the prompt, seed and most tokens of every completion."""
        return [
            (ids, seed, most)
            for ids, seeds, most in zip(self.prompts, self.seeds, self.max_new_tokens, strict=True)
            for seed in seeds
        ]


class WeightSource(Protocol):
    """What an engine needs of a policy to copy its weights."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight with its name in the model's files, adapters merged, whole where weights are sharded.

        A tied one comes under each of its names.
        """
        ...

    def write_config(self, directory: Path) -> torch.dtype:
        """Write the model's configuration, with an untied head; returns the type in which it computes."""
        ...


@dataclass
class _Row:
    """A completion of which some turns are over."""

    prompt: Sequence[int]
    member: tuple[int, int]
    """The number of its prompt and its own in the group."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_reply: list[bool] = field(default_factory=list)
    num_turns: int = 0
    finished: bool = False

    def add(self, turn: Completion) -> None:
        """Append what the model has generated."""
        self.ids += turn.ids
        self.logprobs += turn.logprobs
        self.is_reply += [False] * len(turn.ids)
        self.num_turns += 1
        self.finished = turn.finished

    def read(self, reply: Sequence[int]) -> None:
        """Append a reply."""
        self.ids += reply
        self.logprobs += [0.0] * len(reply)
        self.is_reply += [True] * len(reply)


class EngineSampler(Sampler):
    """Generates with an engine that has a copy of the policy's weights.

    A multi-turn completion is one request per turn, whose prompt is all of it so far as token ids: the engine's prefix
    cache has the keys and values of what came before.

    Args:
        dtype: Of the weights: float32, bfloat16 or float16; None: the type in which the policy computes.
    """

    is_engine = True
    key: str
    """The setting that chooses it, for messages."""

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype
        self._version: int | None = None
        """The steps behind the weights with which it has generated last; None before, and after an error."""

    @property
    def is_coarse(self) -> bool:  # type: ignore[override]
        return self.dtype in ("bfloat16", "float16")

    @property
    def metrics(self) -> Mapping[str, float]:
        return {} if self._version is None else {"sampler/weight_version": float(self._version)}

    @abstractmethod
    def draw(self, request: GenerationRequest) -> Sequence[Completion]:
        """[B] completions, with the weights that were copied last."""

    def any_process(self, value: bool) -> bool:
        """Whether ``value`` is true in any process that has to call `draw` together with this one."""
        return value

    def generate(
        self,
        policy: Any,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        first_prompt: int = 0,
        poll: Poll | None = None,
        on_finished: OnFinished | None = None,
        responder: Responder | None = None,
    ) -> Sampled:
        if sampling.kv_cache_gib is not None:
            raise ValueError(
                f"kv_cache_gib={sampling.kv_cache_gib}: with {self.key} it must be null; an engine has a cache of its "
                "own size"
            )
        tokens = policy.tokenize(prompts)
        policy.check_context(max(map(len, tokens)) + sampling.max_new_tokens, "rollout.max_new_tokens")
        request = GenerationRequest(
            prompts=tokens,
            seeds=[[row_seed(seed, first_prompt + p, g) for g in range(group_size)] for p in range(len(tokens))],
            max_new_tokens=[sampling.max_new_tokens] * len(tokens),
            sampling=sampling,
            end_ids=policy.end_ids,
            stops=StopStrings(policy.tokenizer, sampling.stop) if sampling.stop else None,
            poll=poll,
            on_finished=None if on_finished is None else one_by_one(policy.tokenizer, on_finished),
        )
        rows = [_Row(ids, (first_prompt + p, g)) for p, ids in enumerate(tokens) for g in range(group_size)]
        for row, turn in zip(rows, self.draw(request), strict=True):
            row.add(turn)
        talk = None if responder is None else Conversation(responder, policy.tokenizer, policy.reply_ids)
        if talk is not None:
            self._converse(rows, talk, replace(request, on_finished=None), seed)
        return as_sampled(policy, tokens, _decoded(rows, pad_id=policy.pad_id, device=policy.device), talk)

    def _converse(self, rows: Sequence[_Row], talk: Conversation, request: GenerationRequest, seed: int) -> None:
        """Generate the further turns of completions that have a reply, one turn of all at a time."""
        limit = request.sampling.max_new_tokens
        first = dict.fromkeys(range(len(rows)), 0)
        """Row -> where its last turn begins, for those that go on."""
        while True:
            asking = [number for number in first if rows[number].finished]
            for number in asking:
                talk.said(number, rows[number].ids[first[number] :])
            first = {}
            for number in asking:
                row, reply = rows[number], talk.reply(number)
                if reply is None:
                    continue
                row.finished = len(row.ids) + len(reply) < limit  # otherwise it is cut where it is
                if row.finished:
                    row.read(reply)
                    first[number] = len(row.ids)
            if not self.any_process(bool(first)):
                return
            turns = self.draw(
                replace(
                    request,
                    prompts=[[*rows[number].prompt, *rows[number].ids] for number in first],
                    seeds=[[row_seed(seed, *rows[number].member, rows[number].num_turns)] for number in first],
                    max_new_tokens=[limit - len(rows[number].ids) for number in first],
                )
            )
            for number, turn in zip(first, turns, strict=True):
                rows[number].add(turn)


def row_seed(seed: int, *place: int) -> int:
    """A seed in [0, 2^63) of one request.

    Args:
        seed: Of all that is sampled together.
        place: The number of the prompt, that of the completion in its group, and that of the turn unless it is 0.
    """
    key = repr((seed, *place)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1


def _decoded(rows: Sequence[_Row], *, pad_id: int, device: torch.device) -> Decoded:
    """Completions [B] as tensors [B, T].

    Engines return no entropies. In their place is -log p of the token that was drawn, whose expectation is the entropy.
    """
    length = max(len(row.ids) for row in rows)

    def filled(values: Sequence[Sequence[float]], value: float) -> list[list[float]]:
        return [[*row, *[value] * (length - len(row))] for row in values]

    logprobs = torch.tensor(filled([row.logprobs for row in rows], 0.0), device=device)
    seen = torch.tensor(filled([[True] * len(row.ids) for row in rows], False), dtype=torch.bool, device=device)
    is_reply = torch.tensor(filled([row.is_reply for row in rows], False), dtype=torch.bool, device=device)
    return Decoded(
        ids=torch.tensor(filled([row.ids for row in rows], pad_id), dtype=torch.long, device=device),
        mask=seen & ~is_reply,
        seen=seen,
        logprobs=logprobs,
        entropies=-logprobs,
        finished=torch.tensor([row.finished for row in rows], device=device),
    )
