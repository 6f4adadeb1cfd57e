"""Drop the rights of a process for good: no capabilities, Landlock for files, a seccomp filter for system calls.

All of it works without root and without namespaces. A process that has done it cannot undo it.
"""

import ctypes
import errno
import os
import platform
import stat
import struct
from collections.abc import Iterable


class MissingFeature(Exception):
    """What the machine lacks, as the end of the sentence "… needs"."""


_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CAPABILITIES_VERSION = 0x20080522


def give_up_privileges(parent: int, signal_number: int) -> None:
    """Give up root's capabilities and those of programs, and get a signal from the kernel when the parent ends."""
    header = struct.pack("Ii", _CAPABILITIES_VERSION, 0)
    _check_result(_libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24))))
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        raise OSError("the parent has ended")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)  # which Landlock and seccomp need


def _prctl(option: int, *values: int) -> None:
    _check_result(_libc.prctl(option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4])))


def _syscall(number: int, *values: int | bytes | None) -> int:
    passed = [ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value) for value in values]
    return _check_result(_libc.syscall(ctypes.c_long(number), *passed))


def _check_result(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


# --- files: https://docs.kernel.org/userspace-api/landlock.html

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_FILE, _MAKE_FILE, _TRUNCATE = 1 << 5, 1 << 8, 1 << 14
_FIRST_RIGHTS = (1 << 13) - 1
_LATER_RIGHTS = {2: 1 << 13, 3: _TRUNCATE, 5: 1 << 15}
"""Version -> what it was the first to restrict: moving between directories, truncating, control of devices."""


def file_rules(readable: Iterable[str], own: str, *, listable: Iterable[str], sinks: Iterable[str]) -> int:
    """A set of Landlock rules, as a file descriptor: every right is refused but those named here.

    Args:
        readable: Files, and directories with all below them; those that do not exist are left out.
        own: The directory in which plain files may be made, written, read and removed.
        listable: Directories of which, and of those below, the names of files may be read.
        sinks: Devices that may be written to.

    Raises:
        Missing: The kernel has no Landlock.
    """
    try:
        version = _syscall(_CREATE_RULESET, None, 0, 1)
    except OSError as error:
        why = "the kernel's lsm= or a container's filter may leave it out"
        raise MissingFeature(f"Landlock of Linux 5.13 or later ({error.strerror}): {why}") from error
    rights = _FIRST_RIGHTS | sum(right for since, right in _LATER_RIGHTS.items() if version >= since)
    # From 4: binding and connecting TCP; from 6: abstract sockets and signals.
    attributes = struct.pack("QQQ", rights, 0b11, 0b11)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    own_rights = _READ_FILE | _READ_DIR | _WRITE_FILE | _MAKE_FILE | _REMOVE_FILE | _TRUNCATE
    for paths, allowed in (
        (readable, _READ_FILE | _READ_DIR),
        (listable, _READ_DIR),
        (sinks, _READ_FILE | _WRITE_FILE),
        ([own], own_rights & rights),
    ):
        for path in paths:
            _allow(rules, path, allowed)
    return rules


def restrict_files(rules: int) -> None:
    """Put a set of rules on this thread."""
    _syscall(_RESTRICT_SELF, rules, 0)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            rights &= _READ_FILE | _WRITE_FILE
        _syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", rights, opened), 0)
    finally:
        os.close(opened)


# --- system calls: classic BPF over struct seccomp_data, <linux/seccomp.h>

_LOAD, _AND, _EQUALS, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # bytes into the data
_X32 = 0x40000000  # another ABI of x86_64
_YOUNG = 424  # the first call that all architectures number alike: C libraries try it and fall back on ENOSYS
_CLONE_THREAD = 0x00010000
_CLONE_OTHER = 0x7E026000  # new namespaces, CLONE_PTRACE and CLONE_VFORK
_O_TRUNC, _O_ACCMODE = 0o1000, 3

_CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
preadv2 327 286, pwritev2 328 287, close 3 57, close_range 436 436, fstat 5 80, newfstatat 262 79, statx 332 291,
faccessat 269 48, faccessat2 439 439, lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216,
madvise 28 233, brk 12 214, msync 26 227, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
rt_sigtimedwait 128 137, rt_sigpending 127 136, rt_sigsuspend 130 133, sigaltstack 131 132, getitimer 36 102,
setitimer 38 103, ppoll 271 73, pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22, dup 32 23,
dup3 292 24, pipe2 293 59, getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175,
getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150, getpgid 121 155,
getsid 124 156, getcwd 79 17, chdir 80 49, fchdir 81 50, getdents64 217 61, unlinkat 263 35, renameat 264 38,
renameat2 316 276, ftruncate 77 46, flock 73 32, fsync 74 82, fdatasync 75 83, sendfile 40 71, copy_file_range 326 285,
fadvise64 221 223, readlinkat 267 78, umask 95 166, clock_gettime 228 113, clock_getres 229 114,
clock_nanosleep 230 115, nanosleep 35 101, gettimeofday 96 169, times 100 153, getrusage 98 165, sysinfo 99 179,
uname 63 160, getrlimit 97 163, setrlimit 160 164, getcpu 309 168, sched_getaffinity 204 123, sched_yield 24 124,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, futex 202 98, set_robust_list 273 99, rseq 334 293,
set_tid_address 218 96, restart_syscall 219 128, exit 60 93, exit_group 231 94, membarrier 324 283, getrandom 318 278,
recvfrom 45 207, sendto 44 206, shutdown 48 210, getsockopt 55 209, getsockname 51 204, getpeername 52 205,
stat 4 -, lstat 6 -, access 21 -, poll 7 -, select 23 -, epoll_create 213 -, epoll_wait 232 -, dup2 33 -, pipe 22 -,
getpgrp 111 -, unlink 87 -, rename 82 -, readlink 89 -, time 201 -, pause 34 -, alarm 37 -
"""
"""Calls that are allowed with any arguments: number on x86_64, number on aarch64. Those that later kernels have stay
refused, as are, among others: new processes and programs, sockets that can be connected or bound, ptrace and its
kin, files of other kinds than plain ones, owners and modes and times, mounts and namespaces, keys, bpf, io_uring,
userfaultfd, memfd_create, shared memory and message queues, priorities and affinities."""
_CHECKED_CALLS = """
open 2 -, openat 257 56, clone 56 220, clone3 435 435, fcntl 72 25, ioctl 16 29, prctl 157 167, kill 62 129,
tgkill 234 131, socketpair 53 199, prlimit64 302 261
"""
"""Calls that are allowed with some arguments only, see `_checks`."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Name as `os.uname` has it -> AUDIT_ARCH_… of <linux/audit.h>."""

Instruction = tuple[int, int, int, int]
"""Code, how many instructions to skip if a comparison is true, how many if it is not, and a constant."""


def restrict_calls() -> None:
    """Refuse this thread, from now on, every call that is not listed here."""
    instructions = call_filter(architecture(), os.getpid())
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in instructions))
    header = ctypes.create_string_buffer(struct.pack("HP", len(instructions), ctypes.addressof(packed)))
    try:
        _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(header))
    except OSError as error:
        raise MissingFeature(f"seccomp filters, CONFIG_SECCOMP_FILTER of the kernel ({error.strerror})") from error


