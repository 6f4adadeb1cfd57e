"""The checkpoint that a run goes on from, and what has changed since it was written."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning import Trainer

from grpo_lightning.checkpoint.command import continue_command
from grpo_lightning.checkpoint.io import read
from grpo_lightning.config.consistency import uses_fsdp
from grpo_lightning.distributed.sharding import trainer_shards

log = logging.getLogger(__name__)


def is_own(checkpoint: Path, directory: Path) -> bool:
    """Whether a checkpoint is one of the run in this directory."""
    return checkpoint.absolute().parent.resolve() == (directory / "checkpoints").resolve()


def chosen(
    config: Mapping[str, Any], directory: Path, *, directory_given: bool, overrides: Sequence[str] = ()
) -> Path | None:
    """The file that ``checkpoint=`` names, or the directory of a sharded checkpoint; None to start anew.

    Args:
        config: The run's settings.
        directory: The run's directory.
        directory_given: Whether the user has named that directory.
        overrides: What the user changed, for the commands that are offered.

    Raises:
        ValueError: The checkpoint is missing, damaged or cannot be used so, or another run would be overwritten.
    """
    path = _named(config, directory, directory_given, overrides)
    if path is None:
        return None
    if path.is_dir() and config["mode"] != "export" and not uses_fsdp(config["trainer"]):
        raise ValueError(
            f"checkpoint={path} is a sharded checkpoint: use trainer=fsdp, or mode=export, which joins its parts"
        )
    places = (directory.resolve(), (directory / "checkpoints").resolve())
    if path.is_dir() and not any(path.resolve().is_relative_to(place) for place in places):
        raise ValueError(
            f"checkpoint={path}: sharded checkpoints hold pickles and are read from this run's own directory only: "
            "move it there, or export it where it was made"
        )
    try:
        read(path, mmap=True)
    except ValueError as error:
        raise ValueError(f"{error}; {_offer(path.parent, directory, overrides)}") from error
    return path


def what_is_saved(mode: str, directory: Path, overrides: Sequence[str]) -> str:
    """What there is of a run that has just been ended, and the command that continues it.

    Args:
        mode: fit, validate, export or preflight.
        directory: The run's directory.
        overrides: What it was started with.
    """
    if mode != "fit":
        return "nothing is lost but the time"
    last = directory / "checkpoints" / "last.ckpt"
    if not last.exists():
        return "nothing was saved yet"
    return f"step {_step(last)} is saved; continue with: {continue_command(overrides, directory)}"


def known(checkpoint: Path, trainer: Trainer, *, is_adapter: bool) -> dict[str, Any]:
    """What a checkpoint says of its run: "config", "events" and, from version 0.2 on, "version".

    Args:
        checkpoint: The file, or the directory of a sharded checkpoint, to continue from.
        trainer: The trainer that is to continue it.
        is_adapter: Whether only an adapter is trained.

    Raises:
        ValueError: The optimizer's state in it cannot be given to this trainer's optimizer, or it says nothing of its
            run.
    """
    content = read(checkpoint, mmap=True)
    if "run" not in content:
        raise ValueError(
            f"checkpoint={checkpoint} does not say which settings its run had, as it was written without "
            "callbacks.checkpoint: mode=fit needs one that does"
        )
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
            f"checkpoint={checkpoint} is of an adapter trained without trainer=fsdp, whose optimizer names weights "
            "otherwise: continue it without trainer=fsdp"
        )
    return run


def same_optimizer(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to continue with an optimizer of another kind, which could not take over the state of the first one.

    Args:
        then: The settings in the checkpoint.
        now: The settings of the run that continues it.

    Raises:
        ValueError: The optimizers are of different classes; that one is "paged" makes none.
    """
    before, after = (str((config.get("optimizer") or {}).get("_target_", "")) for config in (then, now))
    kinds = {target.rpartition(".")[2].removeprefix("Paged") for target in (before, after)}
    if before and after and len(kinds) > 1:
        raise ValueError(
            f"optimizer._target_={after} cannot continue the run of a checkpoint of {before}: use that optimizer"
        )


def so_far(checkpoint: Path | None, directory: Path) -> tuple[int, float, str | None]:
    """The steps that a run has made when it goes on from a checkpoint, their seconds, and when the first began.

    Args:
        checkpoint: The file, or the directory of a sharded checkpoint; None at a run's beginning.
        directory: The run directory, whose summary may know of more seconds.
    """
    if checkpoint is None:
        return 0, 0.0, None
    content = read(checkpoint, mmap=True)
    seconds = [float(content.get("run", {}).get("seconds", 0.0))]  # not known of version 0.1
    if is_own(checkpoint, directory):
        seconds.append(float(_summary(directory).get("seconds") or 0.0))
    return int(content["step"]["completed"]), max(seconds), content.get("run", {}).get("started")


def ended(config: Mapping[str, Any], directory: Path) -> dict[str, Any] | None:
    """The summary of a run that ``checkpoint=last`` would continue, if it has no step left to make; else None.

    Args:
        config: The run's settings.
        directory: The run's directory.
    """
    last = directory / "checkpoints" / "last.ckpt"
    completed, summary = _step(last) if config["checkpoint"] == "last" else None, _summary(directory)
    # killed after its last step, a run has yet to export and to be summed up
    is_summed_up = summary.get("status") == "finished" and summary.get("steps") == completed
    return summary if completed is not None and is_summed_up and completed >= config["steps"] else None


