"""One run at a time in a directory: a lock file that names its holder and ends with its process."""

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

from grpo_lightning.config.settings import value_at

LOCK_FILE = ".lock"
PATIENCE = 3.0
"""Seconds to wait for the holder: a process whose parent was killed may need a moment to end."""

_DIRECTORIES = ("callbacks.checkpoint.directory", "callbacks.rollouts.directory", "sampler.directory")
"""Settings that name further directories whose files a second run would overwrite."""
_locked: set[Path] = set()
"""The directories that this process has locked: record locks do not exclude a process from itself."""


class DirectoryLocked(ValueError):
    """Another run uses the directory."""


@contextmanager
def lock_run(config: Mapping[str, Any], directory: Path) -> Iterator[None]:
    """`lock` the run directory and the directories elsewhere that can hold the files of one run only."""
    places = {directory.resolve(): "hydra.run.dir"}
    for key in _DIRECTORIES:
        place = value_at(config, key)
        if isinstance(place, str) and not Path(place).resolve().is_relative_to(directory.resolve()):
            places.setdefault(Path(place).resolve(), key)
    with ExitStack() as stack:
        for path, key in places.items():
            stack.enter_context(lock(path, key=key))
        yield


@contextmanager
def lock(directory: Path, *, key: str = "hydra.run.dir") -> Iterator[None]:
    """Context that locks ``directory`` against other runs, and creates it if it does not exist.

    The lock is a record lock of the kernel: it ends with the process, also after ``kill -9``, is not inherited by
    processes that this one starts, and works on NFS. On a file system without locks nothing is locked.

    Raises:
        Locked: Another process, or another run of this process, uses it; or it cannot be written to.
    """
    place, path = directory.resolve(), directory / LOCK_FILE
    if place in _locked:
        raise DirectoryLocked(_refusal(directory, key))
    deadline = time.monotonic() + PATIENCE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        while (file := _open_locked(path)) is None:
            if time.monotonic() >= deadline:
                raise DirectoryLocked(_refusal(directory, key))
            time.sleep(0.1)
    except OSError as error:
        raise DirectoryLocked(f"{key}={directory}: the directory cannot be written to ({error.strerror})") from error
    _locked.add(place)
    try:
        with suppress(OSError):  # on a full disk the lock works without the holder's name
            started = datetime.now().astimezone().isoformat(timespec="seconds")
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
            os.ftruncate(file, 0)
            os.pwrite(file, (json.dumps(holder) + "\n").encode(), 0)
        yield
    finally:
        _locked.discard(place)
        with suppress(OSError):
            path.unlink()  # while it is locked: whoever waits for it sees that it is another file by then
        os.close(file)


def is_locked(directory: Path) -> bool:
    """Whether a run, in this process or another, is using ``directory``; nothing is written."""
    if directory.resolve() in _locked:
        return True  # closing the file here would end the lock of this process
    with suppress(OSError), (directory / LOCK_FILE).open("rb") as file:
        return not _try_lock(file.fileno(), fcntl.LOCK_SH)
    return False


def _open_locked(path: Path) -> int | None:
    """The open lock file, which this process has locked; None while another one has."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # not O_TRUNC: the holder's name is in it
    with suppress(FileNotFoundError):
        if _try_lock(file, fcntl.LOCK_EX) and os.path.samestat(os.fstat(file), path.stat()):
            return file
    os.close(file)  # of another process, or removed by its last holder
    return None


def _try_lock(file: int, kind: int) -> bool:
    """Whether nobody else has locked the file; an error other than these two says that there are no locks."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _refusal(directory: Path, key: str) -> str:
    who = f"process {os.getpid()} uses it already"
    if directory.resolve() not in _locked:  # else closing the file would end this process's lock
        who = "another process uses it"
        with suppress(OSError, ValueError, KeyError):
            holder = json.loads((directory / LOCK_FILE).read_text())
            who = f"process {holder['pid']} on {holder['host']} uses it since {holder['started']}"
    return f"{key}={directory}: {who}; name another directory, or wait until it has ended"
