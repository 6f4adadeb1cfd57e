"""Resume: which checkpoint a run continues from, what has changed since, and how its logs and files are cut back."""

import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import Logger

from grpo_lightning import recording
from grpo_lightning.checkpoint.io import read
from grpo_lightning.config.rules import uses_fsdp
from grpo_lightning.config.settings import command_words, config_path_words, leaves, quote_value
from grpo_lightning.console import redact_overrides
from grpo_lightning.distributed.strategies import trainer_shards
from grpo_lightning.logger import rewind_csv

log = logging.getLogger(__name__)

EVENTS_SUFFIX = ".grpo"
"""What the names of this project's event files end with, by ``logger.tensorboard.filename_suffix``."""
_STAGED = re.compile(
    r"\.(last|best)\.ckpt\.\d+|\.(summary\w*|preflight|health)\.json\.\d+|\.export\d*\.partial|\.\d+\.jsonl\.gz\.\d+"
)
_SHARDED = re.compile(r"last_\d+_\d+\.ckpt")

_MAY_CHANGE = {
    *("run_dir", "checkpoint", "steps", "callbacks", "logger", "mode", "tags", "task_name", "preflight", "trusted"),
    *("plugins", "default_root_dir", "overrides", "choices"),
}
"""Names in the keys of settings that may change when a run continues."""
_COPIES = {"data.validate_every", "data.tries"}
"""Settings that copy another one under another name."""
_REPLACED = re.compile(r"\+{0,2}(checkpoint|hydra\.run\.dir|run_dir)=")


def find_checkpoint(
    config: Mapping[str, Any], directory: Path, *, directory_given: bool, overrides: Sequence[str] = ()
) -> Path | None:
    """The checkpoint that ``checkpoint=`` names, a file or the directory of a sharded one; None to start anew.

    Args:
        config: The run's settings.
        directory: The run directory.
        directory_given: Whether the user has named that directory.
        overrides: What the user changed, for the commands in errors.

    Raises:
        ValueError: The checkpoint is missing, damaged or cannot be used so, or another run would be overwritten.
    """
    name, mode = config["checkpoint"], config["mode"]
    last = directory / "checkpoints" / "last.ckpt"
    is_fit, holds_run = mode == "fit", last.exists() or _has_checkpoints(last.parent)
    if name is None:
        if is_fit and holds_run:
            how = "checkpoint=last continues it, another hydra.run.dir= starts anew"
            how = how if last.exists() else _suggestion(last.parent, directory, overrides)
            raise ValueError(f"{directory} already holds a run: {how}")
        # An export of that run would be replaced by one of the policy that it started from.
        words = [word.lstrip("+") for word in overrides]
        is_meant = any(word.startswith("checkpoint=") for word in words)
        is_meant |= mode == "validate" and any(word.startswith(("policy=", "policy.path=")) for word in words)
        if mode in ("export", "validate") and not is_meant and holds_run:
            raise ValueError(
                f"{directory} holds a run: checkpoint=last takes its policy, and checkpoint=null the one that the "
                "settings name"
            )
        return None
    if name == "last":
        if not directory_given:
            raise ValueError("checkpoint=last: name the run to continue with hydra.run.dir=DIRECTORY")
        path = last
        if not last.exists():
            if is_fit and not holds_run and not last.is_symlink():
                log.warning("checkpoint=last: there is no %s yet, starting from the beginning", last)
                return None
            suggestion = f"; {_suggestion(last.parent, directory, overrides)}" if holds_run else ""
            raise ValueError(f"checkpoint=last: there is no {last}{suggestion}")
    else:
        path = Path(name)
        if not path.exists():
            raise ValueError(f"checkpoint={name}: no such file")
        for place in (path, path / "checkpoints"):
            if file := next((place / name for name in ("last.ckpt", "best.ckpt") if (place / name).exists()), None):
                raise ValueError(f"checkpoint={path} is a directory of checkpoints: name one, checkpoint={file}")
        if is_fit and not belongs_to(path, directory) and holds_run:
            raise ValueError(f"{directory} already holds another run: checkpoint={name} needs another hydra.run.dir=")
    if path.is_dir() and mode != "export" and not uses_fsdp(config["trainer"]):
        raise ValueError(
            f"checkpoint={path} is a sharded checkpoint: use trainer=fsdp, or mode=export, which joins its parts"
        )
    places = (directory.resolve(), last.parent.resolve())
    if path.is_dir() and not any(path.resolve().is_relative_to(place) for place in places):
        raise ValueError(
            f"checkpoint={path}: sharded checkpoints hold pickles and are read from this run's own directory only: "
            "move it there, or export it where it was made"
        )
    try:
        read(path, mmap=True)
    except ValueError as error:
        raise ValueError(f"{error}; {_suggestion(path.parent, directory, overrides)}") from error
    return path


