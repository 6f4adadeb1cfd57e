"""The room that checkpoints need on the disk: counted before the first step, and told when it is not there."""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

log = logging.getLogger(__name__)

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_VALUES = 65_536
"""Weights of the trial that tells how much state an optimizer has; 8-bit ones have full states below 4,096."""
_PER_TENSOR = 1_000
"""Bytes around each tensor in a file: its name, its place and what pads it to the next 64."""
_SETTINGS = 65_536
"""Bytes of settings, metrics and counters, at most usual."""


class CannotSave(OSError):
    """A file could not be written; the message is one sentence that says which, why, and what is kept."""


def state_bytes(optimizer: Callable[..., torch.optim.Optimizer]) -> float:
    """Bytes of state that an optimizer keeps per trained weight, measured on a few; AdamW's where it cannot be tried.

    Args:
        optimizer: Called with parameters.
    """
    weight = nn.Parameter(torch.zeros(256, _VALUES // 256))
    try:
        made = optimizer([weight])
        weight.grad = torch.zeros_like(weight)
        made.step()
        state = [value for value in made.state.get(weight, {}).values() if isinstance(value, torch.Tensor)]
        return sum(value.nbytes for value in state if value.dim()) / _VALUES
    except Exception:  # a factory of the user's may want more than parameters
        log.debug("the optimizer cannot be tried on a few weights", exc_info=True)
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
    around = _PER_TENSOR * (len(values) + 3 * len(trained)) + _SETTINGS
    return int(weights_bytes(values) + state + around)


def weights_bytes(weights: Any) -> int:
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
    free = _free(directory / "last.ckpt")
    there = {name: (directory / f"{name}.ckpt").exists() for name in ("last", "best")}
    same = all(there.values()) and (directory / "last.ckpt").samefile(directory / "best.ckpt")
    least = checkpoint * (1 if there["last"] else 2)
    usual = checkpoint * (3 - there["last"] - (there["best"] and not same)) + export
    if free < least:
        held = "one more" if there["last"] else "two: the old one stays until the new one is whole"
        raise CannotSave(
            f"{directory}: a checkpoint takes {size(checkpoint)}, and {size(free)} are free; make room for {held}"
        )
    if free < usual:
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
        number, free = _number(error), _free(path)
        # torch's writer of archives and safetensors hide the number of what has stopped them
        hidden = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
        if number in FULL or (number is None and hidden and free < needed):
            raise CannotSave(
                f"{path} was not written ({os.strerror(number or errno.ENOSPC)}): it takes {size(needed)}, and "
                f"{size(free)} are free on its disk; {kept()}"
            ) from error
        if number is None:
            raise
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
    place = next(parent for parent in path.absolute().parents if parent.is_dir())
    return shutil.disk_usage(place).free


def _number(error: BaseException | None) -> int | None:
    """The number of the operating system's error behind an exception, of whichever process it came from."""
    if error is None or isinstance(error, ConnectionError):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    failures: Any = getattr(error, "failures", None)  # of torch.distributed.checkpoint: rank -> (error, traceback)
    causes = [pair[0] for pair in failures.values()] if isinstance(failures, Mapping) else []
    causes.append(error.__cause__ or error.__context__)
    return next((number for cause in causes if (number := _number(cause)) is not None), None)
