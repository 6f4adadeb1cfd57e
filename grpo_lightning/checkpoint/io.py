"""Reading and writing checkpoint files that a kill at any moment cannot damage."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from grpo_lightning.distributed.sharding import readable_parts
from grpo_lightning.output.files import staged


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint beside its destination, then renames it: there is the old file or the new one, whole.

    Lightning's own plugin goes through ``$TMPDIR``, which may lie on another file system, where a rename is a copy.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        destination = Path(path)
        destination.parent.mkdir(parents=True, exist_ok=True)
        with staged(destination) as place, place.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read(Path(path), map_location="cpu" if map_location is None else map_location)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def read(path: Path, *, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """A checkpoint's content, of a sharded one without the weights; only tensors and plain values are loaded.

    Args:
        path: The file, or the directory of a sharded checkpoint.
        map_location: Where tensors go.
        mmap: Whether tensors are read from the file when they are looked at, rather than now.

    Raises:
        ValueError: The file is no checkpoint of this project's, or damaged.
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
    except Exception as error:  # torch raises about ten kinds, by what is wrong with a file
        raise ValueError(
            f"checkpoint={path} is damaged ({size} bytes), or holds more than tensors and plain values, which is not "
            "loaded, since it could run code"
        ) from error
    step = checkpoint.get("step") if isinstance(checkpoint, dict) else None
    if not isinstance(step, Mapping) or not isinstance(step.get("completed"), int):
        raise ValueError(f"checkpoint={path} was not written by this program: it has no step counter")
    return checkpoint  # type: ignore[no-any-return]


def weights(path: Path) -> dict[str, Any]:
    """The weights in a checkpoint, whether it is one file or a sharded one, whose parts are joined.

    Raises:
        ValueError: It is no checkpoint of this project's, or damaged.
    """
    content = read(path)
    if path.is_dir():
        with TemporaryDirectory() as directory, readable_parts(path):
            whole = Path(directory) / "whole.pt"
            dcp_to_torch_save(path, whole)
            content = torch.load(whole, weights_only=True)
    state: dict[str, Any] = content["state_dict"]
    return state
