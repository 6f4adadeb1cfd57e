"""What a trainer's settings ask for and whether this machine has it; torch is imported only where it is needed."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Driver files of NVIDIA, AMD and WSL; without any of them Linux has no GPU that PyTorch calls CUDA."""


def default_precision(trainer: Mapping[str, Any]) -> str:
    """The precision for ``trainer.precision=null``: "bf16-mixed" on a CUDA device, else "32-true"."""
    accelerator = trainer.get("accelerator", "auto")
    on_cuda = accelerator == "cuda" or (accelerator in ("auto", "gpu") and has_cuda())
    return "bf16-mixed" if on_cuda else "32-true"


def has_cuda() -> bool:
    """Whether PyTorch finds a CUDA device."""
    if sys.platform == "linux" and not any(Path(device).exists() for device in _DEVICES):
        return False  # without the seconds that torch takes
    import torch

    return torch.cuda.is_available()


def is_first_process() -> bool:
    """Whether this process writes and prints, by the launchers' variables; known before processes are in contact."""
    numbers = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ]
    return not numbers or numbers[0] == "0"


def num_processes(trainer: Mapping[str, Any]) -> int:
    """The number of processes that the settings of a trainer ask for on this machine."""
    import torch

    devices = trainer.get("devices", 1)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        return len(devices)
    if devices in ("auto", -1, "-1"):
        on_gpu = trainer.get("accelerator", "auto") != "cpu"
        return max(torch.cuda.device_count(), 1) if on_gpu else 1
    return int(devices)


def device_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with ``trainer.accelerator``, ``trainer.devices`` and activation offloading on this machine.

    Args:
        config: All settings, whose values satisfy the rules of each key.
    """
    import torch

    trainer = config["trainer"]
    accelerator, devices = trainer.get("accelerator", "auto"), trainer.get("devices", 1)
    has_mps = torch.backends.mps.is_available()
    count = torch.cuda.device_count() or int(has_mps and accelerator in ("auto", "gpu", "mps"))
    if accelerator in ("gpu", "cuda", "mps") and (not count or (accelerator == "mps" and not has_mps)):
        yield f"trainer.accelerator={accelerator}: PyTorch finds no such GPU; use cpu or auto"
    elif accelerator != "cpu" and count and str(devices).isdigit() and int(devices) > count:
        yield f"trainer.devices={devices}: this machine has {count} GPUs"
    if config["policy"].get("activation_offload") and (accelerator == "cpu" or not torch.cuda.device_count()):
        yield (
            "policy.activation_offload=true: activations on a CPU are in CPU RAM already; "
            "policy.gradient_checkpointing=true saves memory there"
        )
