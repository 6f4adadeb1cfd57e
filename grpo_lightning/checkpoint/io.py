"""Reading and writing checkpoint files that a kill at any moment cannot damage."""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint beside its destination, then renames it: there is the old file or the new one, whole.

    Lightning's own plugin goes through ``$TMPDIR``, which may lie on another file system, where a rename is a copy.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        destination = Path(path)
        destination.parent.mkdir(parents=True, exist_ok=True)
        staged = destination.with_name(f".{destination.name}.{os.getpid()}")
        try:
            with staged.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            staged.replace(destination)
        finally:
            staged.unlink(missing_ok=True)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read(Path(path), map_location="cpu" if map_location is None else map_location)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def read(path: Path, *, map_location: Any = "cpu") -> dict[str, Any]:
    """A checkpoint's content, of a sharded one without the weights; only tensors and plain values are accepted.

    Raises:
        ValueError: The file is no checkpoint of this project's.
    """
    file = path / "meta.pt" if path.is_dir() else path
    checkpoint: dict[str, Any] = torch.load(file, map_location=map_location, weights_only=True)
    if "step" not in checkpoint:
        raise ValueError(f"checkpoint={str(path)!r} was not written by this program: it has no step counter")
    return checkpoint


def weights(path: Path) -> dict[str, Any]:
    """The weights in a checkpoint, whether it is one file or a directory of shards."""
    if not path.is_dir():
        from_file: dict[str, Any] = read(path)["state_dict"]
        return from_file
    with TemporaryDirectory() as directory:
        whole = Path(directory) / "whole.pt"
        dcp_to_torch_save(path, whole)
        content: dict[str, Any] = torch.load(whole, weights_only=True)
    joined: dict[str, Any] = content["state_dict"]
    return joined


def module_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What a GRPO module saved of itself: the values of "varying" numbers and the groups "carried" over.

    Files of version 0.1 had other names for these; supervised training leaves none.
    """
    state = checkpoint.get("grpo", {})
    values = {
        path.replace("rollout.judge.rewards.", "reward.")
        .replace("rollout.judge.", "rollout.")
        .replace("rollout.sampling.", "rollout."): value
        for path, value in state.get("adapted", {}).items()
    }
    return {"varying": state.get("varying", values), "carried": state.get("carried", state.get("surplus"))}
