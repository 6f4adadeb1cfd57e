"""What the settings of a trainer ask for, whether this machine has it, and which process this is.

Torch is not imported where there is no GPU, but for the devices.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Of the drivers of NVIDIA, AMD and Windows' Linux; without any of them Linux has no GPU that PyTorch calls CUDA."""


def settings_shard(trainer: Mapping[str, Any]) -> bool:
    """Whether the settings of a trainer are those of ``trainer=fsdp``."""
    strategy = trainer.get("strategy")
    return isinstance(strategy, Mapping) and "FullySharded" in str(strategy.get("_target_"))


def natural_precision(trainer: Mapping[str, Any]) -> str:
    """The precision for a trainer whose settings leave it open.

    Returns:
        "bf16-mixed" where it computes on a CUDA device, as float32 products there are many times slower; else
        "32-true".
    """
    accelerator = trainer.get("accelerator", "auto")
    on_cuda = accelerator == "cuda" or (accelerator in ("auto", "gpu") and has_cuda())
    return "bf16-mixed" if on_cuda else "32-true"


def has_cuda() -> bool:
    """Whether PyTorch finds a CUDA device; this process can still be forked afterwards."""
    if sys.platform == "linux" and not any(Path(device).exists() for device in _DEVICES):
        return False
    import torch

    # By the driver's library rather than by CUDA's, which cannot be used in a forked process once it has been asked.
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def is_first_process() -> bool:
    """Whether this is the process that prints, as far as the variables of launchers say."""
    numbers = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ]
    return not numbers or numbers[0] == "0"


def device_problems(trainer: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a trainer's accelerator and devices on this machine.

    Args:
        trainer: Settings whose values are such as the rules of settings allow.
    """
    import torch

    accelerator, devices = trainer.get("accelerator", "auto"), trainer.get("devices", 1)
    has_mps = torch.backends.mps.is_available()
    count = torch.cuda.device_count() or int(has_mps and accelerator in ("auto", "gpu", "mps"))
    if accelerator == "cpu":
        return
    if accelerator in ("gpu", "cuda", "mps") and (not count or (accelerator == "mps" and not has_mps)):
        yield f"trainer.accelerator={accelerator}: allowed here is cpu or auto: PyTorch finds no GPU"
        return
    named = _named(devices)
    if not count:  # auto, on a CPU
        if named is not None:
            yield f"trainer.devices={devices}: allowed without a GPU is a number of processes, such as 1"
    elif named is not None and max(named) >= count:
        yield f"trainer.devices={devices}: allowed here are numbers from 0 to {count - 1}, of the GPUs of this machine"
    elif named is None and str(devices) not in ("auto", "-1") and int(devices) > count:
        yield f"trainer.devices={devices}: allowed here is at most {count}, the GPUs of this machine"


def offload_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with keeping activations in the computer's memory, on the devices that settings ask for.

    Args:
        config: All settings, of a trainer in which `device_problems` finds none.
    """
    import torch

    if not config["policy"].get("activation_offload"):
        return
    if config["trainer"].get("accelerator", "auto") == "cpu" or not torch.cuda.device_count():
        yield (
            "policy.activation_offload=true: allowed on a CPU is false, whose memory activations are in already; "
            "policy.gradient_checkpointing=true needs less of it"
        )


def _named(devices: Any) -> list[int] | None:
    """The numbers of the devices where they are named one by one, else None."""
    if isinstance(devices, list | tuple):
        return [int(number) for number in devices]
    if isinstance(devices, str) and "," in devices:
        return [int(number) for number in devices.split(",") if number]
    return None
