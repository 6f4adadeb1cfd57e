"""Whether the directories of a run can be written to, as far as can be said without writing."""

import os
import re
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_lightning import start
from grpo_lightning.output.terminal import one_line


def place_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What stands in the way of the run directory and of the directories of callbacks, by key."""
    run = config.get("run_dir")
    told = obstacle(Path(run)) if isinstance(run, str) else None
    if told:
        yield _problem("run_dir", run, f"{told} (hydra.run.dir names it)")
    if isinstance(run, str) and (wrong := entry_problem(Path(run))):
        yield wrong
    if isinstance(run, str) and (found := next(_foreign_checkpoints(Path(run)), None)):
        yield one_line(
            f"hydra.run.dir={run}: {found} in it is a checkpoint that Lightning would go on from by itself on SLURM; "
            "allowed is a directory without such, and checkpoint=FILE to go on from one"
        )
    if config.get("mode") != "fit":
        return
    for name, callback in (config.get("callbacks") or {}).items():
        place = callback.get("directory") if isinstance(callback, Mapping) else None
        if isinstance(place, str) and (why := obstacle(Path(place))) and why != told:
            yield _problem(f"callbacks.{name}.directory", place, why)


def unwritable(key: str, directory: str) -> str | None:
    """What is said of a directory that cannot be made or written to, with the key that names it; None if it can."""
    why = obstacle(Path(directory))
    return why and _problem(key, directory, why)


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


_FILES = re.compile(
    r".*\.log|(health|preflight)\.json|\.?summary\w*\.json(\.\d+)?|multirun\.yaml|judge\.jsonl"
    r"|\.export\d*\.partial|\.(wandb|mlflow)_id"
)
_DEEP = ("wandb", ".wandb", "lightning_logs")
"""Folders in whose folders a run writes, too."""
_FOLDERS = (".hydra", "checkpoints", "tensorboard", "csv", "export", "rollouts", *_DEEP)
_OF_RUNS = (".hydra", "checkpoints", "multirun.yaml", "summary.json", "sweep.json", "tensorboard", "train.log")
"""Of which a directory of a run or sweep has some."""
_OF_SYSTEM = (
    *("/bin", "/boot", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr", "/var/spool"),
    *("/opt/homebrew/etc", "/private/etc"),
)
"""Directories of systems, in some of which programs run or obey any file."""
_OF_PYTHON = {"site-packages", "dist-packages"}
_LINKING = ("wandb", ".wandb")
"""Folders in which a run makes links of its own."""
_NOT_WRITTEN = {
    "checkpoints": "[!.]*.ckpt",
    "tensorboard": "events.out.tfevents.*",
    "export": "*",
    "wandb": "debug-core.log",  # a link of W&B's own to its cache
}
"""Folder -> what in it is replaced or only read, and never written through a link, but for event files to come."""
_EVENTS = re.compile(r"events\.out\.tfevents\.0*(\d{1,10})\.")
"""The name of an event file, up to the second in which it was begun."""


def entry_problem(directory: Path, *more: str) -> str | None:
    """What is wrong with a directory before the first file of a run or sweep is written to it; see `link_problem`."""
    if is_of_programs(directory):
        return one_line(
            f"hydra.run.dir={directory}: a hidden directory with files that are no run's, or of the home, or one of "
            "the system, of Python's packages, or that cannot be told; programs may run what is put there; allowed is "
            "another"
        )
    return link_problem(directory, *more)


def link_problem(directory: Path, *more: str) -> str | None:
    """Nothing."""
    return None


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def is_of_programs(directory: Path) -> bool:
    """Whether a directory may be one of which programs run any file, as shells do with those in ``~/.bashrc.d``."""
    place = directory.resolve()
    names = {path.name for path in place.iterdir()} if place.is_dir() and os.access(place, os.R_OK | os.X_OK) else set()
    is_foreign = bool(names) and names.isdisjoint(_OF_RUNS) and any(part.startswith(".") for part in place.parts)
    return is_obeyed(directory) or is_foreign or not _OF_PYTHON.isdisjoint(place.parts)


def is_obeyed(path: Path) -> bool:
    """Whether a path leads to where programs look for what they run or obey: the system's, or hidden in the home.

    Caches (``~/.cache``) are none of these, nor is what the start is in, or in the start below the home. A way that
    cannot be told, as by ``..`` of what is not there yet, may lead there.
    """
    home, place, own = Path("~").expanduser().resolve(), path.resolve(), start.place()
    if place is None or any(place.is_relative_to(one) and not own.is_relative_to(one) for one in _OF_SYSTEM):
        return True
    home = home and next((one for one in place.parents if _is_same(one, home)), home)  # by whatever name, as of a mount
    if home is None or not place.is_relative_to(home) or (own in place.parents and home in own.parents):
        return False
    parts = place.relative_to(home).parts
    hidden = [n for n, part in enumerate(parts, 1) if part.startswith(".") and part != ".cache"]
    return any(not own.is_relative_to(home.joinpath(*parts[:n])) for n in hidden)


def is_hidden(place: Path) -> bool:
    """Whether what lies in a directory can be used and not be listed."""
    return place.is_dir() and os.access(place, os.X_OK) and not os.access(place, os.R_OK)


def is_looked_through(place: Path, directory: Path) -> bool:
    """Whether `link_problem` finds all links in a folder of a run directory through which a logger could write."""
    is_known = place.name in {*_FOLDERS} - {"checkpoints", "export"}
    return is_known and place.parent.resolve() == directory.resolve()


def taken_for(name: str) -> str:
    """The plain letters that the least exact of file systems sees in a name.

    Many tell no upper from lower case, and some pass by letters that are not seen, of which there are many kinds.
    """
    plain = unicodedata.normalize("NFKC", name.casefold()).casefold()
    return "".join(filter(str.isascii, plain)).rstrip(" .")


def _foreign_checkpoints(directory: Path) -> Iterator[str]:
    """Checkpoints that Lightning would take on SLURM, where it looks for them."""
    if directory.is_dir() and os.access(directory, os.R_OK | os.X_OK):
        yield from sorted(path.name for path in directory.iterdir() if "hpc_ckpt_" in path.name)


def _problem(key: str, value: Any, why: str) -> str:
    return one_line(f"{key}={value}: allowed is a directory that can be written to; {why}")
