"""How long the phases of a step take, and how much memory the process has used."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up seconds by phase, and knows which phase runs now. Phases do not nest."""

    def __init__(self) -> None:
        self.phase = "starting"
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count what runs inside towards ``phase``."""
        self.phase, started = phase, time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def restart(self) -> None:
        """Forget all phases, and measure the whole step from now on."""
        self._seconds, self._started = {}, time.perf_counter()

    def read(self) -> dict[str, float]:
        """The seconds of every phase since ``restart``, and as "step" all the time since then."""
        return self._seconds | {"step": time.perf_counter() - self._started}


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes; 0 where the system does not say (Windows)."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
