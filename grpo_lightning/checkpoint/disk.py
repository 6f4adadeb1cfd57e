"""The room that checkpoints need on the disk: counted before the first step, and told when it is not there."""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

log = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AROUND = 65_536
"""Bytes of settings, metrics and counters, at most usual."""
_PER_TENSOR = 1_000
"""Bytes around each tensor in a file: its name, its place and what pads it to the next 64."""


class CannotSave(OSError):
    """A file could not be written; the message is one sentence that says which, why, and what is kept."""


def state_bytes(optimizer: Callable[..., torch.optim.Optimizer]) -> float:
    """Bytes of state that an optimizer keeps per trained weight, measured on a few; AdamW's where it cannot be tried.

    Args:
        optimizer: Called with parameters.
    """
    weight = nn.Parameter(torch.zeros(256, 256))  # 8-bit optimizers have full states below 4,096 values
    try:
        made = optimizer([weight])
        weight.grad = torch.zeros_like(weight)
        made.step()
        state = [value for value in made.state.get(weight, {}).values() if isinstance(value, torch.Tensor)]
        return sum(value.nbytes for value in state if value.dim()) / weight.numel()
    except Exception:  # a factory of the user's may want more than parameters
        return 8.0


def checkpoint_bytes(policy: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], *, all_weights: bool) -> int:
    """The size of a checkpoint: weights, the optimizer's state, and what is written around them.

    Args:
        policy: Whose trained weights have a state.
        optimizer: Called with parameters.
        all_weights: Whether weights that are not trained are saved, too.
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    values = policy.state_dict().values() if all_weights else trained
    state = sum(weight.numel() for weight in trained) * state_bytes(optimizer)
    return int(weights_bytes(values) + state + _PER_TENSOR * (len(values) + 3 * len(trained)) + _AROUND)


def weights_bytes(weights: Iterable[Any]) -> int:
    """Bytes of tensors as they are written: what several names lead to is written once."""
    places: dict[Any, int] = {}
    for one in weights:
        if isinstance(one, torch.Tensor):
            is_plain = type(one) in (torch.Tensor, nn.Parameter)  # a sharded one has no place of its own
            places[(is_plain and one.data_ptr()) or id(one), tuple(one.shape)] = one.numel() * one.element_size()
    return sum(places.values())


def check_room(directory: Path, *, checkpoint: int, export: int = 0) -> None:
    """Refuse a run whose checkpoints the disk cannot hold, before its first step.

    The old checkpoint stays until the new one is whole, so there are two for a moment, and three with the best one.

    Args:
        directory: Where checkpoints go; it may not exist yet.
        checkpoint: Bytes of one.
        export: Bytes of what is exported at the end.

    Raises:
        CannotSave: There is not even room for two.
    """
    last, best, free = directory / "last.ckpt", directory / "best.ckpt", _free(directory / "last.ckpt")
    has_best = best.exists() and not (last.exists() and last.samefile(best))
    if free < checkpoint * (2 - last.exists()):
        held = "one more" if last.exists() else "two: the old one stays until the new one is whole"
        raise CannotSave(
            f"{directory}: a checkpoint takes {size(checkpoint)}, and {size(free)} are free; make room for {held}"
        )
    if free < (usual := checkpoint * (3 - last.exists() - has_best) + export):
        log.warning(
            "%s: %s are free, and the run may need %s: last.ckpt, best.ckpt and the one in writing take %s each%s",
            *(directory, size(free), size(usual), size(checkpoint), f", the export {size(export)}" if export else ""),
        )


@contextmanager
def telling(path: Path, needed: int, *, kept: Callable[[], str]) -> Iterator[None]:
    """Inside, ``path`` is written; what prevents it is raised as one sentence.

    Args:
        path: The file or directory.
        needed: The bytes that it takes, about.
        kept: What remains as it was, in words.

    Raises:
        CannotSave: It could not be written; its cause is the error.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        failures: Any = getattr(error, "failures", {})  # of torch.distributed.checkpoint: rank -> (error, traceback)
        causes: list[Any] = [error, *(pair[0] for pair in failures.values())]
        causes += [inner for one in causes if (inner := one.__cause__ or one.__context__)]
        number = next((one.errno for one in causes if isinstance(one, OSError) and one.errno), None)
        free = _free(path)
        # torch's writer of archives and safetensors hide the number of what has stopped them
        if (
            number is None
            and free < needed
            and (isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError")
        ):
            number = errno.ENOSPC
        if number is None or isinstance(error, ConnectionError):
            raise
        if number in _FULL:
            raise CannotSave(
                f"{path} was not written ({os.strerror(number)}): it takes {size(needed)}, and {size(free)} are free "
                f"on its disk; {kept()}"
            ) from error
        raise CannotSave(f"{path} cannot be written: {os.strerror(number)}; {kept()}") from error


def size(count: float) -> str:
    """Bytes in words: to the byte while they are few, then with three digits."""
    if count < 10_000:
        return f"{int(count)} bytes"
    for unit, name in ((1e3, "kB"), (1e6, "MB")):
        if count < 999.5 * unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e9:.3g} GB"


def _free(path: Path) -> int:
    return shutil.disk_usage(next(parent for parent in path.absolute().parents if parent.is_dir())).free
