"""Functions as rewards in workers might be, at their worst; importable, since they are pickled by name."""

import ctypes
import os
import re
import sys
import time
from pathlib import Path


def double(value):
    return 2 * value


def naps(value):
    time.sleep(value)
    return value


def hangs_in_c(value):
    """A catastrophic regular expression, which never gives the interpreter back."""
    return bool(re.match(r"(a+)+$", "a" * 40 + "b"))


def never_lets_python_run(value):
    """A loop in C without a look at signals, so that only the kernel ends it."""
    return max(range(10**13))


def misbehaves(how):
    if how == "exit":
        sys.exit(3)
    if how == "os_exit":
        os._exit(4)
    if how == "crash":
        ctypes.string_at(0)
    if how == "memory":
        return len(bytearray(6 * 2**30))
    if how == "lambda":
        return lambda: 0
    if how == "print":
        print("text " * 10)
    return how


def odd_sleeps(completions, answer):
    """A reward: hangs on the text "hang"."""
    if "hang" in completions:
        time.sleep(100)
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def odd_raises(completions):
    return [1 / len(text) for text in completions]


def leaves_a_mark(completions, *, directory):
    """A reward: 1, and a file named like the completion."""
    for text in completions:
        Path(directory, text).write_text("")
    return [1.0] * len(completions)


def marks_and_naps(completions, *, path, seconds):
    """A reward: a file says that it has begun; then it sleeps."""
    Path(path).write_text(str(os.getpid()))
    Path(f"{path}.{os.environ.get('LOCAL_RANK', 0)}").touch()
    time.sleep(seconds)
    return [0.5] * len(completions)


def marks_and_naps_on(completions, *, path, seconds):
    """The same in C code, as it seems, which ends when it ends."""
    Path(path).write_text(str(os.getpid()))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            time.sleep(until - time.monotonic())
        except BaseException:
            continue
    return [0.5] * len(completions)


def naps_on_in_process_1(completions, *, path, seconds):
    """The same in the second process; the first one waits for it."""
    if os.environ.get("LOCAL_RANK") == "1":
        return marks_and_naps_on(completions, path=path, seconds=seconds)
    return [0.5] * len(completions)
