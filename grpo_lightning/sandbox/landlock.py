"""Which files a process may read and write: rules of the kernel, which it puts on and never takes off again."""

import errno
import os
import stat
import struct
from collections.abc import Iterable

from grpo_lightning.sandbox.kernel import Missing, syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_VERSION, _BENEATH = 1, 1  # a flag of _CREATE, a kind of rule

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_FILE, _MAKE_FILE, _TRUNCATE = 1 << 5, 1 << 8, 1 << 14
_FIRST_RIGHTS = (1 << 13) - 1
_LATER_RIGHTS = {2: 1 << 13, 3: _TRUNCATE, 5: 1 << 15}
"""Version -> what it knew first: moving between directories, truncating, control of devices."""
_NETWORK, _SCOPES = 0b11, 0b11  # from 4: to bind and to connect TCP; from 6: abstract sockets and signals


def version() -> int:
    """The version of the kernel's Landlock.

    Raises:
        Missing: It has none.
    """
    try:
        return syscall(_CREATE, None, 0, _VERSION)
    except OSError as error:
        why = "is switched off: lsm= of the kernel's command line leaves it out"
        if error.errno != errno.EOPNOTSUPP:
            why = f"is not there or not allowed here ({error.strerror}); a container's own filter may refuse it"
        raise Missing(f"Landlock, which Linux has from 5.13 on and which {why}") from error


def rules(readable: Iterable[str], own: str, *, listable: Iterable[str] = (), sinks: Iterable[str] = ()) -> int:
    """A set of rules, as a file descriptor: every right that Landlock knows is refused but those named here.

    Args:
        readable: Files, and directories with all below them; those that do not exist are left out.
        own: The directory in which plain files may be made, written, read and removed.
        listable: Directories of which, and of those below, the names of files may be read.
        sinks: Devices that may be written to.

    Raises:
        Missing: The kernel has no Landlock.
        OSError: A file or directory cannot be opened.
    """
    known = version()
    rights = _FIRST_RIGHTS | sum(right for since, right in _LATER_RIGHTS.items() if known >= since)
    size = 8 if known < 4 else 16 if known < 6 else 24
    found = syscall(_CREATE, struct.pack("QQQ", rights, _NETWORK, _SCOPES)[:size], size, 0)
    for path in readable:
        _allow(found, path, _READ_FILE | _READ_DIR)
    for path in listable:
        _allow(found, path, _READ_DIR)
    for path in sinks:
        _allow(found, path, _READ_FILE | _WRITE_FILE)
    _allow(found, own, (_READ_FILE | _READ_DIR | _WRITE_FILE | _MAKE_FILE | _REMOVE_FILE | _TRUNCATE) & rights)
    return found


def restrict(found: int) -> None:
    """Put a set of rules on this thread.

    Raises:
        OSError: It failed.
    """
    syscall(_RESTRICT, found, 0)


def _allow(found: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            rights &= _READ_FILE | _WRITE_FILE
        syscall(_ADD, found, _BENEATH, struct.pack("=Qi", rights, opened), 0)
    finally:
        os.close(opened)
