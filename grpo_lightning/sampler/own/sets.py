"""The sets that tokens are drawn from where sampling is truncated, while completions are being drawn.

Shapes: N completions in all, T the most tokens of one; b of them are held now, in slots; n tokens, K the most tokens of
a set.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_lightning.types import SamplingSupport


class Sets:
    """Takes the sets of drawn tokens, and hands them out once all are drawn.

    Between two looks they are in a buffer of a fixed place, in which all have the same room; a look moves them to where
    each takes the room that it needs.

    Args:
        length: T
        draws: The most draws between two looks.
        device: Where the tokens are.
    """

    def __init__(self, length: int, draws: int, device: torch.device) -> None:
        self._length, self._draws = length, draws
        self.recent: Tensor | None = None
        """[b, draws, K] the sets of the tokens since the last look, with -1 in the room that they do not need."""
        self.num_recent = torch.empty(0, dtype=torch.long, device=device)
        """[b] how many tokens that are."""
        self._known: list[tuple[Tensor, SamplingSupport]] = []
        """The numbers [n] of tokens in a flattened [N, T], and their sets [n]."""

    def open(self, size: int) -> None:
        """Hold ``size`` other completions from now on."""
        self.recent, self.num_recent = None, self.num_recent.new_zeros(size)

    def keep(self, slots: Tensor) -> None:
        """Drop all slots but these."""
        self.num_recent = self.num_recent[slots]
        if self.recent is not None:
            self.recent = self.recent[slots]

    def add(self, at: Tensor | slice, ids: Tensor, alive: Tensor) -> None:
        """Take the sets of one more token of the completions in some slots [n].

        Args:
            at: The slots.
            ids: [n, K] the tokens of each set, -1 in the rest.
            alive: [n] (bool) which completions go on; the sets of the others are overwritten by the next ones.
        """
        if self.recent is None:
            # K is known with the first logits, long before a step is recorded.
            self.recent = ids.new_full((len(self.num_recent), self._draws, ids.shape[-1]), -1)
        slots, count = torch.arange(len(self.num_recent), device=ids.device)[at], self.num_recent[at]
        self.recent[slots, count] = ids
        self.num_recent[at] = count + alive

    def look(self, rows: Tensor, counts: Tensor) -> None:
        """Move what came since the last look out of the buffer, and wait for it.

        Args:
            rows: [b] the completion in each slot.
            counts: [b] its tokens so far.
        """
        if self.recent is None:
            return
        turn = torch.arange(self._draws, device=rows.device)
        is_new = turn < self.num_recent.unsqueeze(-1)  # [b, draws]
        first = rows * self._length + counts - self.num_recent
        recent = self.recent[is_new]  # [b, draws, K] -> [n, K]
        is_inside = recent >= 0
        support = SamplingSupport(is_inside.sum(-1, dtype=torch.int32), recent[is_inside])
        self._known.append(((first.unsqueeze(-1) + turn)[is_new], support))
        self.num_recent.zero_()

    def support(self, lengths: Sequence[int], given: Tensor | None = None) -> SamplingSupport | None:
        """The sets [N, longest] of all completions; None if there are none.

        Args:
            lengths: [N] their numbers of tokens.
            given: [N, T] the tokens that were not drawn, which have no sets, elsewhere -1; None: there are none.
        """
        if not self._known:
            return None
        numbers = torch.cat([part for part, _ in self._known])  # [n]
        sets = SamplingSupport.concatenate([part for _, part in self._known])
        rows, places = numbers // self._length, numbers % self._length
        ends = torch.tensor(lengths, device=numbers.device)
        # Behind a stop string there may be tokens that do not belong to the completion.
        belongs = places < ends[rows]
        if given is not None:
            belongs &= given.flatten()[numbers] < 0
        belongs = belongs.nonzero().flatten()
        order = belongs[numbers[belongs].argsort(stable=True)]
        # Where a reply took the places of such tokens, the last that came counts.
        is_last = torch.ones_like(order, dtype=torch.bool)
        is_last[:-1] = numbers[order][1:] != numbers[order][:-1]
        order = order[is_last]
        sizes = sets.sizes.new_zeros(len(lengths), max(lengths))
        sizes[rows[order], places[order]] = sets.sizes[order]
        return SamplingSupport(sizes, sets.of(order).ids)
