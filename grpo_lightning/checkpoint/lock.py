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

NAME = ".lock"
PATIENCE = 3.0
"""Seconds to wait for a holder to end: a process whose parent was killed may need a moment to die itself."""

_OF_ONE_RUN = ("checkpoint", "rollouts")
"""Callbacks whose files a second run would overwrite."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_held: set[Path] = set()
"""The directories that this process holds: the kernel's locks do not keep a process from itself."""


class Locked(ValueError):
    """Another process trains in the directory."""


@contextmanager
def all_held(config: Mapping[str, Any], directory: Path, *, first: bool) -> Iterator[None]:
    """`held`, of a run directory and of what lies elsewhere and can hold the files of one run only.

    Args:
        config: The run's settings.
        directory: The run directory.
        first: As in `held`.
    """
    places = {directory.resolve(): "hydra.run.dir"}
    for name in _OF_ONE_RUN:
        place = ((config.get("callbacks") or {}).get(name) or {}).get("directory")
        if isinstance(place, str) and not Path(place).resolve().is_relative_to(directory.resolve()):
            places.setdefault(Path(place).resolve(), f"callbacks.{name}.directory")
    if isinstance(place := (config.get("sampler") or {}).get("directory"), str):
        places.setdefault(Path(place).resolve(), "sampler.directory")
    with ExitStack() as stack:
        for path, key in places.items():
            stack.enter_context(held(path if key != "hydra.run.dir" else directory, first=first, key=key))
        yield


@contextmanager
def held(
    directory: Path, *, first: bool = True, patience: float | None = None, key: str = "hydra.run.dir"
) -> Iterator[None]:
    """Inside, no other run trains in ``directory``, which is made if it does not exist.

    The lock is a record lock of the kernel: it is gone when the process is, also after ``kill -9``, other processes
    that this one starts do not inherit it, and NFS has it. Where a file system has none, a file says who holds it.

    Args:
        directory: The run directory.
        first: Whether this process is the first of its run; the others do nothing here.
        patience: Seconds to wait for another holder to end; 3 unless given.
        key: Of the setting that names the directory.

    Raises:
        Locked: Another process, or another run of this process, trains there; or the directory cannot be written to.
    """
    if not first:
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(directory, error, key) from error
    place = directory.resolve()
    if place in _held:
        raise Locked(_refusal(directory, {"pid": os.getpid(), "host": socket.gethostname()}, key))
    path = place / NAME
    descriptor = _acquired(path, directory, PATIENCE if patience is None else patience, key)
    _held.add(place)
    try:
        yield
    finally:
        _held.discard(place)
        with suppress(OSError):
            path.unlink()  # while it is held: whoever waits for this file sees that it is another one by then
        os.close(descriptor)


def is_held(directory: Path) -> bool:
    """Whether a run trains in ``directory`` now, of this process or another one; nothing is written."""
    if directory.resolve() in _held:
        return True  # and not looked at: this process would lose its lock by closing the file
    try:
        descriptor = os.open(directory / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_LOCKS or _lives(_read(descriptor))
    finally:
        os.close(descriptor)
    return False


def _acquired(path: Path, directory: Path, patience: float, key: str) -> int:
    deadline = time.monotonic() + patience
    while True:
        try:
            # Not O_TRUNC: what stands in it is the holder's.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if path.is_symlink():
                raise _linked(directory, key) from error
            raise _unwritable(directory, error, key) from error
        if os.fstat(descriptor).st_nlink > 1:  # another name of somebody's file
            os.close(descriptor)
            raise _linked(directory, key)
        holder = _lock(descriptor)
        if holder is None:
            if _is_at(descriptor, path):
                _write(descriptor)
                return descriptor
            os.close(descriptor)  # its last holder has removed it meanwhile
            continue
        os.close(descriptor)
        if time.monotonic() >= deadline:
            raise Locked(_refusal(directory, holder, key))
        time.sleep(0.1)


def _linked(directory: Path, key: str) -> Locked:
    return Locked(
        f"{key}={directory}: {NAME} in it is a link, which is not written to; allowed is a directory without it, so "
        f"remove {directory / NAME}"
    )


def _lock(descriptor: int) -> dict[str, Any] | None:
    """None once the file is locked; else what it says of its holder."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        known = _read(descriptor)
        if error.errno not in _NO_LOCKS:
            return known
        return known if known and _lives(known) else None
    return None


def _lives(holder: dict[str, Any]) -> bool:
    """Whether the process that a lock names may still run; of another machine nobody here can tell."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(pid, int):
        return True
    if pid == os.getpid():
        return False  # left by a process that had this number before
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _read(descriptor: int) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = json.loads(os.pread(descriptor, 4096, 0))
        if isinstance(content, dict):
            return content
    return {}


def _write(descriptor: int) -> None:
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    with suppress(OSError):  # on a full disk the lock holds and names nobody
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)


def _unwritable(directory: Path, error: OSError, key: str) -> Locked:
    return Locked(f"{key}={directory}: allowed is a directory that can be written to ({error.strerror})")


def _refusal(directory: Path, holder: dict[str, Any], key: str) -> str:
    who = f"process {holder['pid']} on {holder.get('host')}" if "pid" in holder else "another process"
    since = f" since {holder['started']}" if "started" in holder else ""
    elsewhere = holder.get("host") not in (None, socket.gethostname())
    stale = f"; if that process is gone, remove {directory / NAME}" if elsewhere else ""
    return (
        f"{key}={directory}: {who} is training in it{since}; allowed is a directory of its own, or this one "
        f"when that run has ended{stale}"
    )
