"""The checkpoint that a run goes on from, and what has changed since it was written."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning import Trainer

from grpo_lightning.checkpoint.command import continue_command
from grpo_lightning.checkpoint.io import check, read
from grpo_lightning.checkpoint.of_others import is_own
from grpo_lightning.distributed.chosen import settings_shard
from grpo_lightning.distributed.sharding import trainer_shards
from grpo_lightning.distributed.strategies import is_first
from grpo_lightning.output.shell import typed
from grpo_lightning.output.terminal import name_of_file, one_line, quoted

log = logging.getLogger(__name__)

_PLAIN = re.compile(r"[\w.=-]{1,60}")
"""Names of checkpoints that say nothing else in a sentence."""


def chosen(
    config: Mapping[str, Any], directory: Path, *, directory_given: bool, overrides: Sequence[str] = ()
) -> Path | None:
    """The file that ``checkpoint=`` names, or the directory of a sharded checkpoint; None to start anew.

    What is returned is whole, and holds nothing that could run code.

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
    if path.is_dir() and config["mode"] != "export" and not settings_shard(config["trainer"]):
        raise ValueError(
            f"checkpoint={path}: a directory of parts; allowed with trainer=fsdp and with mode=export, which joins them"
        )
    try:
        check(path, every_byte=is_first())
    except ValueError as error:
        raise ValueError(f"{one_line(str(error))}; {_offer(path.parent, directory, overrides, path)}") from error
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
    step = read(last, map_location="meta")["step"]["completed"]  # the weights stay in the file
    return f"step {step} is saved; continue with: {continue_command(overrides, directory)}"


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
    content = _glance(checkpoint)
    if "run" not in content:
        raise ValueError(
            f"checkpoint={checkpoint}: written without callbacks.checkpoint; allowed in mode=fit is a checkpoint that "
            "says which settings its run had"
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
            f"checkpoint={checkpoint}: an adapter that another trainer has trained; allowed with trainer=fsdp is one "
            "of its own, whose optimizer names weights otherwise"
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
        if not re.fullmatch(r"(torch|bitsandbytes)\.optim\.\w+", before):  # it may be code of whoever wrote the file
            raise ValueError(
                f"optimizer._target_={after}: the checkpoint is of {quoted(before)}; allowed is what has trained it, "
                "if you know its code"
            )
        raise ValueError(f"optimizer._target_={after}: allowed is {before}, the optimizer of the checkpoint")


def so_far(checkpoint: Path | None, directory: Path) -> tuple[int, float, str | None]:
    """The steps that a run has made when it goes on from a checkpoint, their seconds, and when the first began.

    Args:
        checkpoint: The file, or the directory of a sharded checkpoint; None at a run's beginning.
        directory: The run directory, whose summary may know of more seconds.
    """
    if checkpoint is None:
        return 0, 0.0, None
    content = _glance(checkpoint)
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


def _glance(checkpoint: Path) -> dict[str, Any]:
    return read(checkpoint, mmap=checkpoint.is_file())


def _summary(directory: Path) -> dict[str, Any]:
    try:
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _named(config: Mapping[str, Any], directory: Path, directory_given: bool, overrides: Sequence[str]) -> Path | None:
    given = config["checkpoint"]
    own = directory / "checkpoints"
    last = own / "last.ckpt"
    if given is None:
        _refuse_start(config, directory, overrides)
        if config["mode"] == "fit" and last.exists():
            raise ValueError(
                f"{directory} already holds a run: checkpoint=last continues it, another hydra.run.dir= starts anew"
            )
        if config["mode"] == "fit" and _others(own):
            raise ValueError(f"{directory} already holds a run: {_offer(own, directory, overrides)}")
        _refuse_another(config, directory, None)
        return None
    if given != "last":
        if "://" in given:
            raise ValueError(f"checkpoint={given}: allowed is a local file; download it first")
        if not Path(given).exists():
            raise ValueError(f"checkpoint={given}: no such file")
        for place in (Path(given), Path(given) / "checkpoints"):
            if file := next((place / name for name in ("last.ckpt", "best.ckpt") if (place / name).exists()), None):
                told = typed("checkpoint", str(file))
                raise ValueError(
                    f"checkpoint={given}: a directory of checkpoints; allowed is one of them, as in {told}"
                )
        elsewhere = Path(given).absolute().parent.resolve() != own.resolve()
        if config["mode"] == "fit" and elsewhere and (last.exists() or _others(own)):
            raise ValueError(
                f"{directory} already holds another run than checkpoint={given}: name another hydra.run.dir="
            )
        _refuse_another(config, directory, Path(given))
        return Path(given)
    if not directory_given:
        raise ValueError("checkpoint=last: name the run to continue with hydra.run.dir=DIRECTORY")
    if last.is_symlink() and not last.exists():
        offer = f"; {_offer(own, directory, overrides)}" if _others(own) else ""
        raise ValueError(f"checkpoint=last: {last} leads to {name_of_file(str(last.readlink()))}, which is gone{offer}")
    _refuse_another(config, directory, None)
    if last.exists():
        return last
    if _others(own):
        raise ValueError(f"checkpoint=last: there is no {last}; {_offer(own, directory, overrides)}")
    if config["mode"] != "fit":
        raise ValueError(f"checkpoint=last: there is no {last}")
    log.warning("checkpoint=last: there is no %s yet, starting from the beginning", last)
    return None


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
    last = "last" if (own / "last.ckpt").exists() else str(_others(own)[0])
    verb = "exports" if mode == "export" else "measures"
    raise ValueError(
        f"{directory} holds a run: {typed('checkpoint', last)} {verb} its policy, and checkpoint=null the one that the "
        "settings name"
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
            f"callbacks.checkpoint.directory={named}: holds the checkpoints of a run; allowed is a directory without "
            f"any, and {typed('checkpoint', place / 'last.ckpt')} continues that run"
        )


def _others(directory: Path) -> list[Path]:
    """The checkpoints in a directory but ``last.ckpt``, the farthest first; a run's beginning in parts is none."""
    if not directory.is_dir():
        return []
    found = {path: _step(path) for path in directory.glob("*.ckpt") if path.name not in ("last.ckpt",)}
    listed = [path for path, step in found.items() if path.name == "best.ckpt" or (step or 0) > 0]
    return sorted(listed, key=lambda path: (found[path] or 0, path.name), reverse=True)


def _offer(directory: Path, run: Path, overrides: Sequence[str], broken: Path | None = None) -> str:
    """Which whole checkpoint in ``directory`` is the farthest, and how to go on from it, in words."""
    known = {path: _step(path) for path in directory.glob("*.ckpt")}
    usable = {path: step for path, step in known.items() if step is not None and path != broken and _is_whole(path)}
    if not usable:
        return "no other whole checkpoint stands beside it; another hydra.run.dir= starts anew"
    best = max(usable, key=lambda path: (usable[path], path.is_symlink(), path.name == "best.ckpt"))
    name = f"{best.name} " if _PLAIN.fullmatch(best.name) else ""  # another's could tell a command of its own
    return (
        f"another hydra.run.dir= starts anew, and the newest whole checkpoint, {name}of step {usable[best]}, is "
        f"continued by: {continue_command(overrides, run, checkpoint=str(best))}"
    )


def _step(path: Path) -> int | None:
    try:
        return int(read(path, mmap=path.is_file())["step"]["completed"])
    except (ValueError, OSError):
        return None


def _is_whole(path: Path) -> bool:
    try:
        check(path)
    except (ValueError, OSError):
        return False
    return True
