"""Base of both vLLM samplers: an engine generates completions with a copy of the policy's weights.

P prompts, G completions of each, B = P * G rows with a prompt's rows adjacent, T tokens of the longest completion.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from grpo_lightning.sampler import Completions, Conversation, GenerationRequest, Sampler
from grpo_lightning.sampler.token_sampling import engine_filters

if TYPE_CHECKING:
    from grpo_lightning.policy.base import Policy


class Request(NamedTuple):
    """One completion, or one turn of it, that an engine is to generate."""

    prompt: Sequence[int]
    """Token ids. Requests of a group have the same object."""
    seed: int
    """In [0, 2^63)."""
    max_tokens: int


@dataclass
class Completion:
    """What an engine has generated for a request.

    Example:
        ``Completion([7, 2], [-0.3, -0.1], finished=True)`` with 2 the end of sequence.
    """

    ids: list[int] = field(default_factory=list)
    """[T] token ids, the one that ends it included."""
    logprobs: list[float] = field(default_factory=list)
    """[T] in nats, under logits / temperature, within the sampling support where sampling is truncated."""
    finished: bool = False
    """Whether it ended by an end token or a stop string."""


def request_parameters(request: Request, asked: GenerationRequest) -> dict[str, Any]:
    """VLLM's parameters of a request in both modes: only temperature and filters shape the distribution."""
    return {
        "temperature": asked.sampling.temperature,
        **engine_filters(asked.sampling),
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "stop_token_ids": list(asked.end_ids),
        "ignore_eos": True,  # the line above has all of them
        "logprobs": 0,  # of the sampled token
    }


@dataclass
class _Row(Completion):
    """A completion of which some turns are over."""

    prompt: Sequence[int] = ()
    place: tuple[int, int] = (0, 0)
    """The number of its prompt and its own in the group."""
    is_reply: list[bool] = field(default_factory=list)
    turn_start: int = 0
    """The first token of its last turn."""
    num_turns: int = 0

    def request(self, seed: int, max_new_tokens: int) -> Request:
        """Ask for its next turn, whose prompt is all of it so far."""
        turn = (self.num_turns,) if self.num_turns else ()
        prompt = [*self.prompt, *self.ids] if self.ids else self.prompt
        return Request(prompt, row_seed(seed, *self.place, *turn), max_new_tokens - len(self.ids))

    def add(self, ids: Sequence[int], logprobs: Sequence[float], *, is_reply: bool) -> None:
        """Append what the model has generated, or a reply."""
        self.ids += ids
        self.logprobs += logprobs
        self.is_reply += [is_reply] * len(ids)


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
    def complete(self, requests: Sequence[Request], asked: GenerationRequest) -> Sequence[Completion]:
        """A completion for each request, sampled as it is asked for, with the weights that were copied last."""

    def sample(self, policy: "Policy", request: GenerationRequest) -> Completions:
        limit, size = request.sampling.max_new_tokens, len(request.places) // len(request.prompts)
        if (gib := request.sampling.kv_cache_gib) is not None:
            raise ValueError(f"kv_cache_gib={gib} must be null with {self.key}: an engine has a cache of its own size")
        rows = [_Row(prompt=request.prompts[row // size], place=place) for row, place in enumerate(request.places)]
        going = list(range(len(rows)))
        while going:  # one turn of all at a time
            completions = self.complete([rows[number].request(request.seed, limit) for number in going], request)
            for row, turn in zip((rows[number] for number in going), completions, strict=True):
                row.add(turn.ids, turn.logprobs, is_reply=False)
                row.num_turns, row.finished = row.num_turns + 1, turn.finished
            going = _read_replies(rows, going, request.conversation, limit) if request.conversation else []
        return _as_tensors(rows, request.pad_id, policy.device)


def _read_replies(rows: Sequence[_Row], numbers: Sequence[int], conversation: Conversation, limit: int) -> list[int]:
    """Report the turns that have ended, and append the replies; returns the numbers of the rows that go on."""
    awaiting, going = [number for number in numbers if rows[number].finished], []
    for number in awaiting:
        conversation.step(number, rows[number].ids[rows[number].turn_start :])
    for number in awaiting:
        row, reply = rows[number], conversation.reply(number)
        if reply is None:
            continue
        row.finished = len(row.ids) + len(reply) < limit  # otherwise it is cut where it is
        if row.finished:
            row.add(reply, [0.0] * len(reply), is_reply=True)
            row.turn_start = len(row.ids)
            going.append(number)
    return going


def row_seed(seed: int, *place: int) -> int:
    """A seed in [0, 2^63) of one request.

    Args:
        seed: Of all that is sampled together.
        place: The number of the prompt, that of the completion in its group, and that of the turn unless it is 0.
    """
    key = repr((seed, *place)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1


def _as_tensors(rows: Sequence[_Row], pad_id: int, device: torch.device) -> Completions:
    """Completions [B] as tensors [B, T].

    Engines return no entropies. In their place is -log p of the sampled token, whose expectation is the entropy.
    """
    length = max(len(row.ids) for row in rows)

    def padded(values: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*row, *[value] * (length - len(row))] for row in values], dtype=dtype, device=device)

    logprobs = padded([row.logprobs for row in rows], 0.0, torch.float32)
    return Completions(
        ids=padded([row.ids for row in rows], pad_id, torch.long),
        mask=padded([[not reply for reply in row.is_reply] for row in rows], False, torch.bool),
        seen=padded([[True] * len(row.ids) for row in rows], False, torch.bool),
        logprobs=logprobs,
        entropies=-logprobs,
        finished=torch.tensor([row.finished for row in rows], device=device),
    )
