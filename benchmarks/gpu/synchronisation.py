"""How often the host waits for the device while tokens are sampled, and whether a CUDA graph draws the same tokens."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.models import model, policy, prompts, sampling, sized
from benchmarks.gpu.progress import Skipped, keep
from benchmarks.gpu.tools import device, half
from benchmarks.setting import NATIVE
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.types import Sampled

TOKENS = 16
"""The least number of token steps in which the host must not wait."""


def replay() -> Any:
    """The class through which all token steps of the sampler go.

    Of an object ``it`` of this class, ``it(times, version)`` makes ``it._step()`` so many times; on a GPU by replaying
    ``it._graph``, once that is recorded for ``it._version``.
    """
    try:
        from grpo_lightning.sampler.native.sampler import CUDAGraphStep
    except ImportError as error:
        raise Skipped(f"the sampler has no token steps that go without the host looking ({error})") from None
    return CUDAGraphStep


@contextmanager
def watched(steps: Any, *, graph: bool) -> Iterator[list[int]]:
    """Inside, token steps go by CUDA graph or eagerly, and a wait of the host for the device in one is an error.

    Args:
        steps: What `replay` returns.
        graph: Whether they go by graph; then those before a graph is recorded are not watched.

    Yields:
        The number of steps of every call that was watched.
    """
    plain, counts = steps.__call__, list[int]()

    def call(self: Any, times: int, version: int) -> None:
        if graph and (self._graph is None or version != self._version):
            plain(self, times, version)
            return
        counts.append(times)
        torch.cuda.set_sync_debug_mode("error")
        try:
            if graph:
                plain(self, times, version)
            else:
                for _ in range(times):
                    self._step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    steps.__call__ = call
    try:
        yield counts
    finally:
        steps.__call__ = plain


def waits(given: HFPolicy, asked: list[list[int]], length: int) -> int:
    """How often the host waits for the device while it samples so many tokens."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            drawn(given, asked, length)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def drawn(given: HFPolicy, asked: list[list[int]], length: int) -> Sampled:
    return NATIVE.generate(given, asked, group_size=8, sampling=sampling(length), seed=0)


def run(reduced: bool) -> dict[str, Any]:
    """The waits of a token, then the two ways to draw it."""
    given = policy(model(sized(reduced, num_hidden_layers=2)), endless=True)
    asked = prompts(4, 24, 512)
    if device().type != "cuda":
        found = [drawn(given, asked, TOKENS).ids for _ in range(2)]
        return {
            "passed": torch.equal(*found),
            "main": f"{TOKENS} tokens twice, the same ids",
            "not_tested": ["no CUDA graphs on a CPU"],
        }
    long = 8 * TOKENS
    with half():
        drawn(given, asked, long)  # compiles
        per_token = (waits(given, asked, long) - waits(given, asked, 2 * TOKENS)) / (long - 2 * TOKENS)
        keep(waits_per_token=per_token, main=f"{per_token:.2f} waits a token")
        ids, counts = [], []
        for graph in (True, False):
            with watched(replay(), graph=graph) as seen:
                ids.append(drawn(given, asked, long).ids)
            counts.append(sum(seen))
    same = torch.equal(*ids)
    return {
        "passed": same and min(counts) >= TOKENS,
        "watched": counts,
        "main": f"no wait in {counts[0]} steps by graph and {counts[1]} without, ids "
        f"{'equal' if same else 'differ'}; {per_token:.2f} waits a token in all",
    }
