"""Sampler interface: samplers generate completions, policies score them.

P prompts, G completions of each, B = P * G rows with a prompt's rows adjacent, T tokens of the longest completion.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.types import Clock, Prompt, Sampled, Sampling, SamplingSupport, spans

if TYPE_CHECKING:
    from grpo_lightning.policy.base import Policy

OnFinished = Callable[[int, str, list[int]], None]
"""(row, text, token ids) of a completion that has just ended, while others are still being generated."""
OnIdsFinished = Callable[[Sequence[int], Sequence[Sequence[int]]], None]
"""(rows that have just ended, the token ids of each)"""
Poll = Callable[[], None]
"""Called between generated tokens; may raise to abandon the sampling."""


class Responder(Protocol):
    """Replies to the model in multi-turn completions, whose rows are numbered as in one call of `Sampler.generate`."""

    is_slow: bool
    """Whether replies take time: they are asked for only once no completion can go on."""
    role: str | None
    """Role of the replies, user or tool; None: ``policy.reply_role``."""

    def step(self, row: int, text: str) -> None:
        """Give the text of a turn that the model has ended."""
        ...

    def reply(self, row: int) -> str | None:
        """Return the reply to that turn; None ends the completion. Called once after every `step`."""
        ...

    def reject(self, row: int, problem: str) -> None:
        """Say that the policy cannot read the last reply, which ends the completion."""
        ...


class Sampler(ABC):
    """Generates completions with a policy's weights."""

    is_engine = False
    """Whether log-probabilities are computed elsewhere than by the policy."""
    is_coarse = False
    """Whether it rounds to 16 bits, whatever the policy does."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last step by name."""
        return {}

    def sync_weights(
        self, policy: "Policy", *, version: int, clock: Clock, ranks: Ranks
    ) -> AbstractContextManager[None]:
        """Context in which `generate` uses the weights that the policy has on entry; all processes enter together.

        Args:
            policy: Whose weights are used.
            version: Steps that these weights have behind them.
            clock: Adds up the seconds of handing weights over, as ``sync``, and of waking an engine, as ``wake``.
            ranks: The processes of the run.
        """
        return nullcontext()

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
        """``group_size`` completions of every prompt.

        Sampling is batch-invariant up to rounding: a completion depends on the weights, the seed, and the numbers of
        its prompt and of its place in the group.

        Args:
            policy: Tokenizes, and has the weights.
            prompts: [P]
            group_size: Completions per prompt, G.
            sampling: How tokens are sampled.
            seed: Of the random numbers, in [0, 2^64); no global random state is read or changed.
            first_prompt: Number of the first prompt here, among all that are sampled with this seed.
            poll: Called between tokens.
            on_finished: Called with every single-turn completion that ends before the length limit, as soon as it does.
            responder: Replies to completions that have ended a turn, which then go on behind the reply, until there is
                none or ``max_new_tokens`` are used up, replies included; a reply that leaves no room cuts the
                completion before it. None: single-turn.

        Raises:
            ValueError: A prompt has no tokens, or one that the model has no embedding for, or prompt and completion do
                not fit into the model's context.
            FloatingPointError: The logits are not finite.
        """
        tokens = policy.tokenize(prompts)
        report = partial(_report_texts, policy.tokenizer, on_finished)
        request = GenerationRequest(
            prompts=tokens,
            places=[(first_prompt + prompt, member) for prompt in range(len(tokens)) for member in range(group_size)],
            longest=max(map(len, tokens)) + sampling.max_new_tokens,
            sampling=sampling,
            seed=seed,
            end_ids=policy.end_ids,
            pad_id=policy.pad_id,
            stops=StopStrings(policy.tokenizer, sampling.stop) if sampling.stop else None,
            poll=poll,
            on_finished=report if on_finished and not responder else None,
            conversation=None if responder is None else Conversation(responder, policy),
        )
        policy.check_context(request.longest, "rollout.max_new_tokens")
        completions = self.sample(policy, request)
        if problem := completions.problem(request, policy.num_embeddings, has_support=not self.is_engine):
            raise ValueError(f"sampler: {type(self).__name__}.sample returned {problem}")
        return completions.sampled(policy, tokens, request.conversation)

    @abstractmethod
    def sample(self, policy: "Policy", request: "GenerationRequest") -> "Completions":
        """The completions that `generate` is asked for."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What `Sampler.generate` is asked for, as token ids."""

    prompts: list[list[int]]  # [P]
    places: Sequence[tuple[int, int]]
    """[B] the number of every completion's prompt among all of this seed, and its own number in the group."""
    longest: int  # most tokens of a prompt and its completion
    sampling: Sampling
    seed: int
    end_ids: Sequence[int]  # of tokens that end a completion; the first of them still belongs to it
    pad_id: int  # of the token that fills ended completions
    stops: "StopStrings | None" = None  # which completions end with a stop string
    poll: Poll | None = None  # called between tokens; what it raises is passed on
    on_finished: OnIdsFinished | None = None  # called with the completions that have just ended by themselves
    conversation: "Conversation | None" = None
    """Replies to completions that have ended a turn, which then go on; None: they are over."""


