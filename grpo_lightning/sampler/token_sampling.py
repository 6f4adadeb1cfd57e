"""Token sampling: the next token out of logits, the random numbers that decide it, and the sets of truncated sampling.

The native sampler collects the set of every token while it decodes. An engine does not return its sets. They are
computed again from the policy's logits, by the engine's filters in the engine's order: the same sets, but for a token
whose probability lies on a bound.

Shapes: b rows in the batch; B rows of T completion tokens, n tokens of them; V the size of the vocabulary, K the most
tokens of a set.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_lightning.transformer import lm_head
from grpo_lightning.transformer.lm_head import MIN_LOGPROB, Chunk, dot
from grpo_lightning.types import Rollout, Sampled, Sampling, SamplingSupport

MAX_SUPPORT = 1024
"""The most tokens of a set. Of a larger one the likeliest stay, which is what is sampled and what is scored: sets take
little memory, and the same operations are made whatever the logits are."""

_ROUNDING = 1e-6
"""The relative error of a sum of probabilities in float32."""

BLOCK = 512
"""Tokens whose weights are added up before the running sum is made, in vocabularies larger than `_SMALL`."""
_SMALL = 8192


class NonFiniteLogits(FloatingPointError):
    """The policy's weights are damaged: they give logits from which no token can be sampled."""


def uniforms(seed: int, rows: Sequence[tuple[int, int]], length: int) -> Tensor:
    """Random numbers in [0, 1) that depend on nothing but the seed and the place of each.

    Philox is a counter-based generator (Salmon et al., SC 2011): every row has a key of its own.

    Args:
        seed: The first half of every row's key, in [0, 2^64).
        rows: (number of the prompt, number of its completion) of every row, each in [0, 2^32).
        length: How many numbers a row gets; more of them begin with the fewer.

    Returns:
        [rows, length] float32
    """
    numbers = np.empty((len(rows), length), dtype=np.float32)
    # On the CPU, one generator for each row: neither the device nor the batch changes what is sampled.
    for row, (prompt, member) in enumerate(rows):
        key = np.array([seed, prompt << 32 | member], dtype=np.uint64)
        np.random.Generator(np.random.Philox(key=key)).random(dtype=np.float32, out=numbers[row])
    return torch.from_numpy(numbers)


class SampledTokens(NamedTuple):
    """A token of every row, and what it was sampled from."""

    tokens: Tensor  # [b]
    logprobs: Tensor  # [b] in nats, under logits / temperature, out of the set where there is one
    entropies: Tensor  # [b] in nats, of the same distribution
    sound: Tensor  # [b] (bool) False where a logit is NaN or infinite, or none is finite
    support: Tensor | None = None
    """[b, K] int32 the tokens of each set, -1 in the room that it does not need; None: the whole vocabulary."""


def sample_tokens(logits: Tensor, sampling: Sampling, uniform: Tensor) -> SampledTokens:
    """One token per row, out of the set that truncation leaves.

    The token is the first with which the probabilities add up to more than the row's random number. The same operations
    run whatever the logits are, so that a GPU need not wait.

    Args:
        logits: [b, V]; may be overwritten.
        sampling: How the token is sampled.
        uniform: [b] in [0, 1).
    """
    if not sampling.truncated or sampling.temperature == 0:
        from_all = lm_head.compile_function(_from_all) if lm_head.should_compile(logits) else _from_all
        return SampledTokens(*from_all(logits, uniform, sampling.temperature))
    shifted, _, total = _exponentials(logits, sampling.temperature)
    sound = total.isfinite()
    ids, values, inside = likeliest_tokens(  # [b, K] each
        shifted, total, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
    )
    weights = values.exp().masked_fill_(~inside, 0.0)
    place = inverse_cdf(weights, uniform).unsqueeze(-1)  # [b, 1]
    total = weights.sum(-1)
    log_total = total.log()
    return SampledTokens(
        ids.gather(-1, place).squeeze(-1),
        values.gather(-1, place).squeeze(-1) - log_total,
        log_total - dot(weights, values) / total,
        sound,
        ids.where(inside, -1).int(),
    )


