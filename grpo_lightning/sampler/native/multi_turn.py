"""Completions of several turns: those that have ended one read a reply and go on."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.sampler.native.decode_batch import DecodeBatch
from grpo_lightning.sampler.text import Conversation

READ_TOGETHER = 32
"""Replies of more tokens are read in one pass, with all that is before them; shorter ones beside what others draw."""


class MultiTurnBatch(DecodeBatch):
    """Completions that are told something whenever they have ended of themselves; arguments as in `DecodeBatch`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given: Tensor = torch.full_like(self.ids, -1)
        self._told: set[int] = set()
        """Those of `asking` whose turn has been told."""

    def answer(self, talk: Conversation, *, can_wait: bool) -> list[int]:
        """Tell what has been said since the last look, and let completions that have a reply go on.

        Args:
            talk: Whom it is told, and who replies.
            can_wait: Whether others can begin before there are replies.

        Returns:
            The completions that are over.
        """
        for row in sorted(self.asking - self._told):
            self._told.add(row)
            talk.said(row, self.turn(row))
        if not self.asking or (talk.waits and (self.running or can_wait)):
            return []
        self._told.clear()
        return self.reply({row: talk.reply(row) for row in sorted(self.asking)})

    def turn(self, row: int) -> list[int]:
        """The tokens of a completion's last turn, as last looked at."""
        ids: list[int] = self.ids[row, self.turn_starts[row] : self.lengths[row]].tolist()
        return ids

    def reply(self, replies: Mapping[int, Sequence[int] | None]) -> list[int]:
        """Let completions that are `asking` go on.

        Args:
            replies: Completion -> the tokens that are said to it, which it reads before it draws again; None: it is
                over. One for which they leave no room is cut where it is.

        Returns:
            The completions that are over.
        """
        slot_of = {row: slot for slot, row in enumerate(self.held) if row is not None}
        over, slots, long = [], list[int](), list[int]()
        for row, ids in replies.items():
            self.asking.remove(row)
            start = self.lengths[row]
            if ids is None or start + len(ids) >= self._sampling.max_new_tokens:
                self.finished[row] = ids is None
                self.held[slot_of[row]] = None
                over.append(row)
                continue
            self.turn_starts[row] = end = start + len(ids)
            self._given[row, start:end] = torch.tensor(ids, device=self._given.device)
            (long if self._cache.extends and len(ids) > READ_TOGETHER else slots).append(slot_of[row])
        if slots:
            self._go_on(slots)
        if long:
            self._read_on(long)
        return over

    def _read_on(self, slots: Sequence[int]) -> None:
        """Take up completions where they have ended, with all of the reply at once, and draw their next tokens."""
        rows = [self.held[slot] or 0 for slot in slots]
        for row in rows:
            start, end = self.lengths[row], self.turn_starts[row]
            self.ids[row, start:end] = self._given[row, start:end]
            self.lengths[row] = end
        tokens = [self.ids[row, : self.lengths[row]].tolist() for row in rows]
        self._enter(slots, rows, self._cache.extend(slots, rows, tokens))

    def _go_on(self, slots: Sequence[int]) -> None:
        """Take up completions where they have ended."""
        rows = [self.held[slot] or 0 for slot in slots]
        # What was drawn behind a turn's end is forgotten; its last token is read with the next step.
        self._cache.rewind(slots, [self.lengths[row] - 1 for row in rows])
        places, of_rows, counts = (
            torch.tensor(values, device=self._row.device)
            for values in (slots, rows, [self.lengths[row] for row in rows])
        )
        self._count[places], self._token[places] = counts, self.ids[of_rows, counts - 1]
        self._alive[places], self._finished[places] = True, False
