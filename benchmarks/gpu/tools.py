"""What several stages need: the device, and time on it."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def device() -> torch.device:
    """Where everything is computed."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def half() -> AbstractContextManager[Any]:
    """As a trainer of precision bf16-mixed computes."""
    return torch.autocast(device().type, torch.bfloat16, cache_enabled=False)


def settle() -> None:
    """Wait until the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(action: Callable[[], Any], *, times: int = 3, warmup: int = 1) -> float:
    """The least time that an action takes, of several after the first ones."""
    found = []
    for _ in range(warmup + times):
        settle()
        started = time.perf_counter()
        action()
        settle()
        found.append(time.perf_counter() - started)
    return min(found[warmup:])