def _exponentials(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits / temperature [b, V] of which the largest is 0, their exponentials, and the sum [b] of these."""
    # In 16 bits the probabilities of a large vocabulary would not add up to 1.
    logits = logits.float()
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    # The largest becomes 0, so that no exponential overflows; and -inf a finite number, since 0 * -inf is not 0.
    shifted = (logits - logits.amax(-1, keepdim=True)).clamp_(min=MIN_LOGPROB)
    weights = shifted.exp()
    return shifted, weights, weights.sum(-1)


def _from_all(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, log-probabilities, entropies and whether all was sound, as in `SampledTokens`, without truncation."""
    shifted, weights, total = _exponentials(logits, temperature)
    log_total = total.log()
    entropy = log_total - dot(weights, shifted) / total
    tokens = shifted.argmax(-1) if temperature == 0 else inverse_cdf(weights, uniform)
    # [b, V] -> [b, 1] -> [b]
    logprobs = shifted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_total
    return tokens, logprobs, entropy, total.isfinite()


def likeliest_tokens(
    logits: Tensor, total: Tensor | None, *, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that may be sampled, at most `MAX_SUPPORT` of them: the likeliest one always may.

    The filters apply one after another: top_k, then top_p on what is left (arXiv:1904.09751), then min_p
    (arXiv:2407.01082), in the order of transformers' ``generate``. Of equally likely tokens those with the lowest
    numbers stay, unless there are more of them than are looked at.

    Args:
        logits: [b, V] of which the largest is 0.
        total: [b] the sum of their exponentials; None, or with top_k: of those that are looked at.
        top_k: Keep this many; 0 keeps all.
        top_p: Keep the smallest set of the likeliest tokens whose probabilities reach this; 1 keeps all.
        min_p: Keep tokens at least this likely, relative to the likeliest; 0 keeps all.

    Returns:
        Token ids [b, K], which increase in each row, their logits [b, K], and which may be sampled [b, K] (bool).
    """
    values, ids = logits.topk(min(top_k or MAX_SUPPORT, logits.shape[-1]))
    weights = values.exp()
    inside = weights > 0  # what the model rules out is not kept
    if top_p < 1:
        whole = (weights.sum(-1) if top_k or total is None else total).unsqueeze(-1)
        # Where probabilities add up to exactly top_p, rounding must not let in the token behind them.
        inside &= weights.cumsum(-1) - weights < top_p * (1 - _ROUNDING) * whole
    if min_p > 0:
        inside &= weights >= min_p
    values, ids, inside = values[:, :MAX_SUPPORT], ids[:, :MAX_SUPPORT], inside[:, :MAX_SUPPORT]
    count = inside.sum(-1, keepdim=True).clamp(min=1)
    least = values.gather(-1, count - 1)  # [b, K] -> [b, 1]
    if ids.shape[-1] < logits.shape[-1]:
        ids, order = ids.sort(-1)
        values = values.gather(-1, order)
    else:
        ids, values = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits), logits
    over, ties = values > least, values == least
    room = count - over.sum(-1, keepdim=True)
    return ids, values, over | (ties & (ties.cumsum(-1) <= room))


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the running sum of the weights passes ``uniform`` times their total.

    A large vocabulary is searched for a block of tokens first, and then inside it: no running sum of all weights has to
    be written, whose rounding on a GPU may also differ from run to run.

    Args:
        weights: [b, V] not negative, one of each row positive.
        uniform: [b] in [0, 1).

    Returns:
        The tokens [b]; one of weight 0 is never sampled.
    """
    # Not torch.multinomial, whose random numbers depend on the device and on the rows that are sampled together.
    size = weights.shape[-1]
    if size <= _SMALL:
        sums = weights.cumsum(-1)
        return _first_above(sums, uniform.to(sums) * sums[:, -1])
    whole = size // BLOCK * BLOCK
    # [b, V] -> [b, n, BLOCK] -> [b, n], and the rest as one more block
    parts = [weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1), weights[:, whole:].sum(-1, keepdim=True)]
    sums = torch.cat(parts, -1).cumsum(-1)
    goal = uniform.to(sums) * sums[:, -1]
    block = _first_above(sums, goal).unsqueeze(-1)  # [b, 1]
    before = sums.gather(-1, (block - 1).clamp(min=0)).where(block > 0, 0.0).squeeze(-1)  # [b]
    places = block * BLOCK + torch.arange(BLOCK, device=weights.device)  # [b, BLOCK]
    inside = weights.gather(-1, places.clamp(max=size - 1)).where(places < size, 0.0)
    return block.squeeze(-1) * BLOCK + _first_above(inside.cumsum(-1), (goal - before).clamp(min=0.0))


def _first_above(sums: Tensor, goal: Tensor) -> Tensor:
    """The first place [b] at which the running sums [b, n] are greater than the goal [b]."""
    total = sums[:, -1]
    # Rounding may lift the goal to the total itself, behind which there is no token.
    goal = torch.minimum(goal, torch.nextafter(total, torch.zeros_like(total)))
    # Where a logit is not finite no sum is, and any token will do.
    return torch.searchsorted(sums, goal.unsqueeze(-1), right=True).squeeze(-1).clamp(max=sums.shape[-1] - 1)


class SupportBuffer:
    """Collects the `SamplingSupport` of tokens while they are sampled.

    Between two `sync` the sets are in a buffer of a fixed place, with the same room for each; `sync` moves them to
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
        self.num_recent = torch.empty(0, dtype=torch.long, device=device)  # [b] how many tokens that are
        self._numbers: list[Tensor] = []  # The numbers [n] of tokens in a flattened [B, T]
        self._parts: list[SamplingSupport] = []  # Their sets [n]

    def open(self, size: int) -> None:
        """Hold ``size`` other completions from now on."""
        self.recent, self.num_recent = None, self.num_recent.new_zeros(size)

    def keep(self, slots: Tensor) -> None:
        """Drop all slots but these."""
        self.num_recent = self.num_recent[slots]
        self.recent = None if self.recent is None else self.recent[slots]

    def add(self, ids: Tensor, alive: Tensor) -> None:
        """Add the set of one more token of every completion.

        Args:
            ids: [b, K] the tokens of each set, -1 in the rest.
            alive: [b] (bool) which completions go on; the sets of the others are overwritten by the next ones.
        """
        if self.recent is None:
            # K is known with the first logits, long before a step is recorded.
            self.recent = ids.new_full((len(ids), self._capacity, ids.shape[-1]), -1)
        self.recent[torch.arange(len(ids), device=ids.device), self.num_recent] = ids
        self.num_recent.add_(alive)

    def sync(self, rows: Tensor, counts: Tensor, lengths: Tensor) -> None:
        """Move what came since the last call out of the buffer.

        Args:
            rows: [b] the completion in each slot.
            counts: [b] the tokens sampled of it so far.
            lengths: [b] how many of these belong to it; behind a stop string there may be more.
        """
        if self.recent is None:
            return
        turn = torch.arange(self._capacity, device=rows.device)
        places = (counts - self.num_recent).unsqueeze(-1) + turn  # [b, capacity]
        is_new = (turn < self.num_recent.unsqueeze(-1)) & (places < lengths.unsqueeze(-1))
        recent = self.recent[is_new]  # [b, capacity, K] -> [n, K]
        is_inside = recent >= 0
        self._parts.append(SamplingSupport(is_inside.sum(-1, dtype=torch.int32), recent[is_inside]))
        self._numbers.append((rows.unsqueeze(-1) * self._length + places)[is_new])
        self.num_recent.zero_()

    def support(self, rows: int, length: int) -> SamplingSupport | None:
        """The sets [rows, length] of all completions; None if there are none."""
        if not self._parts:
            return None
        sets = SamplingSupport.concatenate(self._parts)
        return sets.scatter(torch.cat(self._numbers), (rows, self._length)).narrow(length)


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

    support: SamplingSupport  # [n] or [B, T], each with the token that was sampled
    outside: Tensor  # [n] or [B, T] (bool) whether that token was not in the set and had to be added


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
    sampled = rows.ids[:, rows.ids.shape[1] - rows.mask.shape[1] :].flatten()  # [B, T] -> [B * T]
    numbers, parts = [sampled[:0]], [SamplingSupport.full_vocabulary(sampled[:0])]
    outside = torch.zeros_like(sampled, dtype=torch.bool)
    for chunk, logits in chunks:
        part, outside[chunk] = support_of_tokens(logits, sampled[chunk], sampling)
        numbers.append(chunk)
        parts.append(part)
    support = SamplingSupport.concatenate(parts).scatter(torch.cat(numbers), rows.mask.shape)
    return EngineSupport(support, outside.view_as(rows.mask))
