"""Checkpoint files: written atomically, read without running code, and sized before the first step."""

import errno
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
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
from grpo_lightning.distributed.strategies import explain_read_errors

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


def checkpoint_bytes(policy: nn.Module, optimizer: Any, *, all_weights: bool) -> int:
    """The predicted size of a checkpoint of the trained weights, or of all, with AdamW's state of 8 or 32 bits."""
    weights = list(policy.parameters())  # tied ones once, as they are written
    state = sum(weight.numel() for weight in weights if weight.requires_grad) * (2 if "8bit" in repr(optimizer) else 8)
    return state + sum(weight.nbytes for weight in weights if all_weights or weight.requires_grad)


def room_problem(directory: Path, *, checkpoint: int) -> str | None:
    """Why checkpoints of so many bytes do not fit on the disk, if so.

    The old checkpoint stays until the new one is complete, so there are two for a moment.
    """
    last, free = directory / "last.ckpt", _free(directory / "last.ckpt")
    if free >= checkpoint * (2 - last.exists()):
        return None
    needed = "one more" if last.exists() else "two: the old one stays until the new one is complete"
    sizes = f"a checkpoint takes {_format_bytes(checkpoint)}, and {_format_bytes(free)} are free"
    return f"{directory}: {sizes}; make room for {needed}"


@contextmanager
def explain_write_errors(path: Path, needed: int, *, kept: str) -> Iterator[None]:
    """Context of writing ``path``, about ``needed`` bytes, that reports a full disk in one sentence.

    Args:
        path: The file or directory.
        needed: The bytes that it takes, about.
        kept: What remains as it was, for the message.

    Raises:
        CannotSave: The disk is full; the cause is the error.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        free = _free(path)
        # Neither torch's writers nor safetensors hand on the error number.
        if getattr(error, "errno", None) not in _DISK_FULL and free >= needed:
            raise
        sizes = f"it takes {_format_bytes(needed)}, and {_format_bytes(free)} are free"
        raise CannotSave(f"{path} was not written, the disk is full: {sizes}; {kept}") from error


def _format_bytes(count: float) -> str:
    """A number of bytes with its unit, rounded to three digits."""
    for unit in ("bytes", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _free(path: Path) -> int:
    return shutil.disk_usage(next(parent for parent in path.absolute().parents if parent.is_dir())).free