@dataclass(frozen=True)
class Completions:
    """Completions as token ids."""

    ids: Tensor  # [B, T]
    mask: Tensor  # [B, T] (bool) tokens that the model has generated
    seen: Tensor  # [B, T] (bool) these and the replies that it has read
    logprobs: Tensor  # [B, T] in nats, 0 where masked
    entropies: Tensor  # [B, T] in nats, 0 where masked
    finished: Tensor  # [B] (bool) whether a completion ended by itself, not by the length limit
    support: SamplingSupport | None = None
    """[B, T] the sets that the tokens were sampled from; None: the whole vocabulary."""

    def problem(self, request: GenerationRequest, num_embeddings: int | None, *, has_support: bool) -> str | None:
        """What is not as requested, but for log-probabilities, which the self check recomputes; None if nothing is."""
        rows, sampling, shape = len(request.places), request.sampling, tuple(self.ids.shape)
        if len(shape) != 2 or shape[0] != rows or not 0 < shape[1] <= sampling.max_new_tokens:
            return f"ids of shape {shape}: needs {rows} rows of 1 to rollout.max_new_tokens={sampling.max_new_tokens}"
        least, most = int(self.ids.min()), int(self.ids.max())
        if least < 0 or (num_embeddings is not None and most >= num_embeddings):
            return f"the token {least if least < 0 else most}: the model has {num_embeddings} embeddings"
        if has_support and sampling.truncated and sampling.temperature > 0 and self.support is None:
            return (
                "support=None with rollout.top_p, top_k or min_p: return the sets, or set is_engine = True in the class"
            )
        turns = range(rows) if request.conversation is None else request.conversation.last_tokens
        if silent := [row for row, is_over in enumerate(self.finished.tolist()) if is_over and row not in turns]:
            return f"completion {silent[0]} as finished, without a call of request.conversation.step({silent[0]}, ids)"
        return None

    def sampled(
        self, policy: "Policy", prompts: list[list[int]], conversation: "Conversation | None" = None
    ) -> Sampled:
        """Rows with their prompts [P], given as token ids, and decoded texts."""
        group_size = len(self.ids) // len(prompts)
        ids, attention_mask = (each.repeat_interleave(group_size, 0) for each in policy.pad_left(prompts))
        rows, mask = self.ids.cpu(), self.mask.cpu()
        if conversation is None:
            turns = None
            texts = decode_texts(policy.tokenizer, [row[real].tolist() for row, real in zip(rows, mask, strict=True)])
        else:
            bounds = zip(rows.tolist(), spans(mask), strict=True)
            turns = tuple(decode_texts(policy.tokenizer, [row[a:b] for a, b in own]) for row, own in bounds)
            texts = tuple(row[-1] for row in turns)
        return Sampled(
            ids=torch.cat([ids, self.ids], 1),  # [B, S] and [B, T] -> [B, S + T]
            attention_mask=torch.cat([attention_mask, self.seen], 1),
            mask=self.mask,
            logprobs=self.logprobs,
            entropy=self.entropies,
            texts=texts,
            turns=turns,
            replies=conversation.replies_between(turns) if conversation and turns else None,
            finished=tuple(self.finished.tolist()),
            support=self.support,
        )


