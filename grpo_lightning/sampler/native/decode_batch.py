"""The completions that are being decoded, as tensors, and the step that gives each of them one more token.

Shapes: N completions in all, T the most tokens of one; b of them are in the KV cache now, in slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_lightning.sampler.base import Completions
from grpo_lightning.sampler.native.kv_cache import KVCache
from grpo_lightning.sampler.native.token_sampling import NonFiniteLogits, sample_tokens
from grpo_lightning.sampler.support import SupportBuffer
from grpo_lightning.sampler.text import StopStrings
from grpo_lightning.types import Sampling


class DecodeBatch:
    """All completions, and the slots of those that are being decoded.

    Between two calls of anything but `step` no tensor changes its shape or its place in memory, and nothing in `step`
    looks at a value, as far as that holds for the cache.

    Args:
        cache: The model.
        uniforms: [N, T] the random numbers that decide the tokens.
        sampling: How tokens are sampled.
        end_ids: The token ids that end a completion; the first of them still belongs to it.
        steps: The most tokens of a completion that are sampled between two `sync`.
    """

    def __init__(
        self, cache: KVCache, uniforms: Tensor, *, sampling: Sampling, end_ids: Sequence[int], steps: int
    ) -> None:
        self._cache, self._uniforms, self._sampling = cache, uniforms, sampling
        device = uniforms.device
        # One column more, for what completions that have ended go on to sample.
        shape = len(uniforms), sampling.max_new_tokens + 1
        self.ids = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs, self.entropies = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        self._forced: Tensor | None = None
        """[N, T + 1] the tokens of replies, which are read and not sampled, -1 elsewhere; None: there are none."""
        self._ends = torch.tensor(sorted(end_ids), dtype=torch.long, device=device)
        self.support = SupportBuffer(shape[1], steps, device)
        self._row = torch.empty(0, dtype=torch.long, device=device)
        """[b] the completion in each slot."""
        self._count, self._token = torch.empty_like(self._row), torch.empty_like(self._row)
        """[b] its tokens so far, and the last of them."""
        self._alive = torch.empty(0, dtype=torch.bool, device=device)
        """[b] whether it goes on."""
        self._finished, self._sound = torch.empty_like(self._alive), torch.empty_like(self._alive)
        """[b] whether it has ended by itself, and whether all its logits were finite."""
        # What follows is as of the last `sync`.
        self.rows: list[int] = []
        """[b] the completion in each slot; -1: it is over."""
        self.lengths = [0] * len(uniforms)
        """[N] tokens of every completion."""
        self.finished = [False] * len(uniforms)
        """[N] which completions have ended by themselves."""
        self.turn_starts = [0] * len(uniforms)
        """[N] the first token of the last turn of every completion."""
        self.awaiting: set[int] = set()
        """The completions that have ended a turn and wait for a reply."""

    @property
    def running(self) -> list[int]:
        """The slots whose completions go on."""
        return [slot for slot, row in enumerate(self.rows) if row >= 0 and row not in self.awaiting]

    @property
    def taken(self) -> list[int]:
        """The slots whose completions are not over."""
        return [slot for slot, row in enumerate(self.rows) if row >= 0]

    @property
    def free(self) -> list[int]:
        """The slots without a completion."""
        return [slot for slot, row in enumerate(self.rows) if row < 0]

    def open(self, rows: Sequence[int]) -> None:
        """Hold these completions [b] and no others, and sample their next tokens."""
        size = len(rows)
        self._row, self._count, self._token = (self._row.new_zeros(size) for _ in range(3))
        self._alive, self._finished, self._sound = (self._alive.new_zeros(size) for _ in range(3))
        self.support.open(size)
        self.rows = [-1] * size
        self._enter(range(size), rows, self._cache.open(rows))

    def fill(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Hold completions [n] in the place of others, and sample their next tokens."""
        self._enter(slots, rows, self._cache.fill(slots, rows))

    def keep(self, slots: Sequence[int]) -> None:
        """Drop all completions but those in these slots, given in rising order."""
        self._cache.keep(slots)
        chosen = torch.tensor(slots, device=self._row.device)
        self._row, self._count, self._token = self._row[chosen], self._count[chosen], self._token[chosen]
        self._alive, self._finished, self._sound = self._alive[chosen], self._finished[chosen], self._sound[chosen]
        self.support.keep(chosen)
        self.rows = [self.rows[slot] for slot in slots]

    def step(self) -> None:
        """Sample one more token of every completion, for which the cache must have room."""
        self._sample(slice(None), self._cache.step(self._token))

    def sync(self, stops: StopStrings | None) -> list[int]:
        """Wait for the results so far.

        Returns:
            The completions that are over since the last call.

        Raises:
            NonFiniteLogits: A logit of one that was running was not finite.
        """
        # One transfer for all.
        state = torch.stack([self._alive.long(), self._finished.long(), self._count, self._sound.long()])
        alive, finished, counts, sound = state.tolist()
        if not all(sound):
            raise NonFiniteLogits("the policy's logits are not finite")
        self.support.sync(self._row, self._count)
        # While a reply is read there is nothing new.
        speaking = [slot for slot in self.running if counts[slot] > self.turn_starts[self.rows[slot]]]
        if stops and speaking:
            starts = [self.turn_starts[self.rows[slot]] for slot in speaking]
            before = [max(self.lengths[self.rows[slot]], start) for slot, start in zip(speaking, starts, strict=True)]
            news = [counts[slot] - old for slot, old in zip(speaking, before, strict=True)]
            tails = self._tails(speaking, [counts[slot] for slot in speaking], starts, stops.tail + max(news) - 1)
            for slot, old, belong in zip(speaking, before, stops(tails, news), strict=True):
                if belong:
                    alive[slot], finished[slot], counts[slot] = 0, 1, old + belong
                    self._alive[slot] = False
        over = []
        for slot in self.running:
            row = self.rows[slot]
            self.lengths[row], self.finished[row] = counts[slot], bool(finished[slot])
            if not alive[slot] and self._forced is not None and self.finished[row]:
                self.awaiting.add(row)
            elif not alive[slot]:
                over.append(row)
                self.rows[slot] = -1
        return over

    def token_ids(self, rows: Sequence[int]) -> list[list[int]]:
        """The token ids of some completions, replies included."""
        longest = max(self.lengths[row] for row in rows)
        ids: list[list[int]] = self.ids[list(rows), :longest].tolist()
        return [own[: self.lengths[row]] for row, own in zip(rows, ids, strict=True)]

    def completions(self, pad_id: int) -> Completions:
        """All completions, once they are over."""
        device, length = self.ids.device, max(self.lengths)
        seen = torch.arange(length, device=device) < torch.tensor(self.lengths, device=device).unsqueeze(-1)
        mask = seen if self._forced is None else seen & (self._forced[:, :length] < 0)
        return Completions(
            ids=self.ids[:, :length].where(seen, pad_id),
            mask=mask,
            seen=seen,
            logprobs=self.logprobs[:, :length].where(mask, 0.0),
            entropies=self.entropies[:, :length].where(mask, 0.0),
            finished=torch.tensor(self.finished, device=device),
            support=self.support.support(self.lengths, self._forced),
        )

    def _tails(
        self, slots: Sequence[int], counts: Sequence[int], starts: Sequence[int], length: int
    ) -> list[list[int]]:
        """The last ``length`` tokens of the last turns in some slots [n], or all of these where there are fewer."""
        device = self._row.device
        rows = self._row[torch.tensor(slots, device=device)].unsqueeze(-1)  # [n, 1]
        places = torch.tensor(counts, device=device).unsqueeze(-1) + torch.arange(-length, 0, device=device)
        tokens: list[list[int]] = self.ids[rows, places.clamp(min=0)].tolist()  # [n, length]
        bounds = zip(tokens, counts, starts, strict=True)
        return [row[max(0, length - (count - start)) :] for row, count, start in bounds]

    def _enter(self, slots: Sequence[int], rows: Sequence[int], logits: Tensor) -> None:
        device = self._row.device
        for slot, row in zip(slots, rows, strict=True):
            self.rows[slot] = row
        places = torch.tensor(list(slots), device=device)
        self._row[places] = torch.tensor(list(rows), device=device)
        self._count[places] = torch.tensor([self.lengths[row] for row in rows], device=device)
        self._alive[places], self._finished[places], self._sound[places] = True, False, True
        self._sample(places, logits)

    def _sample(self, at: Tensor | slice, logits: Tensor) -> None:
        """Sample the next tokens of the completions in some slots [n] from their logits [n, V]."""
        row, count, alive = self._row[at], self._count[at], self._alive[at]
        limit = self._sampling.max_new_tokens
        uniform = self._uniforms[row, count.clamp(max=limit - 1)]
        token, logprob, entropy, is_sound, support = sample_tokens(logits, self._sampling, uniform)
        # Not torch.isin, which of many end tokens makes a sorted list, whose length a GPU would have to be asked for.
        is_end = (token.unsqueeze(-1) == self._ends).any(-1)
        if self._forced is not None:
            forced = self._forced[row, count]
            is_free = forced < 0
            is_end = is_end & is_free
            token, logprob, entropy = (
                value.where(is_free, other) for value, other in ((token, forced), (logprob, 0.0), (entropy, 0.0))
            )
            support = None if support is None else support.where(is_free.unsqueeze(-1), -1)
        # What a completion samples after its end is written behind it, again and again.
        self.ids[row, count] = token
        self.logprobs[row, count] = logprob
        self.entropies[row, count] = entropy
        if support is not None:
            self.support.add(at, support, alive)
        finished = self._finished[at] | (alive & is_end)
        # A slice is a view, so everything is computed before anything is written.
        goes_on = alive & ~finished & (count + 1 < limit)
        new_count, sound = count + alive, self._sound[at] & (is_sound | ~alive)
        self._alive[at], self._count[at], self._token[at] = goes_on, new_count, token
        self._finished[at], self._sound[at] = finished, sound
