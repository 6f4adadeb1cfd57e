"""Means of a few seeds, and how far they can be trusted."""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """The mean of some values with its confidence interval."""

    n: int
    mean: float
    low: float | None = None
    """The interval's lower end; None of a single value, which says nothing of others."""
    high: float | None = None


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of n >= 1 values with its two-sided 95 % interval by Student's t: mean ± t · s / √n."""
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return Estimate(n, mean)
    half = t_quantile(CONFIDENCE, n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Estimate(n, mean, mean - half, mean + half)


@functools.lru_cache(64)
def t_quantile(confidence: float, degrees: int) -> float:
    """The t that a variable of Student's distribution exceeds in absolute value with probability 1 - ``confidence``.

    For whole degrees of freedom the distribution is a finite sum of powers of the cosine of θ = atan(t / √degrees)
    (Abramowitz and Stegun, 26.7.3 and 26.7.4), which grows with θ and is inverted by bisection.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _within(angle: float, degrees: int) -> float:
    """The probability of |t| < √degrees · tan(angle)."""
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = degrees % 2
    term, total = (cosine if is_odd else 1.0), 0.0
    for power in range(1 if is_odd else 0, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
