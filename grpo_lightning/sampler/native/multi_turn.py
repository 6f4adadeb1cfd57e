"""Multi-turn completions: those that have ended a turn read a reply and go on."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.sampler.native.decode_batch import DecodeBatch
from grpo_lightning.sampler.text import Conversation

PREFILL_ABOVE = 32
"""Replies of more tokens are read in one pass, with all that is before them; shorter ones token by token, while others
sample theirs."""


class MultiTurnBatch(DecodeBatch):
    """A batch whose completions get replies whenever they have ended by themselves; arguments as in `DecodeBatch`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forced: Tensor = torch.full_like(self.ids, -1)
        self._reported: set[int] = set()
        """Those of `awaiting` whose turn the conversation knows."""

    def converse(self, conversation: Conversation, *, can_wait: bool) -> list[int]:
        """Report the turns that have ended since the last `sync`, and let completions that have a reply go on.

        Args:
            conversation: Takes turns and replies.
            can_wait: Whether others can begin before there are replies.

        Returns:
            The completions that are over.
        """
        for row in sorted(self.awaiting - self._reported):
            self._reported.add(row)
            conversation.step(row, self.token_ids([row])[0][self.turn_starts[row] :])
        if not self.awaiting or (conversation.is_slow and (self.running or can_wait)):
            return []
        self._reported.clear()
        return self._reply({row: conversation.reply(row) for row in sorted(self.awaiting)})

    def _reply(self, replies: Mapping[int, Sequence[int] | None]) -> list[int]:
        """Let completions that are `awaiting` go on.

        Args:
            replies: Completion -> the tokens that it reads before it samples again; None: it is over. One for which
                they leave no room is cut where it is.

        Returns:
            The completions that are over.
        """
        slot_of = {row: slot for slot, row in enumerate(self.rows) if row >= 0}
        over, short, long = [], list[int](), list[int]()
        for row, ids in replies.items():
            self.awaiting.remove(row)
            start = self.lengths[row]
            if ids is None or start + len(ids) >= self._sampling.max_new_tokens:
                self.finished[row] = ids is None
                self.rows[slot_of[row]] = -1
                over.append(row)
                continue
            self.turn_starts[row] = end = start + len(ids)
            self._forced[row, start:end] = torch.tensor(ids, device=self._forced.device)
            (long if self._cache.extends and len(ids) > PREFILL_ABOVE else short).append(slot_of[row])
        if short:
            self._read_token_by_token(short)
        if long:
            self._read_in_one_pass(long)
        return over

    def _read_in_one_pass(self, slots: Sequence[int]) -> None:
        rows = [self.rows[slot] for slot in slots]
        for row in rows:
            start, end = self.lengths[row], self.turn_starts[row]
            self.ids[row, start:end] = self._forced[row, start:end]
            self.lengths[row] = end
        self._enter(slots, rows, self._cache.extend(slots, rows, [self.token_ids([row])[0] for row in rows]))

    def _read_token_by_token(self, slots: Sequence[int]) -> None:
        rows = [self.rows[slot] for slot in slots]
        # What was sampled behind a turn's end is forgotten; its last token is read with the next step.
        self._cache.rewind(slots, [self.lengths[row] - 1 for row in rows])
        places, of_rows, counts = (
            torch.tensor(values, device=self._row.device)
            for values in (slots, rows, [self.lengths[row] for row in rows])
        )
        self._count[places], self._token[places] = counts, self.ids[of_rows, counts - 1]
        self._alive[places], self._finished[places] = True, False