def decode_texts(tokenizer: Any, rows: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Texts of token ids [n] without special tokens."""
    return tuple(tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _report_texts(tokenizer: Any, on_finished: Any, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
    """Call ``on_finished`` for each of the rows that a sampler has reported, with its text."""
    for row, text, own in zip(rows, decode_texts(tokenizer, ids), ids, strict=True):
        on_finished(row, text, list(own))


class StopStrings:
    """Which completions contain a stop string in the last of their tokens.

    Args:
        tokenizer: Decodes the tokens.
        stop: The texts that end a completion, at least one.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        # A token is at least one byte of text, so this many tokens hold every stop string that just ended.
        self.tail = max(len(text.encode()) for text in stop) + 1
        """How many tokens, the new one included, are needed to judge a new one."""

    def __call__(self, ends: Sequence[Sequence[int]], news: Sequence[int]) -> list[int]:
        """How many of the new tokens of each completion belong to it, 0 where no stop string ends it.

        Args:
            ends: [n] the last tokens of each completion, ``tail`` for each of the new ones or all there are.
            news: [n] how many of them are new.
        """
        belong = [0] * len(ends)
        # All new tokens of a completion together first, and one by one only where a stop string is among them.
        for row, has_stop in enumerate(self._contain(ends)):
            if has_stop:
                end, new = ends[row], news[row]
                places = range(len(end) - new + 1, len(end) + 1)
                stopped = self._contain([end[max(0, place - self.tail) : place] for place in places])
                belong[row] = stopped.index(True) + 1 if True in stopped else 0
        return belong

    def _contain(self, tokens: Sequence[Sequence[int]]) -> list[bool]:
        texts = self._tokenizer.batch_decode(tokens, clean_up_tokenization_spaces=False)
        return [any(text in decoded for text in self._stop) for decoded in texts]


class Conversation:
    """Decodes the turns of completions for a responder, and tokenizes its replies.

    Args:
        responder: Replies.
        policy: Has the tokenizer and the chat template.
    """

    def __init__(self, responder: Responder, policy: "Policy") -> None:
        self._responder, self._policy = responder, policy
        self.is_slow = responder.is_slow
        """Whether replies take time: they are asked for only once no completion can go on. When that is depends on the
        tokens alone, so that a rollout is the same however long the replies take."""
        self.last_tokens: dict[int, int] = {}  # Row -> the last token of its last turn
        self._replies: dict[int, list[str]] = {}  # Row -> the replies that it has read

    def step(self, row: int, ids: Sequence[int]) -> None:
        """A completion has ended a turn of these tokens; called once for each turn."""
        self.last_tokens[row] = ids[-1]
        self._responder.step(row, decode_texts(self._policy.tokenizer, [ids])[0])

    def reply(self, row: int) -> list[int] | None:
        """The tokens that it reads next; None: it is over, or the tokenizer cannot express the reply."""
        text = self._responder.reply(row)
        if text is None:
            return None
        try:
            ids = self._policy.reply_ids(text, after=self.last_tokens[row], role=self._responder.role)
        except ValueError as error:
            self._responder.reject(row, str(error))
            return None
        self._replies.setdefault(row, []).append(text)
        return ids

    def replies_between(self, turns: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
        """The replies between the turns of each row [B]."""
        # For one reply more there may have been no room.
        return tuple(tuple(self._replies.get(row, ())[: len(own) - 1]) for row, own in enumerate(turns))
