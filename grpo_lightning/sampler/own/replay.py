"""The same step many times: one call after another, or on a GPU recorded once and replayed as a CUDA graph."""

from collections.abc import Callable

import torch

WARM_UP = 1
"""Steps that are made before one is recorded, so that what is compiled is compiled and libraries have chosen their
kernels."""


class Replay:
    """Repeats a step that reads and writes the same tensors every time.

    A step on a GPU is a thousand small kernels; queueing them takes the CPU longer than the GPU needs for them. A
    recording is queued as a whole: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs

    Args:
        step: What is repeated.
        device: Where its tensors are; it is recorded on "cuda" only.
    """

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self._step, self._device = step, device
        self._version: int | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, times: int, version: int) -> None:
        """Make the step ``times`` times; ``version`` is another one when it would use other tensors or shapes."""
        if self._device.type != "cuda":
            for _ in range(times):
                self._step()
            return
        if version != self._version:
            self._version, self._graph = version, None  # the old recording's memory is free for the new one
        if self._graph is None:
            times = self._warmed_up(times)
        if times and self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # Recording computes nothing.
            with torch.cuda.graph(self._graph):
                self._step()
        for _ in range(times):
            if self._graph is not None:
                self._graph.replay()

    def _warmed_up(self, times: int) -> int:
        """Make the first steps one by one; returns how many are left."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        first = min(WARM_UP, times)
        with torch.cuda.stream(stream):
            for _ in range(first):
                self._step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return times - first
