"""Attention over streams of groups against each row's own, recompilation, and a data-parallel process of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo.utils
import torch.distributed
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.equality import CONFIGS, tokens
from benchmarks.gpu.models import model, policy, prompts, sampling
from benchmarks.gpu.progress import enough, keep
from benchmarks.gpu.tools import device, seconds
from benchmarks.setting import NATIVE
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.transformer.attention import Stream
from grpo_lightning.types import Sampled

SIZES = (100, 333, 1000, 4096, 16_384)
"""Tokens of the streams that are compared, N."""
OTHERS = (150, 271, 555, 801, 1234, 2222, 3001, 5000, 7777, 9999, 12_345, 16_000)
"""Tokens of the streams that must not be compiled anew after those."""
_ENOUGH = 15.0
"""Seconds that must be left for what comes after another stream."""
HEADS, KEY_HEADS, WIDTH = 12, 2, 128
"""Qwen2.5-1.5B's."""
Groups = tuple[tuple[int, tuple[int, ...]], ...]
BOUND = {torch.bfloat16: 1e-2, torch.float32: 1e-4}


def layout(size: int) -> Groups:
    """Groups of at most 4096 tokens, each a prompt and eight completions of unequal lengths, with N tokens in all."""
    found = []
    for start in range(0, size, 4096):
        here = min(4096, size - start)
        prompt = max(1, here // 8)
        lengths = [(here - prompt) * share // 36 for share in range(1, 9)]
        lengths[0] += here - prompt - sum(lengths)
        found.append((prompt, tuple(lengths)))
    return tuple(found)


def rows(groups: Groups) -> Iterator[tuple[Tensor, int]]:
    """For every prompt and completion the places in the stream of it and all before it, and how many are its own."""
    start = 0
    for prompt, completions in groups:
        head = torch.arange(start, start + prompt)
        yield head, prompt
        start += prompt
        for length in completions:
            yield torch.cat([head, torch.arange(start, start + length)]), length
            start += length


def by_row(query: Tensor, key: Tensor, value: Tensor, groups: Groups) -> Tensor:
    """The same attention [1, N, Hq, D], a row at a time."""
    parts = []
    for places, own in rows(groups):
        chosen = places.to(query.device)
        one = [tensor[:, :, chosen] for tensor in (query, key, value)]
        output = scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
        parts.append(output[:, :, len(places) - own :])
    return torch.cat(parts, 2).transpose(1, 2)


def inputs(size: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value [1, H, N, D] as a model makes them, and slopes [1, N, Hq, D]."""
    torch.manual_seed(size)
    shapes = [(1, size, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    made = [torch.randn(shape, device=device(), dtype=dtype) for shape in shapes]
    return [*(tensor.transpose(1, 2).requires_grad_() for tensor in made[:3]), made[3]]


def attended(size: int, given: list[Tensor]) -> list[Tensor]:
    """Output and gradients by a stream."""
    *leaves, slopes = given
    output = Stream(layout(size), device()).attend(0, *leaves, WIDTH**-0.5)
    return [output.detach(), *torch.autograd.grad(output, leaves, slopes)]


def errors(size: int, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of output and gradients, against float32 of each row."""
    given = inputs(size, dtype)
    found = attended(size, given)
    *leaves, slopes = (tensor.detach().float().requires_grad_() for tensor in given)
    output = by_row(*leaves, layout(size))
    expected = [output.detach(), *torch.autograd.grad(output, leaves, slopes.detach())]
    names = ("output", "query", "key", "value")
    return {
        name: float((one.float() - other).norm() / other.norm())
        for name, one, other in zip(names, found, expected, strict=True)
    }


def graphs() -> int:
    """How many graphs have been compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def recompiled(dtype: torch.dtype, left_out: list[str]) -> int:
    """Graphs that streams of other lengths need after those that have been seen."""
    before = graphs()
    for size in OTHERS:
        if enough(_ENOUGH, f"recompilation at N {size}", left_out):
            attended(size, inputs(size, dtype))
    return graphs() - before


def memory(size: int, dtype: torch.dtype) -> tuple[int, float]:
    """Most bytes above inputs that output and gradients take, mask included, and seconds."""
    given = inputs(size, dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attended(size, given)
    return torch.cuda.max_memory_allocated() - before, seconds(lambda: attended(size, given))


class Scores(nn.Module):
    """Log-probabilities of rows as a module's forward pass, as data parallelism wants it."""

    def __init__(self, given: HFPolicy) -> None:
        super().__init__()
        self.policy = given

    def forward(self, rows: Sampled) -> Tensor:
        return self.policy.logprobs(rows, temperature=1.0)


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group with this process alone, by NCCL on a GPU."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of the host need not be one that can be looked up
    torch.distributed.init_process_group(
        "nccl" if device().type == "cuda" else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def gradient(module: nn.Module, sampled: Sampled) -> Tensor:
    """The gradient of all log-probabilities' sum, [P].

    No caller may keep what is wrapped for data parallelism: as the last that knows a process group it would wait for
    gloo's threads, and those for Python's lock, which it holds.
    """
    module.zero_grad()
    module(sampled).sum().backward()
    return torch.cat([weight.grad.flatten() for weight in module.parameters() if weight.grad is not None])


def data_parallel() -> float:
    """The relative difference that wrapping a policy for data parallelism makes to its gradient."""
    given = policy(model(CONFIGS["qwen2"]))
    sampled = NATIVE.generate(given, prompts(3, 9, 512), group_size=4, sampling=sampling(20), seed=0)
    if not any(tokens(sampled)):
        raise RuntimeError("nothing was sampled")
    with group_of_one():
        alone = gradient(Scores(given), sampled)
        parallel = gradient(DistributedDataParallel(Scores(given), gradient_as_bucket_view=True), sampled)
    if not given.share_prompts:
        raise RuntimeError("prompts are not shared")
    return float((parallel - alone).norm() / alone.norm())


def run(reduced: bool) -> dict[str, Any]:
    """Errors by length, then what is compiled anew, data parallelism, and memory."""
    on_gpu = device().type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    by_size: dict[str, dict[str, float]] = {}
    for size in SIZES[:3] if reduced else SIZES:
        by_size[str(size)] = errors(size, dtype)
        keep(errors=by_size)
    worst = max(max(found.values()) for found in by_size.values())
    figures: dict[str, Any] = {"errors": by_size, "dtype": str(dtype), "not_tested": []}
    main = f"relative error {worst:.1e}"
    anew = 0
    if on_gpu and not reduced:
        anew = figures["compiled_anew"] = recompiled(dtype, figures["not_tested"])
        keep(compiled_anew=anew)
        figures["bytes"], figures["seconds"] = memory(SIZES[-1], dtype)
        main += f", {anew} compiled anew, {figures['bytes'] / 2**20:.0f} MiB at N {SIZES[-1]}"
        keep(main=main, bytes=figures["bytes"])
        torch._dynamo.reset()  # what data parallelism compiles is not counted with the rest
    else:
        figures["not_tested"].append("FlexAttention's backward pass and recompilation: they need a GPU and full size")
    apart = figures["data_parallel"] = data_parallel()
    passed = worst < BOUND[dtype] and not anew and apart < BOUND[torch.float32]
    return {**figures, "passed": passed, "main": f"{main}, data parallel {apart:.0e}"}
