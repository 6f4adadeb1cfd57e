"""The completions that are being drawn, as tensors, and the step that gives each of them one more token.

Shapes: N completions in all, T the most tokens of one; b of them are held by the cache now, in slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_lightning.sampler.native.kv_cache import KVCache
from grpo_lightning.sampler.native.token_sampling import NonFiniteLogits, sample_tokens
from grpo_lightning.sampler.text import StopStrings
from grpo_lightning.types import Sampling, SamplingSupport


class DecodeBatch:
    """All completions, and where those stand that are being drawn.

    Between two calls of anything but `step` no tensor changes its shape or its place in memory, and nothing in `step`
    looks at a value, as far as that holds for the cache.

    Args:
        cache: The model.
        uniforms: [N, T] the random numbers that decide the tokens.
        sampling: How tokens are drawn.
        end_ids: The token ids that end a completion; the first of them still belongs to it.
        draws: The most tokens of a completion that are drawn between two looks.
    """

    def __init__(
        self,
        cache: KVCache,
        uniforms: Tensor,
        *,
        sampling: Sampling,
        end_ids: Sequence[int],
        draws: int,
    ) -> None:
        self._cache, self._uniforms, self._sampling = cache, uniforms, sampling
        device = uniforms.device
        # One column more, for what completions that have ended go on to draw.
        shape = len(uniforms), sampling.max_new_tokens + 1
        self.ids = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs, self.entropies = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        self._given: Tensor | None = None
        """[N, T + 1] the tokens that are read in their places and not drawn, -1 elsewhere; None: there are none."""
        self._ends = torch.tensor(sorted(end_ids), dtype=torch.long, device=device)
        self.sets = SupportBuffer(shape[1], draws, device)
        self._row = torch.empty(0, dtype=torch.long, device=device)
        """[b] the completion in each slot."""
        self._count = torch.empty_like(self._row)
        """[b] its tokens so far."""
        self._token = torch.empty_like(self._row)
        """[b] the last of them."""
        self._alive = torch.empty(0, dtype=torch.bool, device=device)
        """[b] whether more of it is wanted."""
        self._finished = torch.empty_like(self._alive)
        """[b] whether it has ended of itself."""
        self._sound = torch.empty_like(self._alive)
        """[b] whether all its logits were finite."""
        self.held: list[int | None] = []
        """[b] what `_row` says, None for a completion that is known to be over."""
        self.lengths = [0] * len(uniforms)
        """[N] tokens of every completion, as last looked at."""
        self.finished = [False] * len(uniforms)
        """[N] which completions have ended of themselves, as last looked at."""
        self.asking: set[int] = set()
        """The completions that have ended a turn and wait for a reply."""
        self.turn_starts = [0] * len(uniforms)
        """[N] the first token of the last turn of every completion."""

    @property
    def running(self) -> list[int]:
        """The slots whose completions go on, as last looked at."""
        return [slot for slot, row in enumerate(self.held) if row is not None and row not in self.asking]

    @property
    def taken(self) -> list[int]:
        """The slots whose completions are not over, as last looked at."""
        return [slot for slot, row in enumerate(self.held) if row is not None]

    @property
    def free(self) -> list[int]:
        """The slots without a completion."""
        return [slot for slot, row in enumerate(self.held) if row is None]

    def open(self, rows: Sequence[int]) -> None:
        """Hold these completions [b] and no others, and draw their next tokens."""
        size = len(rows)
        self._row, self._count, self._token = (self._row.new_zeros(size) for _ in range(3))
        self._alive, self._finished, self._sound = (self._alive.new_zeros(size) for _ in range(3))
        self.sets.open(size)
        self.held = [None] * size
        self._enter(range(size), rows, self._cache.open(rows))

    def fill(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Hold completions [n] in the place of others, and draw their next tokens."""
        self._enter(slots, rows, self._cache.fill(slots, rows))

    def keep(self, slots: Sequence[int]) -> None:
        """Drop all completions but those in these slots, given in rising order."""
        self._cache.keep(slots)
        chosen = torch.tensor(slots, device=self._row.device)
        self._row, self._count, self._token = self._row[chosen], self._count[chosen], self._token[chosen]
        self._alive, self._finished = self._alive[chosen], self._finished[chosen]
        self._sound = self._sound[chosen]
        self.sets.keep(chosen)
        self.held = [self.held[slot] for slot in slots]

    def step(self) -> None:
        """Draw one more token of every completion, for which the cache must have room."""
        self._draw(slice(None), self._cache.step(self._token))

    def look(self, stops: StopStrings | None) -> list[int]:
        """Wait for the results so far.

        Args:
            stops: Which completions end for another reason than an end token.

        Returns:
            The completions that are over since the last look.

        Raises:
            NonFiniteLogits: A logit of one that was running was not finite.
        """
        # One transfer for all.
        alive, finished, counts, sound = torch.stack(
            [self._alive.long(), self._finished.long(), self._count, self._sound.long()]
        ).tolist()
        if not all(sound):
            raise NonFiniteLogits("the policy's logits are not finite")
        self.sets.look(self._row, self._count)
        running = self.running
        # While a reply is read there is nothing new.
        speaking = [slot for slot in running if counts[slot] > self.turn_starts[self.held[slot] or 0]]
        if stops and speaking:
            starts = [self.turn_starts[self.held[slot] or 0] for slot in speaking]
            before = [
                max(self.lengths[self.held[slot] or 0], start) for slot, start in zip(speaking, starts, strict=True)
            ]
            news = [counts[slot] - known for slot, known in zip(speaking, before, strict=True)]
            ends = self._ends_of(speaking, [counts[slot] for slot in speaking], starts, stops.tail + max(news) - 1)
            for slot, known, kept in zip(speaking, before, stops(ends, news), strict=True):
                if kept:
                    alive[slot], finished[slot], counts[slot] = 0, 1, known + kept
                    self._alive[slot] = False
        over = []
        for slot in running:
            row = self.held[slot] or 0
            self.lengths[row], self.finished[row] = counts[slot], bool(finished[slot])
            if not alive[slot] and self._given is not None and self.finished[row]:
                self.asking.add(row)
            elif not alive[slot]:
                over.append(row)
                self.held[slot] = None
        return over

    def drawn(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The ids [n, t] of completions, replies included, and which of them count [n, t]."""
        lengths = torch.tensor([self.lengths[row] for row in rows], device=self._row.device).unsqueeze(-1)
        longest = max(self.lengths[row] for row in rows)
        mask = torch.arange(longest, device=self._row.device) < lengths
        return self.ids[list(rows), :longest], mask

    def replied(self, length: int) -> Tensor | None:
        """Which of the first ``length`` tokens [N, length] belong to replies; None where there never are any."""
        return None if self._given is None else self._given[:, :length] >= 0

    def support(self) -> SamplingSupport | None:
        """The sets [N, longest] of all completions; None where no sampling was truncated."""
        return self.sets.support(self.lengths, self._given)

    def _ends_of(
        self, slots: Sequence[int], counts: Sequence[int], starts: Sequence[int], length: int
    ) -> list[list[int]]:
        """The last ``length`` tokens of the last turns in some slots, or all of these where there are fewer."""
        device = self._row.device
        rows = self._row[torch.tensor(slots, device=device)].unsqueeze(-1)  # [n, 1]
        places = torch.tensor(counts, device=device).unsqueeze(-1) + torch.arange(-length, 0, device=device)
        tokens: list[list[int]] = self.ids[rows, places.clamp(min=0)].tolist()  # [n, length]
        return [
            row[max(0, length - (count - start)) :] for row, count, start in zip(tokens, counts, starts, strict=True)
        ]

    def _enter(self, slots: Sequence[int], rows: Sequence[int], logits: Tensor) -> None:
        device = self._row.device
        for slot, row in zip(slots, rows, strict=True):
            self.held[slot] = row
        places = torch.tensor(list(slots), device=device)
        self._row[places] = torch.tensor(list(rows), device=device)
        self._count[places] = torch.tensor([self.lengths[row] for row in rows], device=device)
        self._alive[places], self._finished[places], self._sound[places] = True, False, True
        self._draw(places, logits)

    def _draw(self, at: Tensor | slice, logits: Tensor) -> None:
        """Draw the next tokens of the completions in some slots [n] from their logits [n, V]."""
        row, count, alive = self._row[at], self._count[at], self._alive[at]
        limit = self._sampling.max_new_tokens
        uniform = self._uniforms[row, count.clamp(max=limit - 1)]
        token, logprob, entropy, is_sound, kept = sample_tokens(logits, self._sampling, uniform)
        # Not torch.isin, which of many end tokens makes a sorted list, whose length a GPU would have to be asked for.
        is_end = (token.unsqueeze(-1) == self._ends).any(-1)
        if self._given is not None:
            given = self._given[row, count]
            is_drawn = given < 0
            is_end = is_end & is_drawn
            token, logprob, entropy = (
                value.where(is_drawn, other) for value, other in ((token, given), (logprob, 0.0), (entropy, 0.0))
            )
            kept = None if kept is None else kept.where(is_drawn.unsqueeze(-1), -1)
        # What a completion draws after its end is written behind it, again and again, and not kept.
        self.ids[row, count] = token
        self.logprobs[row, count] = logprob
        self.entropies[row, count] = entropy
        if kept is not None:
            self.sets.add(at, kept, alive)
        finished = self._finished[at] | (alive & is_end)
        # A slice is a view, so everything is computed before anything is written.
        goes_on, drawn, sound = (
            alive & ~finished & (count + 1 < limit),
            count + alive,
            self._sound[at] & (is_sound | ~alive),
        )
        for state, value in (
            (self._alive, goes_on),
            (self._count, drawn),
            (self._token, token),
            (self._finished, finished),
            (self._sound, sound),
        ):
            state[at] = value


class SupportBuffer:
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
