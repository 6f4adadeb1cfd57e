"""Times, memory, and the machine that they were measured on."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from statistics import median, quantiles
from typing import Any

import torch


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast() -> AbstractContextManager[Any]:
    """Inside, arithmetic is that of trainer.precision=bf16-mixed."""
    return torch.autocast(device().type, torch.bfloat16, cache_enabled=False)


def num_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Hardware and versions."""
    versions = {}
    for package in ("torch", "transformers", "lightning", "trl"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    name = platform.processor()
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    elif os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            name = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), name)
    about = {"device": name, "instructions": torch.backends.cpu.get_cpu_capability(), "threads": num_threads()}
    return about | {"python": platform.python_version(), **versions}


def settle() -> None:
    """Wait until the device has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def in_turns(actions: Mapping[str, Callable[[], Any]], *, warmup: int, steps: int) -> dict[str, list[float]]:
    """Seconds of every action in every round after the first ``warmup``, so that a slow spell meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(warmup + steps):
        for name, action in actions.items():
            started = time.perf_counter()
            action()
            settle()
            seconds[name].append(time.perf_counter() - started)
    return {name: values[warmup:] for name, values in seconds.items()}


def fastest(action: Callable[[], Any], *, times: int = 3, warmup: int = 1) -> float:
    """The least seconds of an action, of several after the first ones."""
    return min(in_turns({"": action}, warmup=warmup, steps=times)[""])


def ratio(slow: list[float], fast: list[float]) -> dict[str, Any]:
    """Median and quartiles of the ratios of neighbours."""
    ratios = [one / other for one, other in zip(slow, fast, strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"ratio": median(ratios), "quartiles": [low, high], "steps": len(ratios)}


def format_ratio(figures: Mapping[str, Any]) -> str:
    low, high = figures["quartiles"]
    return f"{figures['ratio']:.2f} ({low:.2f} - {high:.2f})"


def start_memory() -> int:
    """Bytes in use now; the peak is counted anew."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak, see proc(5)
    return process_status("VmRSS")


def peak_memory() -> int:
    """The most bytes in use since `start_memory`."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else process_status("VmHWM")


def process_status(name: str) -> int:
    """Bytes that proc(5) tells of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))
