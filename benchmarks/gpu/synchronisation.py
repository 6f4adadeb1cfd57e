"""How often the host waits for the device while tokens are sampled, and whether a CUDA graph draws the same tokens."""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.models import model, policy, prompts, sampling, sized
from benchmarks.gpu.progress import Skipped, keep
from benchmarks.gpu.tools import device, half
from grpo_lightning.policy.hf import HFPolicy

TOKENS = 16
"""What the sampler draws between two looks of the host."""


def token_steps(given: HFPolicy, asked: list[list[int]], *, graph: bool) -> Callable[[], Tensor]:
    """A function that runs 16 token steps without the host looking, by CUDA graph or eagerly, and returns the ids.

    Returns:
        A function without arguments: prompts are read and graphs captured before it is returned; its result [B, 16]
        stays on the device.
    """
    # It needs of the sampler: slots of fixed address with the prompts in them, and its token step, alone or captured.
    if importlib.util.find_spec("grpo_lightning.sampler.static") is None:
        raise Skipped("the sampler has no static token step that could be run without the host looking")
    raise Skipped("the sampler's static token step is not connected to this stage")


def waits(given: HFPolicy, asked: list[list[int]], length: int) -> int:
    """How often the host waits for the device while it samples so many tokens."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            given.sample(asked, group_size=8, sampling=sampling(length), seed=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def drawn(given: HFPolicy, asked: list[list[int]], *, graph: bool) -> Tensor:
    """The ids of 16 token steps, in which a wait of the host is an error."""
    steps = token_steps(given, asked, graph=graph)
    torch.cuda.set_sync_debug_mode("error")
    try:
        return steps()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(reduced: bool) -> dict[str, Any]:
    """The waits of a token, then the two ways to draw it."""
    given = policy(model(sized(reduced, num_hidden_layers=2)), endless=True)
    asked = prompts(4, 24, 512)
    if device().type != "cuda":
        found = [given.sample(asked, group_size=8, sampling=sampling(TOKENS), seed=0).ids for _ in range(2)]
        return {
            "passed": torch.equal(*found),
            "main": f"{TOKENS} tokens twice, the same ids",
            "not_tested": ["no CUDA graphs on a CPU"],
        }
    with half():
        given.sample(asked, group_size=8, sampling=sampling(3 * TOKENS), seed=0)  # compiles and captures
        per_token = (waits(given, asked, 3 * TOKENS) - waits(given, asked, TOKENS)) / (2 * TOKENS)
        keep(waits_per_token=per_token, main=f"the host waits {per_token:.2f} times a token")
        by_graph, eager = (drawn(given, asked, graph=graph) for graph in (True, False))
    same = torch.equal(by_graph, eager)
    return {
        "passed": same,
        "main": f"none in {TOKENS} tokens; {per_token:.2f} waits a token; ids {'equal' if same else 'differ'}",
    }
