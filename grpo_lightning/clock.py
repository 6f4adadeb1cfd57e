"""Seconds of the phases of a step, and the peak memory of the process."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up seconds by phase; phases do not nest.

    On a CUDA device work is only queued: where a phase begins or ends, the device is synchronized, so that queued work
    counts towards the phase that has queued it.
    """

    def __init__(self) -> None:
        self.phase = "starting"
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count what runs inside towards ``phase``."""
        self.phase, started = phase, _now()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + _now() - started

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count seconds of one phase, which has ended, towards another one."""
        self._seconds[source] = self._seconds.get(source, 0.0) - seconds
        self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    def restart(self) -> None:
        """Reset all phases, and measure the step from now on."""
        self._seconds, self._started = {}, _now()

    def read(self) -> dict[str, float]:
        """The seconds of every phase since ``restart``, and as "step" all the time since then."""
        return self._seconds | {"step": _now() - self._started}


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes; 0 where the system does not say (Windows)."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
