"""The next token out of logits, and the random numbers that decide it.

Shapes: b rows in the batch, V the size of the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_lightning.batch import Sampling
from grpo_lightning.transformer.head import dot

PREFIX = 1024
"""How many of the likeliest tokens are sorted at first to find those of ``top_p``; of a large vocabulary few are."""

_ROUNDING = 1e-6
"""The relative error of a sum of probabilities in float32."""


_LEAST = -1e4
"""A shifted logit whose exponential is 0; a finite stand-in for -inf."""

BLOCK = 512
"""Tokens whose weights are added up before the running sum is made, in vocabularies larger than `_SMALL`."""
_SMALL = 8192


class NotFinite(FloatingPointError):
    """The policy's weights are damaged: they give logits from which no token can be drawn."""


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
    # On the CPU, one generator for each row: neither the device nor the batch changes what is drawn.
    for row, (prompt, member) in enumerate(rows):
        key = np.array([seed, prompt << 32 | member], dtype=np.uint64)
        np.random.Generator(np.random.Philox(key=key)).random(dtype=np.float32, out=numbers[row])
    return torch.from_numpy(numbers)


def draw(
    logits: Tensor, sampling: Sampling, uniform: Tensor, *, prefix: int | None = PREFIX
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token per row, with its log-probability and the entropy under logits / temperature, before any truncation.

    The token is the first with which the probabilities add up to more than the row's random number. The same operations
    run whatever the logits are, so that a GPU need not wait; only ``prefix`` lets a result be looked at.

    Args:
        logits: [b, V]; may be overwritten.
        sampling: How the token is drawn.
        uniform: [b] in [0, 1).
        prefix: As in `truncate`.

    Returns:
        Tokens [b], log-probabilities [b] and entropies [b], in nats, and which rows are sound [b] (bool): in the others
        a logit is NaN or infinite, or none is finite.
    """
    # In 16 bits the probabilities of a large vocabulary would not add up to 1.
    logits = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    # The largest becomes 0, so that no exponential overflows; and -inf a finite number, since 0 * -inf is not 0.
    shifted = (logits - logits.amax(-1, keepdim=True)).clamp_(min=_LEAST)
    weights = shifted.exp()
    total = weights.sum(-1)
    log_total = total.log()
    entropy = log_total - dot(weights, shifted) / total
    if sampling.temperature == 0:
        tokens = shifted.argmax(-1)
    else:
        if sampling.truncated:
            kept = truncate(shifted, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p, prefix=prefix)
            weights = weights.masked_fill_(kept == -torch.inf, 0.0)
        tokens = inverse_cdf(weights, uniform)
    # [b, V] -> [b, 1] -> [b]
    return tokens, shifted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_total, entropy, total.isfinite()


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the running sum of the weights passes ``uniform`` times their total.

    A large vocabulary is searched for a block of tokens first, and then inside it: no running sum of all weights has to
    be written, whose rounding on a GPU may also differ from run to run.

    Args:
        weights: [b, V] not negative, one of each row positive.
        uniform: [b] in [0, 1).

    Returns:
        The tokens [b]; one of weight 0 is never drawn.
    """
    # Not torch.multinomial, whose random numbers depend on the device and on the rows that are drawn together.
    size = weights.shape[-1]
    if size <= _SMALL:
        sums = weights.cumsum(-1)
        return _passed(sums, uniform.to(sums) * sums[:, -1])
    whole = size // BLOCK * BLOCK
    # [b, V] -> [b, n, BLOCK] -> [b, n], and the rest as one more block
    parts = [weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1), weights[:, whole:].sum(-1, keepdim=True)]
    sums = torch.cat(parts, -1).cumsum(-1)
    goal = uniform.to(sums) * sums[:, -1]
    block = _passed(sums, goal).unsqueeze(-1)  # [b, 1]
    before = sums.gather(-1, (block - 1).clamp(min=0)).where(block > 0, 0.0).squeeze(-1)  # [b]
    places = block * BLOCK + torch.arange(BLOCK, device=weights.device)  # [b, BLOCK]
    inside = weights.gather(-1, places.clamp(max=size - 1)).where(places < size, 0.0)
    return block.squeeze(-1) * BLOCK + _passed(inside.cumsum(-1), (goal - before).clamp(min=0.0))


def _passed(sums: Tensor, goal: Tensor) -> Tensor:
    """The first place [b] at which the running sums [b, n] are greater than the goal [b]."""
    total = sums[:, -1]
    # Rounding may lift the goal to the total itself, behind which there is no token.
    goal = torch.minimum(goal, torch.nextafter(total, torch.zeros_like(total)))
    # Where a logit is not finite no sum is, and any token will do.
    return torch.searchsorted(sums, goal.unsqueeze(-1), right=True).squeeze(-1).clamp(max=sums.shape[-1] - 1)


def truncate(logits: Tensor, *, top_k: int, top_p: float, min_p: float, prefix: int | None = PREFIX) -> Tensor:
    """Logits with the tokens that must not be drawn at -inf; the likeliest token always stays.

    The filters apply one after another: top_k, then top_p on what is left (arXiv:1904.09751), then min_p
    (arXiv:2407.01082), in the order of transformers' ``generate``.

    Args:
        logits: [b, V]
        top_k: Keep this many; 0 keeps all.
        top_p: Keep the smallest set of the likeliest tokens whose probabilities reach this; 1 keeps all.
        min_p: Keep tokens at least this likely, relative to the likeliest; 0 keeps all.
        prefix: How many of the likeliest tokens are sorted at first for ``top_p``, more where a look at the result
            shows that they are not enough; None sorts all and looks at nothing.

    Returns:
        The logits [b, V].
    """
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        logits = _nucleus(logits, top_p, logits.shape[-1] if prefix is None else prefix)
    if min_p > 0:
        likeliest = logits.amax(-1, keepdim=True)
        logits = logits.masked_fill((logits - likeliest).exp() < min_p, -torch.inf)
    return logits


def _nucleus(logits: Tensor, top_p: float, prefix: int) -> Tensor:
    """Keep the smallest set of the likeliest tokens; of equally likely ones those with the lowest numbers."""
    size = min(prefix, logits.shape[-1])
    largest = logits.topk(size).values
    probabilities = (largest - logits.logsumexp(-1, keepdim=True)).exp()
    before = probabilities.cumsum(-1) - probabilities
    # Where probabilities add up to exactly top_p, rounding must not let in the token behind them.
    count = (before < top_p * (1 - _ROUNDING)).sum(-1, keepdim=True).clamp(min=1)
    # The set may be larger than what was looked at.
    if size < logits.shape[-1] and (count == size).any():
        return _nucleus(logits, top_p, 8 * size)
    least = largest.gather(-1, count - 1)  # [b, size] -> [b, 1]
    over, ties = logits > least, logits == least
    room = count - over.sum(-1, keepdim=True)
    return logits.masked_fill(~(over | (ties & (ties.cumsum(-1) <= room))), -torch.inf)