def belongs_to(checkpoint: Path, directory: Path) -> bool:
    """Whether a checkpoint is one of the run in this directory."""
    return checkpoint.absolute().parent.resolve() == (directory / "checkpoints").resolve()


def _has_checkpoints(folder: Path) -> bool:
    """Whether a folder without ``last.ckpt`` holds a run's checkpoints; an unfinished sharded one of step 0 is none."""
    return (folder / "best.ckpt").exists() or any((_step(path) or 0) > 0 for path in folder.glob("*.ckpt"))


def _suggestion(folder: Path, directory: Path, overrides: Sequence[str]) -> str:
    """How to continue from the newest readable checkpoint in a folder."""
    readable = {path: step for path in folder.glob("*.ckpt") if (step := _step(path)) is not None}
    if not readable:
        return "there is no other readable checkpoint beside it; another hydra.run.dir= starts anew"
    best = max(readable, key=lambda path: (readable[path], path.is_symlink(), path.name == "best.ckpt"))
    return (
        f"another hydra.run.dir= starts anew, and the newest readable checkpoint, {best.name} of step {readable[best]},"
        f" is continued by: {resume_command(overrides, directory, checkpoint=str(best))}"
    )


def _step(path: Path) -> int | None:
    """The step of a checkpoint; None if it cannot be read."""
    try:
        return int(read(path, mmap=True)["step"]["completed"])
    except (ValueError, OSError):
        return None


def resume_command(
    overrides: Sequence[str], directory: Path, *, checkpoint: str = "last", steps: int | None = None
) -> str:
    """The command line that continues a run, quoted for a shell and Hydra, with secrets masked.

    Args:
        overrides: Those that the run was started with.
        directory: The run directory.
        checkpoint: "last", or a path.
        steps: The number of steps to make; None: as many as before.
    """
    kept = [word for word in redact_overrides(overrides) if not _REPLACED.match(word)]
    added = [f"hydra.run.dir={quote_value(str(directory))}", f"checkpoint={quote_value(checkpoint)}"]
    if steps is not None:
        kept = [word for word in kept if word.partition("=")[0].lstrip("+") != "steps"]
        added = [f"steps={steps}", *added]
    return " ".join(map(shlex.quote, [*command_words(), *config_path_words(), *kept, *added]))


def describe_saved(mode: str, directory: Path, overrides: Sequence[str]) -> str:
    """What is saved of a run that was just ended, and the command that continues it."""
    if mode != "fit":
        return "nothing is lost but the time"
    last = directory / "checkpoints" / "last.ckpt"
    if not last.exists():
        return "nothing was saved yet"
    return f"step {_step(last)} is saved; continue with: {resume_command(overrides, directory)}"


def recorded_run(
    checkpoint: Path, trainer: Trainer, settings: Mapping[str, Any], *, is_adapter: bool
) -> dict[str, Any]:
    """What a checkpoint records of its run: "config", "events", "data" and more.

    Raises:
        ValueError: An optimizer of these settings cannot take over the state, or nothing is recorded of the run.
    """
    content = read(checkpoint, mmap=True)
    if "run" not in content:
        raise ValueError(
            f"checkpoint={checkpoint} does not record the settings of its run, as it was written without "
            "callbacks.checkpoint: mode=fit needs one that does"
        )
    run: dict[str, Any] = content["run"]
    state = content["step"]
    if state["processes"] != trainer.world_size:
        log.warning(
            "the checkpoint is of a run in %d processes, which now continues in %d: the same up to rounding",
            *(state["processes"], trainer.world_size),
        )
    if is_adapter and not state["sharded"] and trainer_shards(trainer):
        raise ValueError(
            f"checkpoint={checkpoint} is of an adapter trained without trainer=fsdp, whose optimizer names weights "
            "otherwise: continue it without trainer=fsdp"
        )
    old, new = (str((config.get("optimizer") or {}).get("_target_", "")) for config in (run["config"], settings))
    if old and new and len({target.rpartition(".")[2].removeprefix("Paged") for target in (old, new)}) > 1:
        raise ValueError(f"optimizer._target_={new} cannot continue the run of a checkpoint of {old}: use that one")
    return run


def recorded_progress(checkpoint: Path | None, directory: Path) -> tuple[int, float, str | None]:
    """The steps that a run has made when it continues, their seconds, and when the first began."""
    if checkpoint is None:
        return 0, 0.0, None
    content = read(checkpoint, mmap=True)
    run = content.get("run", {})
    seconds = [float(run.get("seconds", 0.0))]
    if belongs_to(checkpoint, directory):
        seconds.append(float(_summary(directory).get("seconds") or 0.0))
    return int(content["step"]["completed"]), max(seconds), run.get("started")


