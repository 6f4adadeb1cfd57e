"""A filter of system calls, which a process puts on and can never take off again.

A list of what is allowed: what the kernel learns to do later stays refused. Not on it are, among others: new processes
and programs (fork, vfork, execve), sockets that can be connected or bound, signals to others, ptrace and its kin, files
of other kinds than plain ones, owners and modes and times of files, mounts and namespaces, keys, bpf, io_uring,
userfaultfd, memfd_create, shared memory and message queues, limits, priorities and affinities.
"""

import ctypes
import errno
import os
import platform
import struct

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
# Is it a terminal, how large is it, how much is there, blocking, close-on-exec.
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_TRUNCATE, _ACCESS = 0o1000, 3  # of open's flags
_UNIX, _STREAM, _TYPE = 1, 1, 0xF

_BOTH = """
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
recvfrom 45 207, sendto 44 206, shutdown 48 210, getsockopt 55 209, getsockname 51 204,
getpeername 52 205
"""
_ONLY_X86_64 = """
stat 4, lstat 6, access 21, poll 7, select 23, epoll_create 213, epoll_wait 232, dup2 33, pipe 22, getpgrp 111,
unlink 87, rename 82, readlink 89, time 201, pause 34, alarm 37
"""
_BY_ARGUMENT = """
openat 257 56, clone 56 220, clone3 435 435, fcntl 72 25, ioctl 16 29, prctl 157 167, kill 62 129, tgkill 234 131,
socketpair 53 199, prlimit64 302 261
"""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Name as `os.uname` has it -> AUDIT_ARCH_… of <linux/audit.h>."""

Instruction = tuple[int, int, int, int]
"""Code, how many instructions to skip if a comparison is true, how many if it is not, and a constant."""


def install() -> None:
    """Refuse this thread, from now on, every call that is not listed here.

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
    if platform.system() != "Linux" or machine not in ARCHITECTURES or not is_64_bit:
        found = f"{platform.system()} on {machine}" + ("" if is_64_bit else ", 32 bit")
        raise Missing(f"Linux on {' or '.join(ARCHITECTURES)} (this is {found})")
    if libc is None:
        raise Missing("ctypes, with which Python calls the C library")
    return machine


def program(machine: str, own: int) -> list[Instruction]:
    """The filter in classic BPF.

    Args:
        machine: A key of `ARCHITECTURES`.
        own: The process that it is for, which may send signals to itself.
    """
    known = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUALS, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        known += [(_AT_LEAST, 0, 1, _OF_ANOTHER_ABI), (_RETURN, 0, 0, _KILL)]
    for number in plain_calls(machine).values():
        known += [(_EQUALS, 0, 1, number), _answer(None)]
    checks = _by_argument(own)
    for name, number in checked_calls(machine).items():
        known += [(_EQUALS, 0, len(checks[name]), number), *checks[name]]
    return [*known, (_AT_LEAST, 0, 1, _YOUNG), _answer(errno.ENOSYS), _answer(errno.EPERM)]


def _by_argument(own: int) -> dict[str, list[Instruction]]:
    """What each of `checked_calls` has to be; all of it ends with an answer."""
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


def _table(text: str, column: int) -> dict[str, int]:
    rows = [row.split() for row in text.split(",")]
    return {row[0]: int(row[column]) for row in rows}


def plain_calls(architecture: str) -> dict[str, int]:
    """Name -> number of the calls that are allowed with any arguments."""
    if architecture == "x86_64":
        return _table(_BOTH, 1) | _table(_ONLY_X86_64, 1)
    return _table(_BOTH, 2)


def checked_calls(architecture: str) -> dict[str, int]:
    """Name -> number of the calls that are allowed with some arguments only."""
    if architecture == "x86_64":
        return _table(_BY_ARGUMENT, 1) | {"open": 2}
    return _table(_BY_ARGUMENT, 2)