def _summary(directory: Path) -> dict[str, Any]:
    try:
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _named(config: Mapping[str, Any], directory: Path, directory_given: bool, overrides: Sequence[str]) -> Path | None:
    given, fits = config["checkpoint"], config["mode"] == "fit"
    own = directory / "checkpoints"
    last = own / "last.ckpt"
    _refuse_another(config, directory, None if given in (None, "last") else Path(given))
    if given is None:
        _refuse_start(config, directory, overrides)
        if fits and last.exists():
            raise ValueError(
                f"{directory} already holds a run: checkpoint=last continues it, another hydra.run.dir= starts anew"
            )
        if fits and _others(own):
            raise ValueError(f"{directory} already holds a run: {_offer(own, directory, overrides)}")
        return None
    if given == "last":
        if not directory_given:
            raise ValueError("checkpoint=last: name the run to continue with hydra.run.dir=DIRECTORY")
        if last.exists():
            return last
        if _others(own):
            raise ValueError(f"checkpoint=last: there is no {last}; {_offer(own, directory, overrides)}")
        if not fits or last.is_symlink():
            raise ValueError(f"checkpoint=last: there is no {last}")
        log.warning("checkpoint=last: there is no %s yet, starting from the beginning", last)
        return None
    path = Path(given)
    if "://" in given:
        raise ValueError(f"checkpoint={given} is not a local file: download it first")
    if not path.exists():
        raise ValueError(f"checkpoint={given}: no such file")
    for place in (path, path / "checkpoints"):
        if file := next((place / name for name in ("last.ckpt", "best.ckpt") if (place / name).exists()), None):
            raise ValueError(f"checkpoint={given} is a directory of checkpoints: name one of them, checkpoint={file}")
    if fits and not is_own(path, directory) and (last.exists() or _others(own)):
        raise ValueError(f"{directory} already holds another run than checkpoint={given}: name another hydra.run.dir=")
    return path


def _refuse_start(config: Mapping[str, Any], directory: Path, overrides: Sequence[str]) -> None:
    """Refuse to export or measure the policy that the settings name where a run's own is meant.

    An export of that run would be replaced by one of the policy that it began with.
    """
    mode, own = config["mode"], directory / "checkpoints"
    words = [word.lstrip("+") for word in overrides]
    is_meant = any(word.startswith("checkpoint=") for word in words)
    is_meant |= mode == "validate" and any(word.startswith(("policy=", "policy.path=")) for word in words)
    if mode not in ("export", "validate") or is_meant or not ((own / "last.ckpt").exists() or _others(own)):
        return
    last = "last" if (own / "last.ckpt").exists() else _others(own)[0]
    verb = "exports" if mode == "export" else "measures"
    raise ValueError(
        f"{directory} holds a run: checkpoint={last} {verb} its policy, and checkpoint=null the one that the settings "
        "name"
    )


def _refuse_another(config: Mapping[str, Any], directory: Path, given: Path | None) -> None:
    """Refuse a directory of checkpoints other than the run's own that holds those of another run."""
    named = ((config.get("callbacks") or {}).get("checkpoint") or {}).get("directory")
    if config["mode"] != "fit" or not isinstance(named, str):
        return
    place = Path(named)
    if place.resolve() in {(directory / "checkpoints").resolve(), given and given.absolute().parent.resolve()}:
        return
    if (place / "last.ckpt").exists() or _others(place):
        raise ValueError(
            f"callbacks.checkpoint.directory={named} holds the checkpoints of a run: name an empty directory, or "
            f"continue that run by checkpoint={place / 'last.ckpt'}"
        )


def _others(directory: Path) -> list[Path]:
    """The checkpoints in a directory but ``last.ckpt``, the farthest first; those of step 0 in parts do not count."""
    found = {path: _step(path) for path in directory.glob("*.ckpt") if path.name != "last.ckpt"}
    listed = [path for path, step in found.items() if path.name == "best.ckpt" or (step or 0) > 0]
    return sorted(listed, key=lambda path: (found[path] or 0, path.name), reverse=True)


def _offer(directory: Path, run: Path, overrides: Sequence[str]) -> str:
    """Which whole checkpoint in ``directory`` is the farthest, and how to go on from it, in words."""
    usable = {path: step for path in directory.glob("*.ckpt") if (step := _step(path)) is not None}
    if not usable:
        return "no other whole checkpoint stands beside it; another hydra.run.dir= starts anew"
    best = max(usable, key=lambda path: (usable[path], path.is_symlink(), path.name == "best.ckpt"))
    return (
        f"another hydra.run.dir= starts anew, and the newest whole checkpoint, {best.name} of step {usable[best]}, is "
        f"continued by: {continue_command(overrides, run, checkpoint=str(best))}"
    )


def _step(path: Path) -> int | None:
    """The step of a checkpoint; None if it is not whole."""
    try:
        return int(read(path, mmap=True)["step"]["completed"])
    except (ValueError, OSError):
        return None
