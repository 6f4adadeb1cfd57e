"""Share of groups with signal at a group size that was not sampled, from groups of another size.

A group has signal if its rewards differ: if all are equal, every advantage is 0.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

_SPREADS = torch.linspace(-7, 7, 281, dtype=torch.float64).sigmoid()
"""Candidates for 1 / (a + b + 1), the share of a value's variance that lies between prompts."""
_DIGITS = 6
"""Rewards that agree in so many decimals are equal: a sum of weights times scores rounds."""


def signal_share(rewards: Tensor, group_size: int) -> float:
    """The expected share of groups of ``group_size`` whose rewards differ.

    Up to the sampled size it is unbiased: g of n completions all have a value that c of the n have with probability
    C(c, g) / C(n, g). Beyond it, each value's probability varies over the prompts like Beta(a, b), whose mean is the
    observed one and whose spread is the likeliest (beta-binomial).

    Args:
        rewards: [P, n] of groups of n completions; NaN (no reward) differs from nothing.
        group_size: Of the groups asked about, at least 2.
    """
    size = rewards.shape[1]
    groups = [Counter(round(value, _DIGITS) for value in row if math.isfinite(value)) for row in rewards.tolist()]
    if group_size <= size:
        equal = sum(_equal_subsets([*group.values()], size, group_size) for group in groups)
        return 1 - equal / (math.comb(size, group_size) * len(groups))
    for group in groups:  # unknown rewards are given to the most frequent value
        value = max(group, key=lambda one: group[one]) if group else 0.0
        group[value] += size - group.total()
    # a value that never fills half of a group hardly ever fills a larger one
    values = {value for group in groups for value, count in group.items() if 2 * count >= size}
    equal_share = sum(_moment([group[value] for group in groups], size, group_size) for value in values)
    # a larger group differs at least as often as a part of it
    return max(signal_share(rewards, size), 1 - equal_share)


def _equal_subsets(counts: Sequence[int], size: int, subset: int) -> int:
    """How many subsets have equal known rewards, with ``counts`` of each reward; the others are unknown."""
    unknown = size - sum(counts)
    # those without any known value are in every value's count, and are counted once
    return sum(math.comb(count + unknown, subset) for count in counts) - (len(counts) - 1) * math.comb(unknown, subset)


def _moment(counts: Sequence[int], size: int, power: int) -> float:
    """E[p ** power] where ``counts`` [P] of ``size`` each are binomial, with p beta distributed."""
    mean = sum(counts) / (size * len(counts))
    if mean in (0, 1):
        return mean
    total = 1 / _SPREADS - 1  # a + b of every candidate
    a, b = mean * total, (1 - mean) * total
    hits = torch.tensor(counts, dtype=torch.float64).unsqueeze(-1)  # [P, 1] against [candidates]
    likelihood = (_log_beta(a + hits, b + size - hits) - _log_beta(a, b)).sum(0)
    return float((_log_beta(a + power, b) - _log_beta(a, b))[likelihood.argmax()].exp())


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
