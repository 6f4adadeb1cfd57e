"""Resume: which checkpoint a run continues from, what has changed since, its policy, and how logs are cut back."""

import copy
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import Logger
from torch import nn

from grpo_lightning import recording
from grpo_lightning.checkpoint.io import read, read_weights
from grpo_lightning.config.rules import LIVE, REFERENCE_KEYS, uses_fsdp
from grpo_lightning.config.settings import command_words, config_path_words, leaves, quote_value, value_at
from grpo_lightning.console import REDACTED, redact_overrides
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


_NUMBERS = {
    "policy": ("rollout.max_new_tokens", "validation.max_new_tokens", "data.max_prompt_length"),
    "reference": REFERENCE_KEYS,
}
"""Part -> numbers that are taken over with it."""


def policy_settings(
    config: Mapping[str, Any], overrides: Sequence[str], current: Callable[[str], Any]
) -> dict[str, Any]:
    """The settings of policy and reference in the checkpoint that is exported or validated, or trained on elsewhere.

    What the user gives stays: a part that is chosen (``policy=NAME``) completely, single keys one by one. A run that
    trains takes the policy alone, and nothing where it continues in its own directory or has an experiment's policy.

    Args:
        config: Has "mode", "checkpoint" and "run_dir" of this run.
        overrides: The user's, such as ``policy.path=DIR``; an object that a program gives counts as ``policy=``.
        current: Dotted key -> its resolved value in the settings as composed, or None.

    Returns:
        Dotted key -> value, to be set in the settings before they are resolved; nothing where there is no such
        checkpoint, which is an error when it is opened.

    Raises:
        ValueError: A setting cannot be taken over, and the user has not given it; or the file is no checkpoint.
    """
    name = config["checkpoint"]
    if name is None:
        return {}
    path = Path(config["run_dir"]) / "checkpoints" / "last.ckpt" if name == "last" else Path(name)
    given_keys = [word.lstrip("+~").partition("=")[0].partition("@")[0] for word in overrides]
    trains = config["mode"] == "fit"
    if not path.exists() or (trains and (belongs_to(path, Path(config["run_dir"])) or "experiment" in given_keys)):
        return {}
    recorded = read(path, map_location="meta").get("run", {}).get("config", {})
    updates: dict[str, Any] = {}
    for part, numbers in {"policy": ()}.items() if trains else _NUMBERS.items():
        node = recorded.get(part)
        if part in given_keys or not isinstance(node, Mapping):
            continue
        settings = copy.deepcopy(dict(node))
        for key in (key for key in given_keys if key.startswith(f"{part}.")):
            _put(settings, key.split(".")[1:], current(key))
        try:
            _check_transferable(part, settings, given_keys)
        except ValueError as error:
            raise ValueError(f"checkpoint={name}: {error}") from error
        updates[part] = settings
        if "path" in settings:
            log.info("%s.path=%s, as in the checkpoint", part, settings["path"])
        for key in numbers:
            value = value_at(recorded, key, default="")
            is_number = value is None or isinstance(value, int | float)
            # Sampling lengths of validation follow those of training unless they were given separately.
            follows = key == "validation.max_new_tokens" and value == value_at(recorded, "rollout.max_new_tokens")
            if is_number and key not in given_keys and not follows and current(key) != value:
                updates[key] = value
    return updates


def _check_transferable(part: str, settings: Mapping[str, Any], given_keys: Sequence[str]) -> None:
    """Refuse settings that were objects or secrets, and those that run code, since a checkpoint may be downloaded."""
    values = [(key, value) for key, value in leaves(settings, part) if key not in given_keys]
    if any(value == LIVE for _, value in values):
        raise ValueError(
            f"its {part} was an object of a Python program: name {part}=NAME with its settings, or give "
            f"compose({part}=…) such an object"
        )
    for key, value in values:
        runs_code = (key.endswith(".trust_remote_code") and value) or (
            key.endswith("attn_implementation") and "/" in str(value)  # a kernel of the hub
        )
        if runs_code or (isinstance(value, str) and (REDACTED in value or "${" in value)):
            code = f", which would run code ({part}.path={settings.get('path')})" if runs_code else ""
            raise ValueError(f"its {key} is {value}{code}, which is not taken over: give {key}=… yourself")


