"""What both vLLM modes share: completions that are generated elsewhere, with a copy of the policy's weights.

P prompts, G completions of each, B = P * G rows with a prompt's rows adjacent, T tokens of the longest completion.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from grpo_lightning.sampler.base import Completions, OnFinished, Poll, Responder, Sampler
from grpo_lightning.sampler.support import engine_filters
from grpo_lightning.sampler.text import Conversation, OnIdsFinished, StopStrings, as_sampled, report_texts
from grpo_lightning.types import Prompt, Sampled, Sampling

if TYPE_CHECKING:
    from grpo_lightning.policy.base import Policy


class Request(NamedTuple):
    """One completion, or one turn of it, that an engine is to generate."""

    prompt: Sequence[int]
    """Token ids. Requests of a group have the same object."""
    seed: int
    """In [0, 2^63)."""
    max_tokens: int


class Completion(NamedTuple):
    """What an engine has generated for a request.

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
class RequestOptions:
    """How the completions of some requests are generated."""

    sampling: Sampling
    """How tokens are sampled."""
    end_ids: Sequence[int]
    """The token ids that end a completion."""
    stops: StopStrings | None = None
    """Which completions end with a stop string."""
    poll: Poll | None = None
    """Called between tokens, where the engine can; what it raises is passed on."""
    on_finished: OnIdsFinished | None = None
    """Called with the numbers and the token ids of completions that have finished."""

    def parameters(self, request: Request) -> dict[str, Any]:
        """VLLM's parameters of a request in both modes: only temperature and filters shape the distribution."""
        return {
            "temperature": self.sampling.temperature,
            **engine_filters(self.sampling),
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            "stop_token_ids": list(self.end_ids),
            "ignore_eos": True,  # the line above has all of them
            "logprobs": 0,  # of the sampled token
        }


@dataclass
class _Row:
    """A completion of which some turns are over."""

    prompt: Sequence[int]
    member: tuple[int, int]
    """The number of its prompt and its own in the group."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_reply: list[bool] = field(default_factory=list)
    turn_start: int = 0
    """The first token of its last turn."""
    num_turns: int = 0
    finished: bool = False

    def request(self, seed: int, max_new_tokens: int) -> Request:
        """Ask for its next turn, whose prompt is all of it so far."""
        turn = (self.num_turns,) if self.num_turns else ()
        prompt = [*self.prompt, *self.ids] if self.ids else self.prompt
        return Request(prompt, row_seed(seed, *self.member, *turn), max_new_tokens - len(self.ids))

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
        self.turn_start = len(self.ids)


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
    def complete(self, requests: Sequence[Request], options: RequestOptions) -> Sequence[Completion]:
        """A completion for each request, with the weights that were copied last."""

    def any_process(self, value: bool) -> bool:
        """Whether ``value`` is true in any process that has to call `complete` together with this one."""
        return value

    def generate(
        self,
        policy: "Policy",
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
                f"kv_cache_gib={sampling.kv_cache_gib} must be null with {self.key}: an engine has a cache of its own "
                "size"
            )
        tokens = policy.tokenize(prompts)
        policy.check_context(max(map(len, tokens)) + sampling.max_new_tokens, "rollout.max_new_tokens")
        conversation = None if responder is None else Conversation(responder, policy)
        options = RequestOptions(
            sampling=sampling,
            end_ids=policy.end_ids,
            stops=StopStrings(policy.tokenizer, sampling.stop) if sampling.stop else None,
            poll=poll,
            on_finished=None if responder else report_texts(policy.tokenizer, on_finished),
        )
        rows = [_Row(ids, (first_prompt + p, g)) for p, ids in enumerate(tokens) for g in range(group_size)]
        going = list(range(len(rows)))
        while self.any_process(bool(going)):  # one turn of all at a time
            requests = [rows[number].request(seed, sampling.max_new_tokens) for number in going]
            for number, turn in zip(going, self.complete(requests, options), strict=True):
                rows[number].add(turn)
            going = [] if conversation is None else _read_replies(rows, going, conversation, sampling.max_new_tokens)
        return as_sampled(policy, tokens, _as_tensors(rows, policy.pad_id, policy.device), conversation)


def _read_replies(rows: Sequence[_Row], numbers: Sequence[int], conversation: Conversation, limit: int) -> list[int]:
    """Report the turns that have ended, and append the replies; returns the numbers of the rows that go on."""
    awaiting = [number for number in numbers if rows[number].finished]
    for number in awaiting:
        conversation.step(number, rows[number].ids[rows[number].turn_start :])
    going = []
    for number in awaiting:
        row, reply = rows[number], conversation.reply(number)
        if reply is None:
            continue
        row.finished = len(row.ids) + len(reply) < limit  # otherwise it is cut where it is
        if row.finished:
            row.read(reply)
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
