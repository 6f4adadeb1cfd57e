"""The calls of the C library that Python has no functions for."""

import ctypes
import os
import struct


class Missing(Exception):
    """What the machine lacks, as the end of the sentence "… needs"."""


try:
    libc = ctypes.CDLL(None, use_errno=True)
except (OSError, TypeError):  # Windows
    libc = None  # type: ignore[assignment]

NO_NEW_PRIVILEGES = 38
"""For `prctl`: no program that this process could start has more rights than itself."""
_PR_SET_PDEATHSIG = 1
_CAPABILITIES_VERSION = 0x20080522


def prctl(option: int, *values: int) -> None:
    """``prctl(option, …)``.

    Raises:
        OSError: It failed.
    """
    _checked(libc.prctl(option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4])))


def syscall(number: int, *values: int | bytes | None) -> int:
    """``syscall(number, …)`` with whole numbers, pointers to bytes and null pointers; returns what it does.

    Raises:
        OSError: It failed.
    """
    passed = [ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value) for value in values]
    return _checked(libc.syscall(ctypes.c_long(number), *passed))


def drop_capabilities() -> None:
    """Give up what root may do beyond the rights of a file's owner, such as raising limits.

    Raises:
        OSError: It failed.
    """
    header = struct.pack("Ii", _CAPABILITIES_VERSION, 0)
    _checked(libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24))))


def end_with_parent(parent: int, signal_number: int) -> None:
    """Let the kernel send this process a signal when its parent ends.

    Raises:
        OSError: It failed, or the parent has ended already.
    """
    prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        raise OSError("the parent has ended")


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