def _put(node: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        inner = node.get(name)
        node[name] = node = dict(inner) if isinstance(inner, Mapping) else {}
    node[path[-1]] = value


def check_weights(path: Path, module: Any) -> None:
    """Check that a checkpoint's weights have the names and shapes of a module's; a sharded one is not checked.

    Raises:
        ValueError: They differ; names the settings of the policy that do.
    """
    content = read(path, map_location="meta")
    stored, expected = (
        {name: tuple(getattr(weight, "shape", ())) for name, weight in state.items()}
        for state in (content.get("state_dict") or {}, module.state_dict())
    )
    names = {*stored, *expected} if module.strict_loading else {*stored} & {*expected}
    differing = sorted(name for name in names if stored.get(name) != expected.get(name))
    if not stored or not differing:
        return
    first = f"{differing[0]} {stored.get(differing[0], 'absent')} instead of {expected.get(differing[0], 'absent')}"
    before: Mapping[str, Any] = content.get("run", {}).get("config", {}).get("policy", {})
    changed = [
        f"{key} was {old} and is {new}"
        for key, old, new in config_diff(before, module.settings.get("policy", {}), prefix="policy")
        if not key.endswith(("seed", "prompt", "prompts"))
    ]
    reason = f"its policy has other settings: {', '.join(changed)}" if before and changed else "it is of another model"
    raise ValueError(
        f"checkpoint={path}: {reason} ({len(differing)} weights differ, such as {first}); give the settings with which "
        "it was trained"
    )


def load_checkpoint(module: Any, checkpoint: Path | None) -> None:
    """Load the weights and the progress of a checkpoint, if there is one, without a trainer."""
    if checkpoint:
        weights = read_weights(checkpoint)
        module.on_load_checkpoint(read(checkpoint, mmap=True) | {"state_dict": weights})
        module.load_state_dict(weights, strict=module.strict_loading)


def trained_names(policy: nn.Module) -> set[str]:
    """The names of the trained weights in the state dict of a module that has the policy as ``policy``."""
    return {f"policy.{name}" for name, weight in policy.named_parameters() if weight.requires_grad}


def base_fingerprint(policy: nn.Module) -> str | None:
    """A hash of the name, the shape and up to 64 values of every frozen weight; None where all are trained."""
    frozen = [(name, weight) for name, weight in policy.named_parameters() if not weight.requires_grad]
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in frozen:
        flat = weight.detach().flatten()
        values = flat[:: max(1, len(flat) // 64)][:64].double().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + values.numpy().tobytes())
    return digest.hexdigest() if frozen else None


def check_adapter(policy: nn.Module, base: str | None, checkpoint: Mapping[str, Any]) -> None:
    """Check that a checkpoint's adapter belongs to a policy's frozen weights.

    Args:
        policy: The policy into which it is loaded.
        base: The policy's `base_fingerprint`.
        checkpoint: The checkpoint's content.

    Raises:
        ValueError: It holds an adapter of another base, or lacks weights of this policy's adapter.
    """
    stored: Any = checkpoint.get("state_dict", {})
    if base is None:
        if "base" in checkpoint:
            raise ValueError("the checkpoint holds an adapter only: set policy.adapter as it was in its run")
        return
    missing = sorted(trained_names(policy) - stored.keys()) if stored else []
    if missing:
        raise ValueError(f"the checkpoint lacks weights that policy.adapter has, {len(missing)} such as {missing[0]}")
    is_complete = {f"policy.{name}" for name in policy.state_dict()} <= stored.keys()
    stored_base = checkpoint.get("base", base if is_complete else None)
    if stored_base != base:
        raise ValueError(
            f"the checkpoint's adapter was trained on other base weights ({stored_base}) than policy.path has"
        )
