"""A filter of system calls, which a process puts on and can never take off again."""

import ctypes
import errno
import os
import platform
import struct

from grpo_lightning.sandbox import syscalls
from grpo_lightning.sandbox.kernel import Missing, libc, prctl

_LOAD, _AND, _EQUALS, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
"""Instructions of classic BPF, <linux/bpf_common.h>: a word of the call, and with a constant, and three comparisons."""
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # bytes into struct seccomp_data
_OF_ANOTHER_ABI = 0x40000000  # x32 on x86_64
_YOUNG = 424  # the first call that all architectures number alike: C libraries try it and fall back on ENOSYS

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_PR_SET_NAME, _PR_GET_NAME = 15, 16
_THREAD = 0x00010000  # CLONE_THREAD
_NO_THREAD = 0x7E026000  # new namespaces, CLONE_PTRACE and CLONE_VFORK
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)  # copies, flags and locks; no owners, signals, leases, seals
_IOCTL = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # is it a terminal, how much is there, blocking, close-on-exec
_TRUNCATE, _ACCESS = 0o1000, 3  # of open's flags
_UNIX, _STREAM, _TYPE = 1, 1, 0xF

Instruction = tuple[int, int, int, int]
"""Code, how many instructions to skip if a comparison is true, how many if it is not, and a constant."""


def install() -> None:
    """Refuse this thread, from now on, every call that `syscalls` does not name.

    Raises:
        Missing: The kernel has no filters, or the architecture is not known.
    """
    instructions = program(architecture(), os.getpid())
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    header = ctypes.create_string_buffer(struct.pack("HP", len(instructions), ctypes.addressof(packed)))
    try:
        prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(header))
    except OSError as error:
        raise Missing(f"seccomp filters, CONFIG_SECCOMP_FILTER of the kernel ({error.strerror})") from error


def architecture() -> str:
    """This machine's, for which calls' numbers are known.

    Raises:
        Missing: They are not.
    """
    machine = platform.machine()
    is_64_bit = ctypes.sizeof(ctypes.c_void_p) == 8
    if platform.system() != "Linux" or machine not in syscalls.ARCHITECTURES or not is_64_bit:
        found = f"{platform.system()} on {machine}" + ("" if is_64_bit else ", 32 bit")
        raise Missing(f"Linux on {' or '.join(syscalls.ARCHITECTURES)} (this is {found})")
    if libc is None:
        raise Missing("ctypes, with which Python calls the C library")
    return machine


def program(machine: str, own: int) -> list[Instruction]:
    """The filter in classic BPF.

    Args:
        machine: A key of `syscalls.ARCHITECTURES`.
        own: The process that it is for, which may send signals to itself.
    """
    known = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUALS, 1, 0, syscalls.ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        known += [(_AT_LEAST, 0, 1, _OF_ANOTHER_ABI), (_RETURN, 0, 0, _KILL)]
    for number in syscalls.plain(machine).values():
        known += [(_EQUALS, 0, 1, number), _answer(None)]
    checks = _by_argument(own)
    for name, number in syscalls.by_argument(machine).items():
        known += [(_EQUALS, 0, len(checks[name]), number), *checks[name]]
    return [*known, (_AT_LEAST, 0, 1, _YOUNG), _answer(errno.ENOSYS), _answer(errno.EPERM)]


def _by_argument(own: int) -> dict[str, list[Instruction]]:
    """What each of `syscalls.by_argument` has to be; all of it ends with an answer."""
    return {
        "open": _opens(1),
        "openat": _opens(2),
        "clone": [
            _argument(0),
            (_HAS_BIT, 0, 1, _NO_THREAD),
            _answer(errno.EPERM),
            (_HAS_BIT, 0, 1, _THREAD),
            _answer(None),
            _answer(errno.EPERM),
        ],
        "clone3": [_answer(errno.ENOSYS)],  # its flags are in memory, which filters cannot read: libraries use clone
        "fcntl": _one_of(1, *_FCNTL),
        "ioctl": _one_of(1, *_IOCTL),
        "prctl": _one_of(0, _PR_SET_NAME, _PR_GET_NAME),
        "kill": _one_of(0, own),
        "tgkill": _one_of(0, own),
        # Two ends of a stream of its own, as asyncio makes; a datagram's could send to any address.
        "socketpair": [
            _argument(0),
            (_EQUALS, 1, 0, _UNIX),
            _answer(errno.EPERM),
            _argument(1),
            (_AND, 0, 0, _TYPE),
            (_EQUALS, 0, 1, _STREAM),
            _answer(None),
            _answer(errno.EPERM),
        ],
        "prlimit64": _one_of(0, 0, own),
    }


def _opens(argument: int) -> list[Instruction]:
    """Files open to read, to write or both; Landlock before version 3 overlooks what does neither and truncates."""
    return [
        _argument(argument),
        (_HAS_BIT, 0, 4, _TRUNCATE),
        (_AND, 0, 0, _ACCESS),
        (_EQUALS, 1, 0, os.O_WRONLY),
        (_EQUALS, 0, 4, os.O_RDWR),
        _answer(None),
        (_AND, 0, 0, _ACCESS),
        (_EQUALS, 1, 0, _ACCESS),
        _answer(None),
        _answer(errno.EPERM),
    ]


def _one_of(argument: int, *values: int) -> list[Instruction]:
    allowed = [step for value in values for step in ((_EQUALS, 0, 1, value), _answer(None))]
    return [_argument(argument), *allowed, _answer(errno.EPERM)]


def _argument(index: int) -> Instruction:
    """Load an argument's lower half: those that are compared are of 32 bits, and both machines are little-endian."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _answer(error: int | None) -> Instruction:
    """Let the call pass, or refuse it with an error."""
    return (_RETURN, 0, 0, _ALLOW if error is None else _REFUSE | error)
