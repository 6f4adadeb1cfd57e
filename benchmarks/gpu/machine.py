"""What the machine is, how fast it copies, and how fast it multiplies matrices."""

import importlib.metadata
from typing import Any

import torch

from benchmarks.gpu.tools import device, seconds

_LIBRARIES = ("torch", "triton", "transformers", "lightning", "peft", "trl", "datasets", "hydra-core", "reasoning-gym")


def copy_rate(size: int) -> float:
    """Bytes per second, read and written, of copying ``size`` bytes on the device."""
    source = torch.ones(size // 4, device=device())
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), times=10, warmup=3)


def product_rate(size: int) -> float:
    """Operations per second of a product of two square bf16 matrices of random numbers."""
    left, right = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right, times=10, warmup=3)


def versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def run(reduced: bool) -> dict[str, Any]:
    """Never fails where there is a device."""
    copied = copy_rate(1 << 24 if reduced else 1 << 32)
    product = product_rate(256 if reduced else 8192)
    on_gpu = device().type == "cuda"
    properties = torch.cuda.get_device_properties(0) if on_gpu else None
    return {
        "passed": True,
        "main": f"copies {copied / 1e9:.0f} GB/s, bf16 product {product / 1e12:.3g} TFLOP/s",
        "versions": versions() | {"cuda": torch.version.cuda or "none"},
        "memory_gib": properties.total_memory / 2**30 if properties else None,
        "capability": list(torch.cuda.get_device_capability()) if on_gpu else None,
        "copy_gb_per_second": copied / 1e9,
        "product_tflop_per_second": product / 1e12,
    }
