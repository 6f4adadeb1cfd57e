"""Checkpoint files: written atomically, read without running code, and sized before the first step."""

import errno
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from grpo_lightning.console import atomic_path
from grpo_lightning.distributed.sharding import explain_read_errors

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OVERHEAD = 65_536
"""Bytes of settings, metrics and counters in a checkpoint."""
_OVERHEAD_PER_TENSOR = 1_000
"""Bytes around each tensor: its name, its entry in the archive and the padding."""


class CannotSave(OSError):
    """A file could not be written; the message says which, why, and what is kept."""


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint beside its destination and renames it: the old file or the new one is there, complete.

    Lightning's own plugin goes through ``$TMPDIR``, which may lie on another file system, where a rename is a copy.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        destination = Path(path)
        destination.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(destination) as place, place.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read(Path(path), map_location="cpu" if map_location is None else map_location)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def read(path: Path, *, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """A checkpoint's content, without the weights of a sharded one; only tensors and plain values are loaded.

    Args:
        path: The file, or the directory of a sharded checkpoint.
        map_location: Where tensors go.
        mmap: Whether tensors are read from the file when they are used, rather than now.

    Raises:
        ValueError: The file is damaged, or no checkpoint of this program.
    """
    file = path / "meta.pt" if path.is_dir() else path
    for part in (file, path / ".metadata") if path.is_dir() else (file,):
        if not part.is_file():
            raise ValueError(f"checkpoint={path} was not written to its end: {part.name} is missing")
    size = file.stat().st_size
    if not zipfile.is_zipfile(file):
        raise ValueError(f"checkpoint={path} is cut off or no checkpoint ({size} bytes)")
    try:
        checkpoint: Any = torch.load(file, map_location=map_location, weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises about ten kinds, depending on what is wrong with a file
        raise ValueError(
            f"checkpoint={path} is damaged ({size} bytes), or holds more than tensors and plain values, which is not "
            "loaded, since it could run code"
        ) from error
    step = checkpoint.get("step") if isinstance(checkpoint, dict) else None
    if not isinstance(step, Mapping) or not isinstance(step.get("completed"), int):
        raise ValueError(f"checkpoint={path} was not written by this program: it has no step counter")
    return checkpoint  # type: ignore[no-any-return]


def read_weights(path: Path) -> dict[str, Any]:
    """The weights in a checkpoint; those of a sharded one are joined.

    Raises:
        ValueError: The file is damaged, or no checkpoint of this program.
    """
    content = read(path)
    if path.is_dir():
        with TemporaryDirectory() as directory, explain_read_errors(path):
            joined = Path(directory) / "joined.pt"
            dcp_to_torch_save(path, joined)
            content = torch.load(joined, weights_only=True)
    weights: dict[str, Any] = content["state_dict"]
    return weights


def checkpoint_bytes(policy: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], *, all_weights: bool) -> int:
    """The predicted size of a checkpoint of the trained weights, or of all, with the optimizer's state."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    values = policy.state_dict().values() if all_weights else trained
    state = sum(weight.numel() for weight in trained) * optimizer_bytes(optimizer)
    return int(weights_bytes(values) + state + _OVERHEAD_PER_TENSOR * (len(values) + 3 * len(trained)) + _OVERHEAD)


def optimizer_bytes(optimizer: Callable[..., torch.optim.Optimizer]) -> float:
    """Bytes of optimizer state per trained weight, measured on a few; AdamW's 8 where that fails."""
    weight = nn.Parameter(torch.zeros(256, 256))  # 8-bit optimizers have full states below 4,096 values
    try:
        trial = optimizer([weight])
        weight.grad = torch.zeros_like(weight)
        trial.step()
        state = [value for value in trial.state.get(weight, {}).values() if isinstance(value, torch.Tensor)]
        return sum(value.nbytes for value in state if value.dim()) / weight.numel()
    except Exception:  # a factory of the user's may want more than parameters
        return 8.0


def weights_bytes(weights: Iterable[Any]) -> int:
    """Bytes of tensors as they are written: tied weights are written once."""
    sizes: dict[Any, int] = {}
    for weight in weights:
        if isinstance(weight, torch.Tensor):
            is_plain = type(weight) in (torch.Tensor, nn.Parameter)  # a sharded one has no address
            key = ((is_plain and weight.data_ptr()) or id(weight), tuple(weight.shape))
            sizes[key] = weight.numel() * weight.element_size()
    return sum(sizes.values())


def check_room(directory: Path, *, checkpoint: int) -> None:
    """Refuse a run whose checkpoints, of so many bytes, do not fit on the disk, before its first step.

    The old checkpoint stays until the new one is complete, so there are two for a moment.

    Raises:
        CannotSave: There is no room for two.
    """
    last, free = directory / "last.ckpt", _free(directory / "last.ckpt")
    if free < checkpoint * (2 - last.exists()):
        needed = "one more" if last.exists() else "two: the old one stays until the new one is complete"
        raise CannotSave(
            f"{directory}: a checkpoint takes {format_bytes(checkpoint)}, and {format_bytes(free)} are free; make room "
            f"for {needed}"
        )


@contextmanager
def explain_write_errors(path: Path, needed: int, *, kept: Callable[[], str]) -> Iterator[None]:
    """Inside, ``path`` is written; an error of the operating system is raised as one sentence.

    Args:
        path: The file or directory.
        needed: The bytes that it takes, about.
        kept: Says what remains as it was.

    Raises:
        CannotSave: It could not be written; its cause is the error.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        failures: Any = getattr(error, "failures", {})  # of torch.distributed.checkpoint: rank -> (error, traceback)
        causes: list[Any] = [error, *(pair[0] for pair in failures.values())]
        causes += [inner for outer in causes if (inner := outer.__cause__ or outer.__context__)]
        number = next((cause.errno for cause in causes if isinstance(cause, OSError) and cause.errno), None)
        free = _free(path)
        # torch's writer of archives and safetensors do not hand on the error number
        hides_number = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
        if number is None and hides_number and free < needed:
            number = errno.ENOSPC
        if number is None or isinstance(error, ConnectionError):
            raise
        sizes = f": it takes {format_bytes(needed)}, and {format_bytes(free)} are free on its disk"
        reason = f"({os.strerror(number)}){sizes if number in _DISK_FULL else ''}"
        raise CannotSave(f"{path} was not written {reason}; {kept()}") from error


def format_bytes(count: float) -> str:
    """A number of bytes with its unit, rounded to three digits."""
    for unit, name in ((1, "bytes"), (1e3, "kB"), (1e6, "MB")):
        if count < 999.5 * unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e9:.3g} GB"


def _free(path: Path) -> int:
    return shutil.disk_usage(next(parent for parent in path.absolute().parents if parent.is_dir())).free
