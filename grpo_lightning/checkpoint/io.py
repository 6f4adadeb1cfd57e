"""Reading and writing checkpoint files that a kill at any moment cannot damage."""

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import Strategy
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from grpo_lightning.distributed import parts
from grpo_lightning.distributed.plain import not_plain
from grpo_lightning.distributed.reading import is_archive, only_plain_names, weights_only
from grpo_lightning.output.terminal import one_line


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint beside its destination, then renames it: there is the old file or the new one, whole.

    Lightning's own plugin goes through ``$TMPDIR``, which may lie on another file system, where a rename is a copy. And
    it removes whatever a list in a checkpoint names, which may be a stranger's; here that is what lies where it saves.
    """

    def __init__(self) -> None:
        self._directories: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        destination = Path(path)
        self._directories.add(destination.parent)
        destination.parent.mkdir(parents=True, exist_ok=True)
        staged = destination.with_name(f".{destination.name}.{os.getpid()}")
        try:
            staged.unlink(missing_ok=True)
            with staged.open("xb") as file:  # anew: what lies there already may be a link
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            staged.replace(destination)
        finally:
            staged.unlink(missing_ok=True)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read(Path(path), map_location="cpu" if map_location is None else map_location)

    def remove_checkpoint(self, path: Any) -> None:
        if Path(path).parent in self._directories:
            Path(path).unlink(missing_ok=True)


def read(path: Path, *, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """A checkpoint's content, of a sharded one without the weights; only tensors and plain values are accepted.

    Args:
        path: The file, or the directory of a sharded checkpoint.
        map_location: Where tensors go.
        mmap: Whether tensors are read from the file when they are looked at, rather than now.

    Raises:
        ValueError: The file is no checkpoint of this project's, or damaged.
    """
    file = path / "meta.pt" if path.is_dir() else path
    if file.exists() and not file.is_file():  # such as a pipe, which nobody writes to
        raise ValueError(f"checkpoint={str(path)!r} is no file")
    if file.exists() and not is_archive(file):
        raise ValueError(f"checkpoint={str(path)!r} {_shape(file)}")
    try:
        with only_plain_names():
            checkpoint: Any = torch.load(file, map_location=map_location, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"checkpoint={str(path)!r} holds other objects than tensors and plain values: they are not loaded "
            "(weights_only), since they could run code"
        ) from error
    except FileNotFoundError as error:
        raise ValueError(f"checkpoint={str(path)!r} lacks {file.name}") from error
    except Exception as error:  # torch raises about ten kinds, by what is wrong with a file
        raise ValueError(f"checkpoint={str(path)!r} {_shape(file)}") from error
    if found := not_plain(checkpoint):
        raise ValueError(f"checkpoint={str(path)!r} holds {found}; allowed are dense tensors and plain values")
    step = checkpoint.get("step") if isinstance(checkpoint, dict) else None
    if not isinstance(step, Mapping) or not isinstance(step.get("completed"), int):
        raise ValueError(f"checkpoint={str(path)!r} was not written by this program: it has no step counter")
    if path.is_dir():
        checkpoint.pop("state_dict", None)  # the weights are those in the parts, whatever this file says
    return checkpoint  # type: ignore[no-any-return]


def check(path: Path, *, every_byte: bool = True) -> None:
    """Refuse a checkpoint that is damaged, or holds what could run code; nothing in it is run.

    Args:
        path: The file, or the directory of a sharded checkpoint.
        every_byte: Whether the checksums in a file are compared, for which it is read to its end.

    Raises:
        ValueError: The file or directory is no checkpoint of this project's, or damaged.
    """
    read(path, mmap=path.is_file() and _is_archive(path))
    if path.is_dir():
        if found := parts.problem(path):
            raise ValueError(f"checkpoint={str(path)!r} {found}")
    elif every_byte and (broken := _broken_member(path)):
        raise ValueError(f"checkpoint={str(path)!r} is damaged: its {one_line(broken)[:80]} is not what was written")


def check_before_reading(strategy: Strategy) -> None:
    """Let a strategy of Lightning's `check` checkpoints before it reads them, from now on.

    It reads them by the ways of its plugins and libraries, some of which could run code or write anywhere in memory.
    """
    if "load_checkpoint" in vars(strategy):
        return
    load = strategy.load_checkpoint

    def checked(path: Any, *args: Any, **options: Any) -> Any:
        place = Path(path).expanduser().absolute()  # which Lightning takes for no other one
        check(place)
        with weights_only():
            return load(place, *args, **options)

    strategy.load_checkpoint = checked  # type: ignore[assignment,method-assign]


def weights(path: Path) -> dict[str, Any]:
    """The weights in a checkpoint, whether it is one file or a directory of shards.

    Raises:
        ValueError: It is no checkpoint of this project's, or damaged.
    """
    if not path.is_dir():
        from_file: dict[str, Any] = read(path)["state_dict"]
        return from_file
    if found := parts.problem(path):
        raise ValueError(f"checkpoint={str(path)!r} {found}")
    with parts.values_only(), TemporaryDirectory() as directory:
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


def _shape(file: Path) -> str:
    """What can be said of a file that is no checkpoint, to be read behind its name."""
    size = file.stat().st_size
    with file.open("rb") as content:
        begins = content.read(4) == b"PK\x03\x04"
    if begins and not _is_archive(file):
        return f"is cut off: {size} bytes, without the end of a checkpoint"
    return f"is damaged ({size} bytes)" if begins else f"is no checkpoint ({size} bytes)"


def _is_archive(file: Path) -> bool:
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:  # it says that it is one of several
        return False


def _broken_member(path: Path) -> str | None:
    """The first part of a checkpoint file whose checksum does not fit; None if all do."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        return f"directory ({error})"
