"""A small interpreter that forks the programs, so that each starts in milliseconds, and ends those that take too much.

It is a process of its own with Python's library alone in it: no torch, no environment, and never the text, the input or
the output of a program, which pass it by in files. One program runs at a time. When its caller ends it ends too, with
the program that it watches.
"""

import bisect  # noqa: F401  # these and the next are there for the programs, which find them imported
import collections
import copy  # noqa: F401
import datetime  # noqa: F401
import decimal  # noqa: F401
import fractions  # noqa: F401
import functools  # noqa: F401
import gc
import heapq  # noqa: F401
import itertools  # noqa: F401
import json
import math  # noqa: F401
import operator  # noqa: F401
import os
import re  # noqa: F401
import select
import shutil
import signal
import socket
import statistics  # noqa: F401
import string  # noqa: F401
import sys
import tempfile
import time
import typing  # noqa: F401
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_lightning.sandbox import kernel, landlock, program, seccomp

_TICK = 0.02  # s between two looks at what a program's limits do not cover: its threads, files and output
_MESSAGE = 65_536  # bytes
_FILES = 4  # text, stdin, stdout, stderr
_OF_OTHERS = ("site-packages", "dist-packages")
_OF_THE_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_DEVICES = ("/dev/urandom", "/dev/random", "/dev/zero")
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ALL_CPU = 0.9  # of its seconds: a program that used these and was killed was at its limit


def main(descriptor: int, place: str) -> None:
    """Serve until the caller is gone.

    Args:
        descriptor: A socket that keeps messages apart; the first one said here is what the machine lacks, if anything.
        place: Where the directory of the programs is made.
    """
    for number in _IGNORED:  # as the workers of rewards do: whoever asks the trainer to end lets it finish its step
        signal.signal(number, signal.SIG_IGN)
    # The caller may have so many files open that this one's number is beyond those that a program closes.
    channel = socket.socket(fileno=os.dup(descriptor))
    os.close(descriptor)
    directory = ""
    try:
        directory = tempfile.mkdtemp(prefix="sandbox-", dir=place)
        try:
            rules = _rules(directory)
        except (kernel.Missing, OSError) as error:
            channel.send(json.dumps({"missing": str(error)}).encode())
            return
        channel.send(json.dumps({"missing": None}).encode())
        gc.collect()
        gc.freeze()  # what is not looked at stays shared with the programs
        _serve(channel, directory, rules)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _rules(directory: str) -> int:
    seccomp.architecture()
    try:
        _threads(os.getpid())
    except OSError as error:
        raise kernel.Missing("/proc, where it counts a program's threads") from error
    readable = [*_library(), *_OF_THE_SYSTEM, *_DEVICES]
    return landlock.rules(readable, directory, listable=_places(), sinks=["/dev/null"])


def _places() -> list[str]:
    """Where Python finds its own library: without an option of its own it would look for others' packages too."""
    return [directory for directory in sys.path if Path(directory).is_dir()]


def _library() -> Iterator[str]:
    """Python's own library without what others installed beside it, and the shared libraries of its prefix."""
    for directory in _places():
        yield from (str(path) for path in Path(directory).iterdir() if path.name not in _OF_OTHERS)
    yield from (path for path in sys.path if path.endswith(".zip"))
    yield from (str(path) for path in Path(sys.base_prefix, "lib").glob("*.so*"))


def _serve(channel: socket.socket, directory: str, rules: int) -> None:
    while True:
        message, files, _, _ = socket.recv_fds(channel, _MESSAGE, _FILES)
        if not message:
            return
        reply = _ran(channel, json.loads(message), files, directory, rules)
        if reply is None:
            return
        channel.send(json.dumps(reply).encode())


def _ran(
    channel: socket.socket, limits: Mapping[str, Any], files: list[int], directory: str, rules: int
) -> dict[str, Any] | None:
    """Run one program; returns how it ended, or None if the caller is gone."""
    said, saying = os.pipe()
    parent, own = os.getpid(), os.fork()
    if own == 0:
        program.become(program.Given(files, saying, rules, directory, limits), parent)
    os.close(saying)
    try:
        reason = _watched(channel, own, limits, directory, files[2:])
    finally:
        with suppress(ProcessLookupError):
            os.kill(own, signal.SIGKILL)
        _, status, usage = os.wait4(own, 0)
        _empty(directory)
    words = os.read(said, 1024)
    if reason is None and _is_too_long(files[2:], limits):
        reason = "output"
    for opened in (*files, said):
        os.close(opened)
    if reason == "gone":
        return None
    if words != program.READY:
        return {"failed": words.decode(errors="replace") or "it ended before its rights were given up"}
    code = os.waitstatus_to_exitcode(status)
    used = usage.ru_utime + usage.ru_stime
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and used > _ALL_CPU * limits["cpu_seconds"]):
        reason = reason or "time"
    return {"ended": reason or ("crash" if code < 0 else "exit"), "code": code, "failed": None}


def _watched(
    channel: socket.socket, own: int, limits: Mapping[str, Any], directory: str, printed: Sequence[int]
) -> str | None:
    """Wait until the program ends, or for a reason to end it, which is returned."""
    process = os.pidfd_open(own)
    try:
        waiting = select.poll()
        waiting.register(channel, select.POLLIN)
        waiting.register(process, select.POLLIN)
        end = time.monotonic() + limits["seconds"]
        while True:
            left = end - time.monotonic()
            ready = {descriptor for descriptor, _ in waiting.poll(1000 * max(0.0, min(_TICK, left)))}
            if process in ready:
                return None
            if ready:
                return "gone"
            if left <= 0:
                return "time"
            if _threads(own) > limits["threads"]:
                return "threads"
            if _is_too_much(directory, limits):
                return "files"
            if _is_too_long(printed, limits):
                return "output"
    finally:
        os.close(process)


def _threads(process: int) -> int:
    """How many threads a process has; 0 if it has just ended."""
    try:
        with open(f"/proc/{process}/stat", "rb") as opened:
            return int(opened.read().rpartition(b")")[2].split()[17])
    except ProcessLookupError:
        return 0


def _is_too_much(directory: str, limits: Mapping[str, Any]) -> bool:
    """Whether a program has more files, or more in them, than it may have."""
    found = taken = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            found += 1
            with suppress(FileNotFoundError):
                taken += 512 * entry.stat(follow_symlinks=False).st_blocks
            if found > limits["files"]:
                return True
    # A file system may give a file more than its bytes.
    return bool(taken > limits["file_bytes"] + found * 2**16)


def _is_too_long(printed: Sequence[int], limits: Mapping[str, Any]) -> bool:
    """Whether a program has printed more than it may."""
    return any(os.fstat(file).st_size > limits["output_bytes"] for file in printed)


def _empty(directory: str) -> None:
    """Remove all files of a program, which can make no directories."""
    with os.scandir(directory) as entries:
        for name in collections.deque(entry.path for entry in entries):
            os.unlink(name)
