"""A small interpreter that forks the programs, so that each starts in milliseconds, and ends those that take too much.

It has Python's library alone in it, and never the text, the input or the output of a program, which pass it by in
files. When its caller ends it ends too, with the program that it watches.
"""

import atexit
import gc
import json
import linecache
import os
import random
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from grpo_lightning.sandbox import isolation

_PRELOADED = ("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools")
for _name in (*_PRELOADED, "math", "operator", "re", "statistics", "string", "typing"):
    import_module(_name)  # for the programs, which find them imported

_POLL_SECONDS = 0.02  # between two checks of what the kernel does not limit: threads, files and output
_MESSAGE = 65_536  # bytes
_FILES = 4  # text, stdin, stdout, stderr
_PACKAGES = ("site-packages", "dist-packages")
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_DEVICES = ("/dev/urandom", "/dev/random", "/dev/zero")
_TRAINER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_AT_CPU_LIMIT = 0.9  # of its CPU seconds: a program that used these and was killed was at its limit
_NAME = "program.py"  # what tracebacks call the text
_READY = b"."  # what a program's process writes once its rights are given up; anything else is why it was not run
_READY_FD = 3  # where it writes that, beside stdin, stdout and stderr
_MAX_OPEN_FILES = 64
_MAX_SERVER_FILES = 1024  # the server has a dozen open
_STACK = 64 * 2**20  # bytes that the first thread's may grow to


def main(descriptor: int, place: str) -> None:
    """Serve until the caller is gone.

    Args:
        descriptor: A socket that keeps messages apart; the first one sent here is what the machine lacks, if anything.
        place: Where the directory of the programs is made.
    """
    for number in _TRAINER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The caller may have so many files open that this one's number is beyond those that a program closes.
    channel = socket.socket(fileno=os.dup(descriptor))
    os.close(descriptor)
    server, directory = os.getpid(), tempfile.mkdtemp(prefix="sandbox-", dir=place)
    try:
        try:
            rules = _file_rules(directory)
        except (isolation.MissingFeature, OSError) as error:
            channel.send(json.dumps({"missing": str(error)}).encode())
            return
        channel.send(json.dumps({"missing": None}).encode())
        gc.collect()
        gc.freeze()  # what is not looked at stays shared with the programs
        while reply := _serve(channel, directory, rules):
            channel.send(json.dumps(reply).encode())
    finally:
        if os.getpid() == server:  # and not a program that ends
            shutil.rmtree(directory, ignore_errors=True)


def _file_rules(directory: str) -> int:
    isolation.architecture()
    places = [place for place in sys.path if Path(place).is_dir()]
    readable = [*_library(places), *_SYSTEM, *_DEVICES]
    return isolation.file_rules(readable, directory, listable=places, sinks=["/dev/null"])


def _library(places: Sequence[str]) -> Iterator[str]:
    """Python's own library without what others installed beside it, and the shared libraries of its prefix."""
    for place in places:
        yield from (str(path) for path in Path(place).iterdir() if path.name not in _PACKAGES)
    yield from (path for path in sys.path if path.endswith(".zip"))
    yield from (str(path) for path in Path(sys.base_prefix, "lib").glob("*.so*"))


def _serve(channel: socket.socket, directory: str, rules: int) -> dict[str, Any] | None:
    """Run the next program; returns how it ended, or None if the caller is gone."""
    message, files, _, _ = socket.recv_fds(channel, _MESSAGE, _FILES)
    if not message:
        return None
    limits = json.loads(message)
    ready, ready_writer = os.pipe()
    server, program = os.getpid(), os.fork()
    if program == 0:
        _become_program(files, ready_writer, limits, server, directory, rules)
    os.close(ready_writer)
    try:
        reason = _watch(channel, program, limits, directory, files[2:])
    finally:
        with suppress(ProcessLookupError):
            os.kill(program, signal.SIGKILL)
        _, status, usage = os.wait4(program, 0)
    reason = reason or _excess(program, limits, directory, files[2:])
    for entry in list(os.scandir(directory)):  # programs can make no directories
        os.unlink(entry.path)
    words = os.read(ready, 1024)
    for opened in (*files, ready):
        os.close(opened)
    if reason == "gone":
        return None
    if words != _READY:
        return {"failed": words.decode(errors="replace") or "it ended before its rights were given up"}
    code = os.waitstatus_to_exitcode(status)
    used = usage.ru_utime + usage.ru_stime
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and used > _AT_CPU_LIMIT * limits["cpu_seconds"]):
        reason = reason or "time"
    return {"ended": reason or ("crash" if code < 0 else "exit"), "code": code, "failed": None}


