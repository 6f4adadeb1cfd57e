"""How many groups teach at a group size that was not sampled, from groups of another size.

A group teaches if its rewards differ: if all are equal, every advantage is 0. The chance that n completions drawn for a
prompt hold c of one value and that g of them all have it is C(c, g) / C(n, g), so that up to the sampled size nothing
is assumed. For larger groups each value's probability is taken to be beta distributed over the prompts.
"""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

_SPREADS = torch.linspace(-7, 7, 281, dtype=torch.float64).sigmoid()
"""Candidates for 1 / (a + b + 1), the share of a value's variance that lies between prompts."""
_DIGITS = 6
"""Rewards that agree in so many decimals are equal: a sum of weights times scores rounds."""


def teaching_share(rewards: Tensor, group_size: int) -> float:
    """The expected share of groups of ``group_size`` whose rewards differ.

    Unbiased for sizes up to that of the given groups. Beyond it, the probability of each reward value varies over the
    prompts like Beta(a, b), whose mean is the observed one and whose spread is the likeliest (beta-binomial).

    Args:
        rewards: [P, n] of groups of n completions; NaN, which counts as its group's mean, differs from nothing.
        group_size: Of the groups asked about, at least 2.
    """
    counts = [Counter(round(value, _DIGITS) for value in row if math.isfinite(value)) for row in rewards.tolist()]
    size = rewards.shape[1]
    if group_size <= size:
        equal = [_equal_subset(list(found.values()), size, group_size) for found in counts]
        return float(1 - sum(equal) / len(equal))
    # a larger group differs at least as often as a part of it
    return max(teaching_share(rewards, size), 1 - _equal_beyond(counts, size, group_size))


def _equal_subset(counts: Sequence[int], size: int, subset: int) -> Fraction:
    """The share of the subsets whose known values are all equal; ``counts`` of each value, the others are unknown."""
    unknown = size - sum(counts)
    # those without any known value are in every value's count, and are counted once
    equal = sum(math.comb(count + unknown, subset) for count in counts) - (len(counts) - 1) * math.comb(unknown, subset)
    return Fraction(equal, math.comb(size, subset))


def _equal_beyond(counts: Sequence[Counter[float]], size: int, group_size: int) -> float:
    """The chance that all of a larger group are equal: the sum over values of E[p ** group_size]."""
    filled = [_with_unknown(found, size) for found in counts]
    # a value that never fills half of a group hardly ever fills a larger one
    values = {value for found in filled for value, count in found.items() if 2 * count >= size}
    return sum(_moment([found[value] for found in filled], size, group_size) for value in values)


def _with_unknown(found: Counter[float], size: int) -> Counter[float]:
    """Unknown rewards are given to the most frequent value: they differ from nothing."""
    unknown = size - sum(found.values())
    value = max(found, key=lambda one: found[one]) if found else 0.0
    return found + Counter({value: unknown})


def _moment(counts: Sequence[int], size: int, power: int) -> float:
    """E[p ** power] where ``counts`` [P] of ``size`` each are binomial with p beta distributed."""
    mean = sum(counts) / (size * len(counts))
    if mean in (0, 1):
        return mean
    total = 1 / _SPREADS - 1  # a + b of every candidate
    a, b = mean * total, (1 - mean) * total
    hits = torch.tensor(counts, dtype=torch.float64).unsqueeze(-1)  # [P, 1] against [candidates]
    likelihood = (_log_beta(a + hits, b + size - hits) - _log_beta(a, b)).sum(0)
    best = int(likelihood.argmax())
    return float((_log_beta(a + power, b) - _log_beta(a, b))[best].exp())


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
