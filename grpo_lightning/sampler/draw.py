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


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row, with its log-probability and the entropy under logits / temperature, before any truncation.

    The token is the first with which the probabilities add up to more than the row's random number.

    Args:
        logits: [b, V]; may be overwritten.
        sampling: How the token is drawn.
        uniform: [b] in [0, 1).

    Returns:
        Tokens [b], log-probabilities [b] and entropies [b], in nats.

    Raises:
        NotFinite: A logit is NaN or infinite, or none of a row is finite.
    """
    # In 16 bits the probabilities of a large vocabulary would not add up to 1.
    logits = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    # The largest becomes 0, so that no exponential overflows.
    shifted = logits - logits.amax(-1, keepdim=True)
    weights = shifted.exp()
    total = weights.sum(-1)
    if not total.isfinite().all():
        raise NotFinite("the policy's logits are not finite")
    log_total = total.log()
    mean = dot(weights, shifted)
    # 0 * -inf, where the model rules tokens out. Masking costs another pass over all logits, so only then.
    if mean.isnan().any():
        mean = dot(weights, shifted.masked_fill(weights == 0, 0.0))
    entropy = log_total - mean / total
    if sampling.temperature == 0:
        tokens = shifted.argmax(-1)
    else:
        if sampling.truncated:
            kept = truncate(shifted, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
            weights = weights.masked_fill_(kept == -torch.inf, 0.0)
        tokens = inverse_cdf(weights, uniform)
    # [b, V] -> [b, 1] -> [b]
    return tokens, shifted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_total, entropy


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the running sum of the weights passes ``uniform`` times their total.

    Args:
        weights: [b, V] not negative, one of each row positive.
        uniform: [b] in [0, 1).

    Returns:
        The tokens [b]; one of weight 0 is never drawn.
    """
    # Not torch.multinomial, whose random numbers depend on the device and on the rows that are drawn together.
    sums = weights.cumsum(-1)
    total = sums[:, -1]
    # Rounding may lift the product to the total itself, behind which there is no token.
    below = torch.nextafter(total, torch.zeros_like(total))
    goal = torch.minimum(uniform.to(total) * total, below)
    return torch.searchsorted(sums, goal.unsqueeze(-1), right=True).squeeze(-1)


def truncate(logits: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Logits with the tokens that must not be drawn at -inf; the likeliest token always stays.

    The filters apply one after another: top_k, then top_p on what is left (arXiv:1904.09751), then min_p
    (arXiv:2407.01082), in the order of transformers' ``generate``.

    Args:
        logits: [b, V]
        top_k: Keep this many; 0 keeps all.
        top_p: Keep the smallest set of the likeliest tokens whose probabilities reach this; 1 keeps all.
        min_p: Keep tokens at least this likely, relative to the likeliest; 0 keeps all.

    Returns:
        The logits [b, V].
    """
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        logits = _nucleus(logits, top_p, PREFIX)
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
