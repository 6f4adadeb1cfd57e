"""Whether the rollouts that a run is to train on were recorded, before anything loads."""

from pathlib import Path
from typing import Any

from grpo_lightning.recording import files
from grpo_lightning.settings.contradictions import Reader

_TARGET = "grpo_lightning.rollout.Recorded"
_READ_WHOLE = 100_000_000
"""Bytes of files that are read to their ends to find a damaged one before the first step; of more the beginnings."""


def recorded_problems(get: Reader) -> list[str]:
    """What stands in the way of training on the rollouts in ``rollout.path``."""
    if get("rollout").get("_target_") != _TARGET or get("mode") != "fit":
        return []
    given = get("rollout.path")
    if not isinstance(given, str):
        return [f"rollout.path={given}: allowed is a run directory with recorded rollouts"]
    try:
        found = _problems(get, files.folder(given))
    except (files.Unusable, OSError) as error:
        found = [str(error)]
    return [f"rollout.path={given}: {problem}" for problem in found]


def _problems(get: Reader, directory: Path) -> list[str]:
    known = files.steps(directory)
    if not known:
        return [f"there are no recorded rollouts in {directory}; callbacks=rollouts records all of a run"]
    own = get("callbacks").get("rollouts") or {}
    if directory.resolve() in {
        Path(str(own.get("directory"))).resolve(),
        (Path(get("run_dir")) / files.FOLDER).resolve(),
    }:
        return ["allowed is the directory of another run: this one would write its own rollouts there"]
    last = get("steps")
    needed = range(1, last + 1)
    if get("checkpoint") is not None:  # a run that goes on needs the rest, and the first steps may be gone
        needed = range(min(max((step for step in needed if step not in known), default=0) + 1, last), last + 1)
    if missing := [step for step in needed if step not in known]:
        return [
            f"steps={last} needs the rollouts of steps 1 to {last}; there are {files.listed(known)}, and not "
            f"{files.listed(missing)} (callbacks.rollouts.every=1 records all of a run)"
        ]
    chosen = [known[step] for step in needed]
    whole = sum(path.stat().st_size for path in chosen) <= _READ_WHOLE
    sizes: dict[str, Any] = {}
    for path in chosen:
        first = files.read(path)[0] if whole else files.header(path)
        sizes = sizes or first
    wanted = {"prompts": "data.prompts_per_step", "group_size": "rollout.group_size"}
    return [
        f"{key}={get(key)} is not what was recorded; allowed is {sizes[name]}"
        for name, key in wanted.items()
        if isinstance(get(key), int) and get(key) != sizes[name]
    ]
