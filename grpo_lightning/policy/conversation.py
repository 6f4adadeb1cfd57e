"""Completions of several turns as the sampler sees them: turns and replies as token ids."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from grpo_lightning.batch.turns import spans
from grpo_lightning.policy.partner import Partner


class Conversation:
    """Decodes what is said to a partner, and tokenizes what it replies.

    Args:
        partner: Replies.
        tokenizer: Decodes.
        reply_ids: ``TextPolicy.reply_ids``.
    """

    def __init__(self, partner: Partner, tokenizer: Any, reply_ids: Callable[..., list[int]]) -> None:
        self._partner, self._tokenizer, self._reply_ids = partner, tokenizer, reply_ids
        self.waits = partner.waits
        self._last: dict[int, int] = {}
        """Completion -> the last token that it has said."""
        self._replies: dict[int, list[str]] = {}
        """Completion -> what it was told."""

    def said(self, row: int, ids: list[int]) -> None:
        """A completion has ended a turn."""
        self._last[row] = ids[-1]
        self._partner.said(row, self._decoded([ids])[0])

    def reply(self, row: int) -> list[int] | None:
        """The tokens that it reads next; None: it is over, or the tokenizer cannot express what it would be told."""
        text = self._partner.reply(row)
        if text is None:
            return None
        try:
            ids = self._reply_ids(text, after=self._last[row], role=self._partner.role)
        except ValueError as error:
            self._partner.unread(row, str(error))
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
