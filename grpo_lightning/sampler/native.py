"""The native sampler: the policy's own forward passes, with the weights that are trained.

Shapes: N completions in all, T the most tokens of one; b of them are in the KV cache now, in slots.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lightning.sampler import Completions, Conversation, GenerationRequest, Sampler
from grpo_lightning.sampler.kv_cache import KVCache
from grpo_lightning.sampler.token_sampling import NonFiniteLogits, SupportBuffer, sample_tokens, uniforms

if TYPE_CHECKING:
    from grpo_lightning.policy.base import Policy

COMPACT_BELOW, COMPACT_BELOW_GPU = 0.75, 0.5
"""Completions that are over are dropped once at most this fraction of those held is still running.

Dropping copies the keys and values of all that remain, so it is not done for each one that ends; on a GPU every size
has to be recorded, too.
"""
SYNC_EVERY = 16
"""Tokens between two looks at the results where looking means waiting for a GPU."""


class NativeSampler(Sampler):
    """Generates with the policy itself: no weights are copied, nothing is rounded."""

    def sample(self, policy: "Policy", request: GenerationRequest) -> Completions:
        cache = policy.kv_cache(
            request.prompts,
            len(request.places) // len(request.prompts),
            longest=request.longest,
            rewinds=request.conversation is not None,
        )
        max_concurrent = policy.max_concurrent(request.sampling, longest=request.longest)
        with policy.eval_mode():
            return decode(cache, request, max_concurrent=max_concurrent)


@torch.no_grad()
def decode(
    cache: KVCache, request: GenerationRequest, *, max_concurrent: int | None = None, sync_every: int | None = None
) -> Completions:
    """Decode the completions of a cache, token by token.

    A completion depends on nothing but the weights and the random numbers: not on which others are decoded beside it,
    nor on how often results are looked at.

    Args:
        cache: The model, with the prompts of the request.
        request: What to generate.
        max_concurrent: The most completions at a time, the next ones waiting for all of them to end; None: all.
        sync_every: Tokens between two looks at the results; None: 1 on a CPU, else `SYNC_EVERY`.

    Raises:
        FloatingPointError: The logits are not finite.
    """
    on_cpu, total = cache.device.type == "cpu", len(request.places)
    sync_every = sync_every or (1 if on_cpu else SYNC_EVERY)
    compact = COMPACT_BELOW if on_cpu else COMPACT_BELOW_GPU
    batch = DecodeBatch(cache, request, steps=sync_every)
    step = CUDAGraphStep(batch.step, cache.device if cache.is_static else torch.device("cpu"))
    size = min(max_concurrent or total, total)
    for first in range(0, total, size):
        batch.open(range(first, min(first + size, total)))
        while True:
            over = batch.sync()
            if request.on_finished and (ended := [row for row in over if batch.finished[row]]):
                request.on_finished(ended, batch.token_ids(ended))
            if not (taken := batch.taken):
                break
            if request.poll:
                request.poll()
            if len(taken) <= compact * len(batch.rows):
                batch.keep(taken)
            shortest = min((batch.lengths[batch.rows[slot]] for slot in batch.running), default=0)
            tokens = min(sync_every, request.sampling.max_new_tokens - shortest)
            cache.reserve(tokens)
            step(tokens, cache.version)
    return batch.completions(request.pad_id)


class DecodeBatch:
    """All completions, and the slots of those that are being decoded.

    `step` keeps every tensor's shape and place, and reads no value on the host unless the cache's ``step`` does: so a
    GPU can record and replay it.

    Args:
        cache: The model.
        request: What to generate: N completions of at most T tokens.
        steps: The most tokens of a completion that are sampled between two `sync`.
    """

    def __init__(self, cache: KVCache, request: GenerationRequest, *, steps: int) -> None:
        self._cache, self._sampling, self._stops = cache, request.sampling, request.stops
        self._conversation, device = request.conversation, cache.device
        self._uniforms = uniforms(request.seed, request.places, self._sampling.max_new_tokens).to(device)
        """[N, T] the random numbers that decide the tokens."""
        # One column more, for what completions that have ended go on to sample.
        shape = len(request.places), self._sampling.max_new_tokens + 1
        self.ids = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs, self.entropies = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        self._forced = torch.full_like(self.ids, -1) if request.conversation else None
        """[N, T + 1] the tokens of replies, which are read and not sampled, -1 elsewhere."""
        self._ends = torch.tensor(sorted(request.end_ids), dtype=torch.long, device=device)
        self.support = SupportBuffer(shape[1], steps, device)
        self._row = torch.empty(0, dtype=torch.long, device=device)  # [b] the completion in each slot
        self._count, self._token = torch.empty_like(self._row), torch.empty_like(self._row)
        """[b] its tokens so far, and the last of them."""
        self._alive = torch.empty(0, dtype=torch.bool, device=device)  # [b] whether it goes on
        self._finished, self._sound = torch.empty_like(self._alive), torch.empty_like(self._alive)
        """[b] whether it has ended by itself, and whether all its logits were finite."""
        # What follows is as of the last `sync`.
        self.rows: list[int] = []  # [b] the completion in each slot; -1: it is over
        self.lengths = [0] * shape[0]  # [N] tokens of every completion
        self.finished = [False] * shape[0]  # [N] which completions have ended by themselves
        self._turn_starts = [0] * shape[0]  # [N] the first token of the last turn of every completion
        self._awaiting: set[int] = set()  # The completions that have ended a turn and wait for a reply

    @property
    def running(self) -> list[int]:
        """The slots whose completions go on."""
        return [slot for slot, row in enumerate(self.rows) if row >= 0 and row not in self._awaiting]

    @property
    def taken(self) -> list[int]:
        """The slots whose completions are not over."""
        return [slot for slot, row in enumerate(self.rows) if row >= 0]

    def open(self, rows: Sequence[int]) -> None:
        """Hold these completions [b] and no others, and sample their first tokens."""
        self.rows = list(rows)
        self._row = torch.tensor(self.rows, device=self._row.device)
        self._count, self._token = torch.zeros_like(self._row), torch.zeros_like(self._row)
        self._alive, self._sound = (torch.ones_like(self._row, dtype=torch.bool) for _ in range(2))
        self._finished = torch.zeros_like(self._alive)
        self.support.open(len(rows))
        self._sample(self._cache.open(rows))

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
        self._sample(self._cache.step(self._token))

    def sync(self) -> list[int]:
        """Wait for the results so far, then resume the completions that have received a reply.

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
        # While a reply is read there is nothing new.
        speaking = [slot for slot in self.running if counts[slot] > self._turn_starts[self.rows[slot]]]
        if (stops := self._stops) and speaking:
            starts = [self._turn_starts[self.rows[slot]] for slot in speaking]
            before = [max(self.lengths[self.rows[slot]], start) for slot, start in zip(speaking, starts, strict=True)]
            news = [counts[slot] - old for slot, old in zip(speaking, before, strict=True)]
            tails = self._tails(speaking, [counts[slot] for slot in speaking], starts, stops.tail + max(news) - 1)
            for slot, old, belong in zip(speaking, before, stops(tails, news), strict=True):
                if belong:
                    alive[slot], finished[slot], counts[slot] = 0, 1, old + belong
                    self._alive[slot] = False
        if self.support.recent is not None:
            self.support.sync(self._row, self._count, torch.tensor(counts, device=self._row.device))
        over, awaiting = [], []
        for slot in self.running:
            row = self.rows[slot]
            self.lengths[row], self.finished[row] = counts[slot], bool(finished[slot])
            if not alive[slot] and self._conversation and self.finished[row]:
                awaiting.append(row)
            elif not alive[slot]:
                over.append(row)
                self.rows[slot] = -1
        return over + self._converse(self._conversation, awaiting) if self._conversation else over

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
            support=self.support.support(len(self.ids), length),
        )

    def _converse(self, conversation: Conversation, ended: Sequence[int]) -> list[int]:
        """Give the environment each turn that has just ended, and resume the completions that it has replied to.

        Returns:
            The completions that are over: without a reply, or with one that leaves no room, before which it is cut.
        """
        for row in sorted(ended):
            self._awaiting.add(row)
            conversation.step(row, self.token_ids([row])[0][self._turn_starts[row] :])
        if conversation.is_slow and self.running:
            return []
        over, going = [], []
        slot_of = {row: slot for slot, row in enumerate(self.rows)}
        for row in sorted(self._awaiting):
            ids, start = conversation.reply(row), self.lengths[row]
            if ids is None or start + len(ids) >= self._sampling.max_new_tokens:
                self.finished[row] = ids is None
                self.rows[slot_of[row]] = -1
                over.append(row)
            elif self._forced is not None:
                self._turn_starts[row] = start + len(ids)
                self._forced[row, start : start + len(ids)] = torch.tensor(ids, device=self._forced.device)
                going.append(row)
        self._awaiting.clear()
        if going:
            slots, lengths = [slot_of[row] for row in going], [self.lengths[row] for row in going]
            # What was sampled behind a turn's end is forgotten; its last token is read with the next step.
            self._cache.rewind(slots, [length - 1 for length in lengths])
            places, rows, counts = (torch.tensor(v, device=self._row.device) for v in (slots, going, lengths))
            self._count[places], self._token[places] = counts, self.ids[rows, counts - 1]
            self._alive[places], self._finished[places] = True, False
        return over

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

    def _sample(self, logits: Tensor) -> None:
        """Sample the next token of every completion from logits [b, V]."""
        row, count, alive, limit = self._row, self._count, self._alive, self._sampling.max_new_tokens
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
            self.support.add(support, alive)
        self._token.copy_(token)
        self._sound.logical_and_(is_sound | ~alive)
        self._finished.logical_or_(alive & is_end)
        count.add_(alive)
        alive.logical_and_(~self._finished & (count < limit))


class CUDAGraphStep:
    """Repeats a step that reads and writes the same tensors every time, on a GPU as a CUDA graph.

    A step on a GPU is a thousand small kernels; queueing them takes the CPU longer than the GPU needs for them. A
    graph is queued as a whole: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs

    Args:
        step: What is repeated.
        device: Where its tensors are; a graph is recorded on "cuda" only.
    """

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self._step, self._device = step, device
        self._version: int | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, times: int, version: int) -> None:
        """Make the step ``times`` times; ``version`` is another one when it would use other tensors or shapes."""
        if self._device.type != "cuda":
            for _ in range(times):
                self._step()
            return
        if version != self._version:
            self._version, self._graph = version, None  # the old graph's memory is free for the new one
        if self._graph is None and times:
            self._warm_up()
            times -= 1
        if self._graph is None and times:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):  # which computes nothing
                self._step()
        for _ in range(times):
            if self._graph is not None:
                self._graph.replay()

    def _warm_up(self) -> None:
        """Make a step before one is recorded, in which functions are compiled and libraries choose their kernels."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
