"""Times of several actions, taken in turns, so that a slow spell of the machine meets all of them."""

import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import Any

import torch


def in_turns(actions: Mapping[str, Callable[[], Any]], *, warmup: int, steps: int) -> dict[str, list[float]]:
    """Seconds of every action in every round after the first ``warmup``.

    An action that returns a float has timed itself.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(warmup + steps):
        for name, action in actions.items():
            started = time.perf_counter()
            told = action()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(told if isinstance(told, float) else time.perf_counter() - started)
    return {name: values[warmup:] for name, values in seconds.items()}


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The lower one, the median and the upper one; a single value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = quantiles(values, n=4)
    return low, middle, high


def ratio(slow: list[float], fast: list[float]) -> dict[str, Any]:
    """Median and quartiles of the ratios of neighbours."""
    ratios = [one / other for one, other in zip(slow, fast, strict=True)]
    low, _, high = quartiles(ratios)
    return {"ratio": median(ratios), "quartiles": [low, high], "steps": len(ratios)}


def told(found: Mapping[str, Any]) -> str:
    """``ratio``'s result as text."""
    low, high = found["quartiles"]
    return f"{found['ratio']:.2f} ({low:.2f} - {high:.2f})"
