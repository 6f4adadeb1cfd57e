"""Whether this machine has the devices that settings ask for."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def device_problems(trainer: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a trainer's accelerator and devices on this machine.

    Args:
        trainer: Settings whose values are such as the rules of settings allow.
    """
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
