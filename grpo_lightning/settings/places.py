"""Whether the directories of a run can be written to, as far as can be said without writing."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_lightning.output.terminal import printable


def place_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What stands in the way of the run directory and of the directories of callbacks, by key."""
    run = config.get("run_dir")
    told = obstacle(Path(run)) if isinstance(run, str) else None
    if told:
        yield _problem("run_dir", run, f"{told} (hydra.run.dir names it)")
    if config.get("mode") != "fit":
        return
    for name, callback in (config.get("callbacks") or {}).items():
        place = callback.get("directory") if isinstance(callback, Mapping) else None
        if isinstance(place, str) and (why := obstacle(Path(place))) and why != told:
            yield _problem(f"callbacks.{name}.directory", place, why)


def obstacle(directory: Path) -> str | None:
    """Why a directory cannot be made or written to; None if nothing is known against it."""
    for place in (directory, *directory.absolute().parents):
        try:
            if not os.path.lexists(place):
                continue
            if not place.exists():
                return f"{place} is a link to nothing"
            if not place.is_dir():
                return f"{place} is no directory"
        except OSError as error:
            return f"{place}: {error.strerror}"
        if not os.access(place, os.W_OK | os.X_OK):
            return f"{place} must not be written to"
        return None
    return None


def _problem(key: str, value: Any, why: str) -> str:
    return printable(f"{key}={value}: allowed is a directory that can be written to; {why}")
