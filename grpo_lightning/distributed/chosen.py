"""What the settings of a trainer ask for, and which process this is; read without torch where there is no GPU."""

import os
import sys
from collections.abc import Mapping
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
