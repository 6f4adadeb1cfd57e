"""Completions as text while a sampler generates token ids: reports, stop strings, turns and replies."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from grpo_lightning.sampler.base import Completions, OnFinished, Responder
from grpo_lightning.types import Sampled, spans

if TYPE_CHECKING:
    from grpo_lightning.policy.base import Policy

OnIdsFinished = Callable[[Sequence[int], Sequence[Sequence[int]]], None]
"""(rows that have just ended, the token ids of each)"""


def decode_texts(tokenizer: Any, rows: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Texts of token ids [n] without special tokens."""
    return tuple(tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def as_sampled(
    policy: "Policy", prompts: list[list[int]], completions: Completions, conversation: "Conversation | None" = None
) -> Sampled:
    """Prompts [P], as the token ids of each, and their completions [B, T] as decoded rows."""
    group_size = len(completions.ids) // len(prompts)
    ids, attention_mask = policy.pad_left(prompts)
    rows, mask = completions.ids.cpu(), completions.mask.cpu()
    turns = None if conversation is None else conversation.turns(rows.tolist(), spans(mask))
    if turns is None:
        texts = decode_texts(policy.tokenizer, [own[real].tolist() for own, real in zip(rows, mask, strict=True)])
    else:
        texts = tuple(own[-1] for own in turns)
    return Sampled(
        ids=torch.cat([ids.repeat_interleave(group_size, 0), completions.ids], 1),  # [P, S] -> [B, S] -> [B, S + T]
        attention_mask=torch.cat([attention_mask.repeat_interleave(group_size, 0), completions.seen], 1),
        mask=completions.mask,
        logprobs=completions.logprobs,
        entropy=completions.entropies,
        texts=texts,
        turns=turns,
        replies=conversation.replies(turns) if conversation and turns else None,
        finished=tuple(completions.finished.tolist()),
        support=completions.support,
    )


def report_texts(tokenizer: Any, on_finished: OnFinished | None) -> OnIdsFinished | None:
    """``on_finished`` as a sampler calls it: with several rows, not decoded."""
    if on_finished is None:
        return None

    def report(rows: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
        for row, text, own in zip(rows, decode_texts(tokenizer, ids), ids, strict=True):
            on_finished(row, text, list(own))

    return report


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
        self._last: dict[int, int] = {}
        """Row -> the last token of its last turn."""
        self._replies: dict[int, list[str]] = {}
        """Row -> the replies that it has read."""

    def step(self, row: int, ids: Sequence[int]) -> None:
        """A completion has ended a turn of these tokens; called once for each turn."""
        self._last[row] = ids[-1]
        self._responder.step(row, decode_texts(self._policy.tokenizer, [ids])[0])

    def reply(self, row: int) -> list[int] | None:
        """The tokens that it reads next; None: it is over, or the tokenizer cannot express the reply."""
        text = self._responder.reply(row)
        if text is None:
            return None
        try:
            ids = self._policy.reply_ids(text, after=self._last[row], role=self._responder.role)
        except ValueError as error:
            self._responder.reject(row, str(error))
            return None
        self._replies.setdefault(row, []).append(text)
        return ids

    def turns(
        self, rows: Sequence[Sequence[int]], bounds: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[tuple[str, ...], ...]:
        """The texts of all turns of each row of token ids [B], given where its turns begin and end."""
        return tuple(
            decode_texts(self._policy.tokenizer, [ids[start:end] for start, end in own])
            for ids, own in zip(rows, bounds, strict=True)
        )

    def replies(self, turns: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
        """The replies between the turns of each row [B]."""
        # For one reply more there may have been no room.
        return tuple(tuple(self._replies.get(row, ())[: len(own) - 1]) for row, own in enumerate(turns))
