"""One run at a time in a directory: a lock that names its holder, and that ends with the process, however it ends."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo_lightning.config.tree import value_at

NAME = ".lock"
PATIENCE = 3.0
"""Seconds to wait for a holder to end: a process whose parent was killed may need a moment to die itself."""

_OF_ONE_RUN = ("callbacks.checkpoint.directory", "callbacks.rollouts.directory", "sampler.directory")
"""Settings that name a place, outside of the run directory too, whose files a second run would overwrite."""
_TAKEN = {errno.EACCES, errno.EAGAIN}  # any other error says that the file system has no locks
_held: set[Path] = set()
"""The directories that this process holds: the kernel's locks do not keep a process from itself."""


class Locked(ValueError):
    """Another process trains in the directory."""


@contextmanager
def all_held(config: Mapping[str, Any], directory: Path) -> Iterator[None]:
    """`held`, of a run directory and of what lies elsewhere and can hold the files of one run only.

    Args:
        config: The run's settings.
        directory: The run directory.
    """
    places = {directory.resolve(): "hydra.run.dir"}
    for key in _OF_ONE_RUN:
        place = value_at(config, key)
        if isinstance(place, str) and not Path(place).resolve().is_relative_to(directory.resolve()):
            places.setdefault(Path(place).resolve(), key)
    with ExitStack() as stack:
        for path, key in places.items():
            stack.enter_context(held(path, key=key))
        yield


@contextmanager
def held(directory: Path, *, key: str = "hydra.run.dir") -> Iterator[None]:
    """Inside, no other run trains in ``directory``, which is made if it does not exist.

    The lock is a record lock of the kernel: it is gone when the process is, also after ``kill -9``, other processes
    that this one starts do not inherit it, and NFS has it. On a file system without locks a run has none.

    Args:
        directory: The run directory.
        key: Of the setting that names the directory.

    Raises:
        Locked: Another process, or another run of this process, trains there; or the directory cannot be written to.
    """
    place, path = directory.resolve(), directory / NAME
    own = {"pid": os.getpid(), "host": socket.gethostname()}
    if place in _held:
        raise Locked(_refusal(directory, own, key))
    deadline = time.monotonic() + PATIENCE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        while (file := _locked(path)) is None:
            if time.monotonic() >= deadline:
                raise Locked(_refusal(directory, _holder(path), key))
            time.sleep(0.1)
    except OSError as error:
        raise Locked(f"{key}={directory}: the directory cannot be written to ({error.strerror})") from error
    _held.add(place)
    try:
        with suppress(OSError):  # on a full disk the lock holds and names nobody
            started = datetime.now().astimezone().isoformat(timespec="seconds")
            os.ftruncate(file, 0)
            os.pwrite(file, (json.dumps(own | {"started": started}) + "\n").encode(), 0)
        yield
    finally:
        _held.discard(place)
        with suppress(OSError):
            path.unlink()  # while it is held: whoever waits for this file sees that it is another one by then
        os.close(file)


def is_held(directory: Path) -> bool:
    """Whether a run trains in ``directory`` now, of this process or another one; nothing is written."""
    if directory.resolve() in _held:
        return True  # and not looked at: this process would lose its lock by closing the file
    with suppress(OSError), (directory / NAME).open("rb") as file:
        return not _lock(file.fileno(), fcntl.LOCK_SH)
    return False


def _locked(path: Path) -> int | None:
    """The open file that this process holds from now on; None while another one does."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # not O_TRUNC: what it says is the holder's
    with suppress(FileNotFoundError):
        if _lock(file, fcntl.LOCK_EX) and os.path.samestat(os.fstat(file), path.stat()):
            return file
    os.close(file)  # of another process, or removed by its last holder
    return None


def _lock(file: int, kind: int) -> bool:
    """Whether nobody else holds the file, which is held from now on."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _TAKEN
    return True


def _holder(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


def _refusal(directory: Path, holder: Mapping[str, Any], key: str) -> str:
    who = f"process {holder['pid']} on {holder.get('host')}" if "pid" in holder else "another process"
    since = f" since {holder['started']}" if "started" in holder else ""
    elsewhere = holder.get("host") not in (None, socket.gethostname())
    stale = f"; if that process is gone, remove {directory / NAME}" if elsewhere else ""
    return (
        f"{key}={directory}: {who} is training in it{since}; name another directory, or wait until it has ended{stale}"
    )
