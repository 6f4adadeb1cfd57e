"""What a figure was measured on."""

import importlib.metadata
import os
import platform

import torch


def threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def described() -> dict:
    """Hardware and versions."""
    on_gpu = torch.cuda.is_available()
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    versions = {}
    for package in ("torch", "transformers", "lightning", "trl"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "kind": "gpu" if on_gpu else "cpu",
        "device": torch.cuda.get_device_name() if on_gpu else (names[0] if names else platform.processor()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": threads(),
        "python": platform.python_version(),
        **versions,
    }


def _cpuinfo() -> list[str]:
    try:
        with open("/proc/cpuinfo") as file:
            return file.readlines()
    except OSError:
        return []