def finished_summary(config: Mapping[str, Any], directory: Path) -> dict[str, Any] | None:
    """The summary of a run that ``checkpoint=last`` would continue, if it has made all its steps; else None."""
    last = directory / "checkpoints" / "last.ckpt"
    completed, summary = _step(last) if config["checkpoint"] == "last" else None, _summary(directory)
    # a run that was killed after its last step still has to export
    is_finished = summary.get("status") == "finished" and summary.get("steps") == completed
    return summary if completed is not None and is_finished and completed >= config["steps"] else None


def _summary(directory: Path) -> dict[str, Any]:
    file = directory / "summary.json"
    summary: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return summary


def warn_of_changes(recorded: Mapping[str, Any], config: Mapping[str, Any], data: Mapping[str, Any] | None) -> None:
    """Warn of settings that have changed since the checkpoint, and of other data under the same settings.

    Args:
        recorded: What the checkpoint records of its run: "config" and "data".
        config: The settings of the run that continues it.
        data: ``PromptData.fingerprint()`` of this run.
    """
    changes = config_diff(recorded["config"], config)
    lines = [
        f"  {key} was {'null' if old is None else old} and is {'null' if new is None else new} now"
        + (", which is ignored: a continued run keeps its optimizer" if key.startswith("optimizer.") else "")
        for key, old, new in changes
    ]
    if lines:
        log.warning("settings that have changed since the checkpoint was written:\n%s", "\n".join(lines))
    before = recorded.get("data")
    if data and before and dict(before) != dict(data) and not any(key.startswith("data.") for key, *_ in changes):
        log.warning(
            "the data are not those of the checkpoint: %s training and %s held-out prompts then, %s and %s now, or "
            "other rows; from here on steps have other prompts than an unbroken run",
            *(counts[part] for counts in (before, data) for part in ("training", "held_out")),
        )


def config_diff(before: Mapping[str, Any], after: Mapping[str, Any], *, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, value before, value after) of settings that differ, except those that may change.

    Args:
        before: The settings in the checkpoint.
        after: The settings of the run that continues it.
        prefix: The dotted key of these settings.
    """
    old, new = (dict(leaves(settings, prefix)) for settings in (before, after))
    return [
        (key, old.get(key), new.get(key))
        for key in sorted({*old, *new} - {"trainer._target_", *_COPIES})
        if old.get(key) != new.get(key) and not _MAY_CHANGE & {*key.split(".")}
    ]


def remove_stale_files(directory: Path, *, keep: Path | None = None, completed: int = 0) -> None:
    """Remove unfinished files of processes that are gone, and rollouts recorded after the checkpoint.

    Nobody else may be writing in the directory. Directories of sharded checkpoints are removed unless ``last.ckpt`` or
    ``best.ckpt`` links to them.

    Args:
        directory: The run directory.
        keep: A checkpoint that stays in any case.
        completed: Steps that the run has made when it continues.
    """
    checkpoints = directory / "checkpoints"
    places = [place for place in (directory, checkpoints, directory / recording.FOLDER) if place.is_dir()]
    present = [path for place in places for path in place.iterdir() if not path.is_symlink()]
    links = (checkpoints / "last.ckpt", checkpoints / "best.ckpt", keep)
    used = {path.resolve() for path in links if path and path.exists()}
    removed = [path for path in present if _STAGED.fullmatch(path.name)]
    if (checkpoints / "last.ckpt").exists():
        removed += [p for p in present if _SHARDED.fullmatch(p.name) and p.is_dir() and p.resolve() not in used]
    for path in removed:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    with suppress(OSError):
        removed += recording.rewind(directory / recording.FOLDER, completed)
    if removed:
        log.info("removed what a killed process had left: %s", ", ".join(map(str, removed)))


def rewind_logs(
    directory: Path, loggers: Iterable[Logger], events: Mapping[str, int], *, checkpoint: Path | None
) -> None:
    """Remove what was logged after the checkpoint, which will be made again; for another run's, or None, all of it.

    Args:
        directory: The run directory.
        loggers: The trainer's.
        events: The lengths of TensorBoard's files that the checkpoint has recorded.
        checkpoint: From which the run continues.
    """
    resumes = checkpoint is not None and belongs_to(checkpoint, directory)
    rewind_events(directory / "tensorboard", events if resumes else {})
    rewind_csv(loggers, recorded_progress(checkpoint, directory)[0] if resumes else -1)


def event_lengths(directory: Path) -> dict[str, int]:
    """The length in bytes of every event file, by name; flush the writer first."""
    return {path.name: path.stat().st_size for path in directory.glob(f"events.out.tfevents.*{EVENTS_SUFFIX}")}


def rewind_events(directory: Path, lengths: Mapping[str, int]) -> None:
    """Cut every event file to its recorded length and remove those that have none.

    Event files only grow, so what lies beyond the recorded length was written by steps that will run again. Files
    without this project's suffix stay.
    """
    for path in directory.glob(f"events.out.tfevents.*{EVENTS_SUFFIX}"):
        length = lengths.get(path.name, 0)
        if not length:
            path.unlink()
        elif length < path.stat().st_size:
            os.truncate(path, length)