def _watch(
    channel: socket.socket, program: int, limits: Mapping[str, Any], directory: str, output: Sequence[int]
) -> str | None:
    """Wait until the program ends, or for a reason to end it, which is returned."""
    process = os.pidfd_open(program)
    try:
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        poll.register(process, select.POLLIN)
        end = time.monotonic() + limits["seconds"]
        while True:
            left = end - time.monotonic()
            ready = {descriptor for descriptor, _ in poll.poll(1000 * max(0.0, min(_POLL_SECONDS, left)))}
            if process in ready:
                return None
            if ready:
                return "gone"
            if left <= 0:
                return "time"
            if excess := _excess(program, limits, directory, output):
                return excess
    finally:
        os.close(process)


def _excess(program: int, limits: Mapping[str, Any], directory: str, output: Sequence[int]) -> str | None:
    """What a program has more of than it may have: threads, files (or bytes in them) or output."""
    with suppress(OSError), open(f"/proc/{program}/stat", "rb") as opened:
        if int(opened.read().rpartition(b")")[2].split()[17]) > limits["threads"]:
            return "threads"
    count = taken = 0
    for count, entry in enumerate(os.scandir(directory), 1):
        with suppress(FileNotFoundError):
            taken += 512 * entry.stat(follow_symlinks=False).st_blocks
        if count > limits["files"] or taken > limits["file_bytes"] + count * 2**16:  # blocks are rounded up
            return "files"
    return "output" if any(os.fstat(file).st_size > limits["output_bytes"] for file in output) else None


# --- the process that becomes the program


def _become_program(
    files: Sequence[int], ready: int, limits: Mapping[str, Any], server: int, directory: str, rules: int
) -> NoReturn:
    """Turn this process, which was forked to that end, into the program, and end as Python does."""
    text = b""
    while part := os.read(files[0], 2**20):
        text += part
    try:
        _give_up_rights(files, ready, limits, server, directory, rules)
    except BaseException as error:
        kind = "it needs" if isinstance(error, isolation.MissingFeature) else f"{type(error).__name__}:"
        os.write(ready, f"{kind} {error}".encode(errors="replace")[:500])
        os._exit(1)
    module, leave, streams = _reset_interpreter(text), os._exit, (sys.stdout, sys.stderr)
    exec(compile(text, _NAME, "exec", dont_inherit=True), vars(module))
    if threading.active_count() == 1:  # a few milliseconds less than when Python takes itself down
        getattr(atexit, "_run_exitfuncs", int)()
        for stream in streams:
            if not stream.closed:
                stream.flush()
        leave(0)
    raise SystemExit(0)


def _give_up_rights(
    files: Sequence[int], ready: int, limits: Mapping[str, Any], server: int, directory: str, rules: int
) -> None:
    """Give up what a program must not have, in this order: each step needs rights that later ones take away."""
    os.chdir(directory)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as adjusted:
        adjusted.write("1000")  # the first process to end where the machine runs out of memory
    stack = resource.getrlimit(resource.RLIMIT_STACK)[1]
    for kind, most in (
        (resource.RLIMIT_AS, limits["memory_mb"] * 2**20),
        (resource.RLIMIT_STACK, _STACK if stack == resource.RLIM_INFINITY else min(_STACK, stack)),
        (resource.RLIMIT_FSIZE, max(limits["file_bytes"], limits["output_bytes"] + 1)),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        *((kind, 0) for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE)),
    ):
        resource.setrlimit(kind, (most, most))
    # The first limit is a signal that a program can catch, the second none.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_seconds"], limits["cpu_seconds"] + 1))
    isolation.give_up_privileges(server, signal.SIGKILL)  # after the limits, which root could raise again
    isolation.restrict_files(rules)
    for number in _TRAINER_SIGNALS[1:]:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    isolation.restrict_calls()
    for place, opened in enumerate((*files[1:], ready)):
        os.dup2(opened, place)  # all of them are 3 or more, and what is 3 comes last or was copied before
    os.write(_READY_FD, _READY)
    os.closerange(_READY_FD, _MAX_SERVER_FILES)


def _reset_interpreter(text: bytes) -> ModuleType:
    """Make this interpreter look as if it had just begun, with `random` at the same place; returns its main module."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("grpo_lightning", "__main__")]:
        del sys.modules[name]
    module = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv, sys.excepthook = [_NAME], _print_error
    os.environ.clear()
    for stream in (sys.stdin, sys.stdout):  # of UTF-8 mode, which lets bytes through that are none
        stream.reconfigure(errors="strict")  # type: ignore[union-attr]
    random.seed(0)
    lines = text.decode(errors="replace").splitlines(keepends=True)
    linecache.cache[_NAME] = (len(text), None, lines, _NAME)  # for tracebacks and `inspect`
    return module


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception as Python does, from the program's first line on."""
    while trace and trace.tb_frame.f_code.co_filename != _NAME:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace, file=sys.stderr)
