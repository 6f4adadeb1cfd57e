"""From which checkpoint a run goes on, and what is different then."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from grpo_lightning.callbacks.checkpoint import read
from grpo_lightning.config.contradiction import shards_weights
from grpo_lightning.step import StepModule

log = logging.getLogger(__name__)


def chosen(config: Mapping[str, Any], directory: Path, *, directory_given: bool) -> Path | None:
    """The file that ``checkpoint=`` names, or directory of a sharded one; None to start anew.

    Raises:
        ValueError: It is missing or cannot be used so, or a run would be overwritten.
    """
    path = _named(config, directory, directory_given)
    if path is not None and path.is_dir() and config["mode"] != "export" and not shards_weights(config["trainer"]):
        raise ValueError(
            f"checkpoint={path}: a directory of parts; allowed with trainer=fsdp and with mode=export, which joins them"
        )
    return path


def known(checkpoint: Path, module: StepModule, trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint says of its run: "config" and "events".

    Raises:
        ValueError: Its optimizer's state cannot be given to this trainer's.
    """
    content = read(checkpoint)
    run: dict[str, Any] = content["run"]
    state = content["step"]
    if state["processes"] != trainer.world_size:
        log.warning(
            "the checkpoint is of a run in %d processes, which now goes on in %d: the same up to rounding",
            state["processes"],
            trainer.world_size,
        )
    if module.base is not None and not state["sharded"] and isinstance(trainer.strategy, ModelParallelStrategy):
        raise ValueError(
            f"checkpoint={checkpoint}: an adapter that another trainer has trained; allowed with trainer=fsdp is one "
            "of its own, whose optimizer names weights otherwise"
        )
    return run


def _named(config: Mapping[str, Any], directory: Path, directory_given: bool) -> Path | None:
    given = config["checkpoint"]
    if given is None:
        if config["mode"] == "fit" and (directory / "checkpoints" / "last.ckpt").exists():
            raise ValueError(
                f"{directory} already holds a run: checkpoint=last continues it, another hydra.run.dir= starts anew"
            )
        return None
    if given != "last":
        if "://" in given:
            raise ValueError(f"checkpoint={given}: allowed is a local file; download it first")
        if not Path(given).exists():
            raise ValueError(f"checkpoint={given}: no such file")
        own = directory / "checkpoints"
        if config["mode"] == "fit" and (own / "last.ckpt").exists() and Path(given).resolve().parent != own.resolve():
            raise ValueError(
                f"{directory} already holds another run than checkpoint={given}: name another hydra.run.dir="
            )
        return Path(given)
    if not directory_given:
        raise ValueError("checkpoint=last: name the run to continue with hydra.run.dir=DIRECTORY")
    path = directory / "checkpoints" / "last.ckpt"
    if path.is_symlink() and not path.exists():
        raise ValueError(f"checkpoint=last: {path} leads to {path.readlink()}, which is gone")
    if path.exists():
        return path
    if config["mode"] != "fit":
        raise ValueError(f"checkpoint=last: there is no {path}")
    log.warning("checkpoint=last: there is no %s yet, starting from the beginning", path)
    return None


def differences(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Settings of a checkpoint that the resumed run changed: (key, then, now). Those that may change are left out."""
    found: list[tuple[str, Any, Any]] = []
    for key in sorted({*then, *now} - {"run_dir", "checkpoint", "steps", "callbacks", "logger", "trainer", "mode"}):
        one, other = then.get(key), now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += differences(one, other, f"{prefix}{key}.")
        elif one != other:
            found.append((f"{prefix}{key}", one, other))
    return found
