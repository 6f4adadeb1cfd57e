"""Sampling support: the set of tokens that top_k, top_p and min_p leave for each completion token.

The native sampler collects the sets while it decodes. An engine does not return its sets. They are computed again from
the policy's logits, by the engine's filters in the engine's order: the same sets, but for a token whose probability
lies on a bound.

Shapes: B rows of T completion tokens, n tokens of them; V the size of the vocabulary, K the most tokens of a set.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_lightning.sampler.native.token_sampling import MAX_SUPPORT, likeliest_tokens
from grpo_lightning.transformer.lm_head import MIN_LOGPROB
from grpo_lightning.transformer.logprobs import Chunk
from grpo_lightning.types import Rollout, Sampled, Sampling, SamplingSupport


class SupportBuffer:
    """Takes the sets of the tokens that are sampled, and returns them once all are.

    Between two `sync` they are in a buffer of a fixed place, in which all sets have the same room; `sync` moves them to
    where each takes the room that it needs.

    Args:
        length: The most tokens of a completion, T.
        capacity: The most tokens that are sampled between two `sync`.
        device: Where the tokens are.
    """

    def __init__(self, length: int, capacity: int, device: torch.device) -> None:
        self._length, self._capacity = length, capacity
        self.recent: Tensor | None = None
        """[b, capacity, K] the sets of the tokens since the last `sync` in the b slots, -1 in unused room."""
        self.num_recent = torch.empty(0, dtype=torch.long, device=device)
        """[b] how many tokens that are."""
        self._parts: list[tuple[Tensor, SamplingSupport]] = []
        """The numbers [n] of tokens in a flattened [B, T], and their sets [n]."""

    def open(self, size: int) -> None:
        """Hold ``size`` other completions from now on."""
        self.recent, self.num_recent = None, self.num_recent.new_zeros(size)

    def keep(self, slots: Tensor) -> None:
        """Drop all slots but these."""
        self.num_recent = self.num_recent[slots]
        if self.recent is not None:
            self.recent = self.recent[slots]

    def add(self, at: Tensor | slice, ids: Tensor, alive: Tensor) -> None:
        """Add the set of one more token of the completions in some slots [n].

        Args:
            at: The slots.
            ids: [n, K] the tokens of each set, -1 in the rest.
            alive: [n] (bool) which completions go on; the sets of the others are overwritten by the next ones.
        """
        if self.recent is None:
            # K is known with the first logits, long before a step is recorded.
            self.recent = ids.new_full((len(self.num_recent), self._capacity, ids.shape[-1]), -1)
        slots, count = torch.arange(len(self.num_recent), device=ids.device)[at], self.num_recent[at]
        self.recent[slots, count] = ids
        self.num_recent[at] = count + alive

    def sync(self, rows: Tensor, counts: Tensor) -> None:
        """Move what came since the last call out of the buffer, and wait for it.

        Args:
            rows: [b] the completion in each slot.
            counts: [b] its tokens so far.
        """
        if self.recent is None:
            return
        turn = torch.arange(self._capacity, device=rows.device)
        is_new = turn < self.num_recent.unsqueeze(-1)  # [b, capacity]
        first = rows * self._length + counts - self.num_recent
        recent = self.recent[is_new]  # [b, capacity, K] -> [n, K]
        is_inside = recent >= 0
        support = SamplingSupport(is_inside.sum(-1, dtype=torch.int32), recent[is_inside])
        self._parts.append(((first.unsqueeze(-1) + turn)[is_new], support))
        self.num_recent.zero_()

    def support(self, lengths: Sequence[int], forced: Tensor | None = None) -> SamplingSupport | None:
        """The sets [B, longest] of all completions; None if there are none.

        Args:
            lengths: [B] their numbers of tokens.
            forced: [B, T] the tokens of replies, which have no sets, elsewhere -1; None: there are none.
        """
        if not self._parts:
            return None
        numbers = torch.cat([part for part, _ in self._parts])  # [n]
        support = SamplingSupport.concatenate([part for _, part in self._parts])
        rows, places = numbers // self._length, numbers % self._length
        # Behind a stop string there may be tokens that do not belong to the completion.
        belongs = places < torch.tensor(lengths, device=numbers.device)[rows]
        if forced is not None:
            belongs &= forced.flatten()[numbers] < 0
        belongs = belongs.nonzero().flatten()
        order = belongs[numbers[belongs].argsort(stable=True)]
        # Where a reply took the places of such tokens, the last that came counts.
        is_last = torch.ones_like(order, dtype=torch.bool)
        is_last[:-1] = numbers[order][1:] != numbers[order][:-1]
        order = order[is_last]
        sizes = support.sizes.new_zeros(len(lengths), max(lengths))
        sizes[rows[order], places[order]] = support.sizes[order]
        return SamplingSupport(sizes, support.of(order).ids)


def engine_filters(sampling: Sampling) -> dict[str, Any]:
    """The filters of a request, as vLLM calls them; neutral ones where all tokens may be sampled.

    An engine bounds no set, so it is asked for at most `MAX_SUPPORT` tokens.
    """
    if not sampling.truncated or sampling.temperature == 0:
        return {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    top_k = min(sampling.top_k or MAX_SUPPORT, MAX_SUPPORT)
    return {"top_p": sampling.top_p, "top_k": top_k, "min_p": sampling.min_p}


class EngineSupport(NamedTuple):
    """The sets that an engine has sampled some tokens from."""

    support: SamplingSupport
    """[n] or [B, T], each with the token that was sampled."""
    outside: Tensor
    """[n] or [B, T] (bool) whether that token was not in the set and had to be added."""


def support_of_tokens(logits: Tensor, sampled: Tensor, sampling: Sampling) -> EngineSupport:
    """The sets that an engine with these logits samples from; a sampled token that is not in its set is added to it.

    vLLM's order: min_p first, then top_k of what is left, then top_p of what that leaves (``vllm/v1/sample/sampler.py``
    of version 0.32). The native sampler's is top_k, top_p, min_p, which differs where both top_p and min_p are used.

    Args:
        logits: [n, V] divided by the temperature; overwritten.
        sampled: [n] the tokens.
        sampling: How they were sampled, truncated.
    """
    filters, size = engine_filters(sampling), logits.shape[-1]
    shifted = logits.sub_(logits.amax(-1, keepdim=True)).clamp_(min=MIN_LOGPROB)
    if filters["min_p"] > 0:
        shifted.masked_fill_(shifted.exp() < filters["min_p"], MIN_LOGPROB)
    ids, _, inside = likeliest_tokens(shifted, None, top_k=filters["top_k"], top_p=filters["top_p"], min_p=0.0)
    sampled = sampled.unsqueeze(-1)  # [n] -> [n, 1]
    is_outside = ~((ids == sampled) & inside).any(-1, keepdim=True)
    # Unused room gets the number behind the last token, and so comes last.
    tokens = torch.cat([ids.where(inside, size), sampled.where(is_outside, size)], -1).sort(-1).values  # [n, K + 1]
    is_token = tokens < size
    # [n, K + 1] -> [sum of sizes]
    support = SamplingSupport(is_token.sum(-1, dtype=torch.int32), tokens[is_token].int())
    return EngineSupport(support, is_outside.squeeze(-1))


def engine_support(rows: Sampled | Rollout, chunks: Iterable[Chunk], sampling: Sampling) -> EngineSupport:
    """The sets [B, T] of all completion tokens, see `support_of_tokens`.

    Args:
        rows: The completions.
        chunks: The logits of their tokens, in any order.
        sampling: How they were sampled, truncated.
    """
    device, count = rows.mask.device, rows.mask.numel()
    sampled = rows.ids[:, rows.ids.shape[1] - rows.mask.shape[1] :].flatten()  # [B, T] -> [B * T]
    numbers, parts = [torch.empty(0, dtype=torch.long, device=device)], [SamplingSupport.everything(sampled[:0])]
    outside = torch.zeros(count, dtype=torch.bool, device=device)
    for chunk, logits in chunks:
        found = support_of_tokens(logits, sampled[chunk], sampling)
        numbers.append(chunk)
        parts.append(found.support)
        outside[chunk] = found.outside
    places, support = torch.cat(numbers), SamplingSupport.concatenate(parts)
    sizes = support.sizes.new_zeros(count)
    sizes[places] = support.sizes
    ids = support.of(places.argsort()).ids  # row by row
    # [B * T] -> [B, T]
    return EngineSupport(SamplingSupport(sizes.view_as(rows.mask), ids), outside.view_as(rows.mask))