def architecture() -> str:
    """This machine's; `MissingFeature` if the numbers of its calls are not known."""
    machine, bits = platform.machine(), 8 * ctypes.sizeof(ctypes.c_void_p)
    if machine not in ARCHITECTURES or bits != 64:
        raise MissingFeature(f"{' or '.join(ARCHITECTURES)} (this is {machine}, {bits} bit)")
    return machine


def call_numbers(machine: str, *, checked: bool) -> dict[str, int]:
    """Name -> number of the calls that are allowed with any arguments, or if ``checked`` with some only."""
    column = 1 + [*ARCHITECTURES].index(machine)
    rows = [row.split() for row in (_CHECKED_CALLS if checked else _CALLS).split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def call_filter(machine: str, process: int) -> list[Instruction]:
    """The filter for a process, which may send signals to itself, on a key of `ARCHITECTURES`."""
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUALS, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        steps += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for number in call_numbers(machine, checked=False).values():
        steps += [(_EQUALS, 0, 1, number), _answer(None)]
    checks = _checks(process)
    for name, number in call_numbers(machine, checked=True).items():
        steps += [(_EQUALS, 0, len(checks[name]), number), *checks[name]]
    return [*steps, (_AT_LEAST, 0, 1, _YOUNG), _answer(errno.ENOSYS), _answer(errno.EPERM)]


def _checks(process: int) -> dict[str, list[Instruction]]:
    """What each checked call has to be; all of it ends with an answer."""
    refuse = _answer(errno.EPERM)
    return {
        "open": _opens(1),
        "openat": _opens(2),
        "clone": [  # threads of its own
            *(_argument(0), (_HAS_BIT, 0, 1, _CLONE_OTHER), refuse),
            *((_HAS_BIT, 0, 1, _CLONE_THREAD), _answer(None), refuse),
        ],
        "clone3": [_answer(errno.ENOSYS)],  # its flags are in memory, which filters cannot read: libraries use clone
        # Copies, flags and locks; no owners, signals, leases or seals.
        "fcntl": _one_of(1, 0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032),
        # Is it a terminal, how large is it, how much is there, blocking, close-on-exec.
        "ioctl": _one_of(1, 0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451),
        "prctl": _one_of(0, 15, 16),  # the name of a thread
        "kill": _one_of(0, process),
        "tgkill": _one_of(0, process),
        "socketpair": [  # AF_UNIX and SOCK_STREAM, as asyncio makes; a datagram's end could send to any address
            *(_argument(0), (_EQUALS, 1, 0, 1), refuse),
            *(_argument(1), (_AND, 0, 0, 0xF), (_EQUALS, 0, 1, 1), _answer(None), refuse),
        ],
        "prlimit64": _one_of(0, 0, process),
    }


def _opens(argument: int) -> list[Instruction]:
    """Files open to read, to write or both; Landlock before version 3 overlooks what does neither and truncates."""
    return [
        *(_argument(argument), (_HAS_BIT, 0, 4, _O_TRUNC)),
        *((_AND, 0, 0, _O_ACCMODE), (_EQUALS, 1, 0, os.O_WRONLY), (_EQUALS, 0, 4, os.O_RDWR), _answer(None)),
        *((_AND, 0, 0, _O_ACCMODE), (_EQUALS, 1, 0, _O_ACCMODE), _answer(None), _answer(errno.EPERM)),
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
