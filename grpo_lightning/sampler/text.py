"""Completions as text while the sampler draws token ids: reports, stop strings, turns and replies."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_lightning.sampler.base import Decoded, OnFinished, OnRowsFinished, Responder
from grpo_lightning.types import Sampled, spans

if TYPE_CHECKING:
    from grpo_lightning.policy import Policy


def as_sampled(
    policy: "Policy", prompts: list[list[int]], drawn: Decoded, talk: "Conversation | None" = None
) -> Sampled:
    """Prompts [P] with their completions [B, T] as rows, decoded.

    Args:
        policy: Decodes.
        prompts: [P] the token ids of each.
        drawn: The completions.
        talk: Who has replied between the turns; None: single-turn.
    """
    group_size = len(drawn.ids) // len(prompts)
    ids, attention_mask = policy.pad_left(prompts)
    turns = None if talk is None else talk.turns(drawn.ids, drawn.mask)
    return Sampled(
        ids=torch.cat([ids.repeat_interleave(group_size, 0), drawn.ids], 1),  # [P, S] -> [B, S] -> [B, S + T]
        attention_mask=torch.cat([attention_mask.repeat_interleave(group_size, 0), drawn.seen], 1),
        mask=drawn.mask,
        logprobs=drawn.logprobs,
        entropy=drawn.entropies,
        texts=tuple(own[-1] for own in turns) if turns else decoded(policy.tokenizer, drawn.ids, drawn.mask),
        turns=turns,
        replies=talk.replies(turns) if talk and turns else None,
        finished=tuple(drawn.finished.tolist()),
        support=drawn.support,
    )


def decoded(tokenizer: Any, completions: Tensor, mask: Tensor) -> tuple[str, ...]:
    """Texts of completions [B, T] without special tokens."""
    rows = [ids[keep].tolist() for ids, keep in zip(completions.cpu(), mask.cpu(), strict=True)]
    return tuple(tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def reporter(tokenizer: Any, on_finished: OnFinished | None) -> OnRowsFinished | None:
    """``on_finished`` as `decode` calls it: with several rows at once, not decoded."""
    if on_finished is None:
        return None

    def report(rows: list[int], completions: Tensor, mask: Tensor) -> None:
        texts = decoded(tokenizer, completions, mask)
        for row, text, ids, is_real in zip(rows, texts, completions, mask, strict=True):
            on_finished(row, text, ids[is_real].tolist())

    return report


def one_by_one(tokenizer: Any, on_finished: OnFinished) -> Callable[[int, Sequence[int]], None]:
    """``on_finished`` as an engine calls it: with one row, not decoded."""

    def report(row: int, ids: Sequence[int]) -> None:
        text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        on_finished(row, text, list(ids))

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

    def __call__(self, ends: Sequence[Sequence[int]], news: Sequence[int]) -> list[int]:
        kept = [0] * len(ends)
        # All new tokens of a completion together first, and one by one only where a stop string is among them.
        for row, has_stop in enumerate(self._have(ends)):
            if has_stop:
                end, new = ends[row], news[row]
                places = range(len(end) - new + 1, len(end) + 1)
                each = self._have([end[max(0, place - self.tail) : place] for place in places])
                kept[row] = next((number for number, found in enumerate(each, 1) if found), 0)
        return kept

    def _have(self, tokens: Sequence[Sequence[int]]) -> list[bool]:
        texts = self._tokenizer.batch_decode(tokens, clean_up_tokenization_spaces=False)
        return [any(text in decoded for text in self._stop) for decoded in texts]


class Conversation:
    """Decodes what is said to a responder, and tokenizes what it replies.

    Args:
        responder: Replies.
        tokenizer: Decodes.
        reply_ids: ``Policy.reply_ids``.
    """

    def __init__(self, responder: Responder, tokenizer: Any, reply_ids: Callable[..., list[int]]) -> None:
        self._responder, self._tokenizer, self._reply_ids = responder, tokenizer, reply_ids
        self.waits = responder.is_slow
        self._last: dict[int, int] = {}
        """Completion -> the last token that it has said."""
        self._replies: dict[int, list[str]] = {}
        """Completion -> what it was told."""

    def said(self, row: int, ids: list[int]) -> None:
        """A completion has ended a turn."""
        self._last[row] = ids[-1]
        self._responder.step(row, self._decoded([ids])[0])

    def reply(self, row: int) -> list[int] | None:
        """The tokens that it reads next; None: it is over, or the tokenizer cannot express what it would be told."""
        text = self._responder.reply(row)
        if text is None:
            return None
        try:
            ids = self._reply_ids(text, after=self._last[row], role=self._responder.role)
        except ValueError as error:
            self._responder.reject(row, str(error))
            return None
        self._replies.setdefault(row, []).append(text)
        return ids

    def turns(self, completions: Tensor, mask: Tensor) -> tuple[tuple[str, ...], ...]:
        """What each completion [B, T] has said in each of its turns, its last included, given the model's tokens."""
        ids, rows = completions.tolist(), spans(mask)
        return tuple(
            tuple(self._decoded([own[start:end] for start, end in turns])) for own, turns in zip(ids, rows, strict=True)
        )

    def replies(self, turns: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
        """What each completion [B] was told between its turns."""
        # For one reply more there may have been no room.
        return tuple(tuple(self._replies.get(row, ())[: len(own) - 1]) for row, own in enumerate(turns))

    def _decoded(self, rows: Sequence[Sequence[int]]) -> list[str]:
        texts: list[str] = self._tokenizer.batch_decode(
            rows, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return texts
