"""The checkpoint that a run goes on from, and what has changed since it was written."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning import Trainer

from grpo_lightning.checkpoint.io import read
from grpo_lightning.distributed.sharding import settings_shard, trainer_shards

log = logging.getLogger(__name__)


def chosen(config: Mapping[str, Any], directory: Path, *, directory_given: bool) -> Path | None:
    """The file that ``checkpoint=`` names, or the directory of a sharded checkpoint; None to start anew.

    Args:
        config: The run's settings.
        directory: The run's directory.
        directory_given: Whether the user has named that directory.

    Raises:
        ValueError: The checkpoint is missing or cannot be used so, or another run would be overwritten.
    """
    path = _named(config, directory, directory_given)
    if path is not None and path.is_dir() and config["mode"] != "export" and not settings_shard(config["trainer"]):
        raise ValueError(
            f"checkpoint={path}: a directory of parts; allowed with trainer=fsdp and with mode=export, which joins them"
        )
    return path


def known(checkpoint: Path, trainer: Trainer, *, is_adapter: bool) -> dict[str, Any]:
    """What a checkpoint says of its run: "config", "events" and, from version 0.2 on, "version".

    Args:
        checkpoint: The file, or the directory of a sharded checkpoint, to continue from.
        trainer: The trainer that is to continue it.
        is_adapter: Whether only an adapter is trained.

    Raises:
        ValueError: The optimizer's state in it cannot be given to this trainer's optimizer.
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
    if is_adapter and not state["sharded"] and trainer_shards(trainer):
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


def differences(
    then: Mapping[str, Any], now: Mapping[str, Any], *, same_version: bool = True, prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    """Settings of a checkpoint that the resumed run changed, except those that may change.

    Args:
        then: The settings in the checkpoint.
        now: The settings of the run that continues it.
        same_version: Whether one version of the program wrote both; else keys that only one of them has, and the names
            of what settings build, say nothing of the run.
        prefix: The dotted key of these settings in the whole, with a dot behind it, or nothing.

    Returns:
        (dotted key, value then, value now) of each.
    """
    changed: list[tuple[str, Any, Any]] = []
    keys = {*then, *now} if same_version else {key for key in then if key in now and key != "_target_"}
    for key in sorted(keys - {"run_dir", "checkpoint", "steps", "callbacks", "logger", "trainer", "mode"}):
        before, after = then.get(key), now.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changed += differences(before, after, same_version=same_version, prefix=f"{prefix}{key}.")
        elif before != after:
            changed.append((f"{prefix}{key}", before, after))
    return changed
