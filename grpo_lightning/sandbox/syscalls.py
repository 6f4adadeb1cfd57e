"""Which calls of the kernel a sandboxed program may make, and their numbers.

A list of what is allowed: what the kernel learns to do later stays refused. Not on it are, among others: new processes
and programs (fork, vfork, execve), sockets that can be connected or bound, signals to others, ptrace and its kin, files
of other kinds than plain ones, owners and modes and times of files, mounts and namespaces, keys, bpf, io_uring,
userfaultfd, memfd_create, shared memory and message queues, limits, priorities and affinities.
"""

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


def _table(text: str, column: int) -> dict[str, int]:
    rows = [row.split() for row in text.split(",")]
    return {row[0]: int(row[column]) for row in rows}


def plain(architecture: str) -> dict[str, int]:
    """Name -> number of the calls that are allowed with any arguments."""
    if architecture == "x86_64":
        return _table(_BOTH, 1) | _table(_ONLY_X86_64, 1)
    return _table(_BOTH, 2)


def by_argument(architecture: str) -> dict[str, int]:
    """Name -> number of the calls that are allowed with some arguments only."""
    if architecture == "x86_64":
        return _table(_BY_ARGUMENT, 1) | {"open": 2}
    return _table(_BY_ARGUMENT, 2)
