"""Runs untrusted Python programs, such as those that a model wrote, in the sandbox."""

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_PACKAGE = str(Path(__file__).parents[2])
_START = "import sys; sys.path.append(sys.argv[2]); from grpo_lightning.sandbox.server import main; "
_START += "sys.path.pop(); main(int(sys.argv[1]), sys.argv[3])"
"""The programs see Python's own library, and nothing of what is installed beside this package."""
_START_SECONDS = 60.0
_SPARE_SECONDS = 30.0  # how late the server may end a program before it is ended itself
_MESSAGE = 65_536  # bytes

_lock = threading.RLock()
_server: "_Server | None" = None


class SandboxUnavailable(RuntimeError):
    """This machine has no sandbox, or one that does not hold; nothing was run."""


@dataclass(frozen=True)
class Limits:
    """What one program may take before it is ended."""

    seconds: float
    """Wall-clock time. More than ``cpu_seconds``, since other processes take their share of a busy machine."""
    cpu_seconds: int
    """CPU time of all threads together."""
    memory_mb: int
    """Address space in units of 2**20 bytes; Python itself takes about 40. A program gets a ``MemoryError`` there."""
    output_bytes: int = 2**20
    """Printed, of each of stdout and stderr."""
    file_bytes: int = 16 * 2**20
    """In all files that the program writes into its directory; one that grows beyond is an ``OSError``."""
    files: int = 64
    """In its directory at once."""
    threads: int = 32
    """At once, the first included."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0 or (name != "seconds" and not isinstance(value, int)):
                raise ValueError(f"{name}={value}: must be a {'' if name == 'seconds' else 'whole '}number above 0")


@dataclass(frozen=True)
class Outcome:
    """What a program did: ``Outcome(stdout="7", stderr="", ended="exit", code=0)`` for one that prints 7."""

    stdout: str
    """What it printed, at most ``output_bytes``; bytes that are no UTF-8 become U+FFFD."""
    stderr: str
    """The same of stderr, with the traceback of an exception."""
    ended: str
    """``exit`` by itself or with an exception, ``crash`` by a signal, or at a limit: ``time``, ``output``, ``threads``
    or ``files``. A program at its limit of memory has a ``MemoryError``, which is an exception like others."""
    code: int
    """Its exit status, 1 for an exception; of a signal its number, negative."""

    @property
    def is_well(self) -> bool:
        """Whether it came to its own end without an error."""
        return self.ended == "exit" and self.code == 0


def run(text: str, stdin: str, limits: Limits) -> Outcome:
    """Run an untrusted Python program, one at a time in a process; no program makes this raise.

    Raises:
        Unavailable: The machine has no sandbox, or one that does not hold. Nothing was run.
    """
    global _server
    with _lock:
        try:
            _server = _server or _Server()
            return _server.run(_to_utf8(text), _to_utf8(stdin), limits)
        except (ConnectionError, EOFError, TimeoutError) as error:
            close()  # the next program gets another
            raise SandboxUnavailable(f"the sandbox's server died: {type(error).__name__}: {error}") from error
        except BaseException:  # such as Ctrl-C: the server is still busy
            close()
            raise


def check() -> None:
    """Try to get out of this machine's sandbox; raises `SandboxUnavailable` if there is none or it does not hold."""
    run("", "", _ATTEMPT_LIMITS)


def close() -> None:
    """End the server, if there is one, with what it runs."""
    global _server
    with _lock:
        if _server is not None:
            _server.end()
        _server = None


_ATTEMPT_LIMITS = Limits(seconds=30.0, cpu_seconds=5, memory_mb=256)
_ATTEMPTS = """
import os, socket
for what, function, *arguments in (
    ("read a file", open, OUTSIDE),
    ("write a file", open, OUTSIDE, "a"),
    ("list a directory", os.listdir, os.path.dirname(OUTSIDE)),
    ("fork", os.fork),
    ("start a program", os.execv, "/bin/true", ["true"]),
    ("open a socket", socket.socket),
    ("signal its parent", os.kill, os.getppid(), 0),
):
    try:
        function(*arguments)
        print(what)
    except OSError:
        pass
print("end")
"""


class _Server:
    """The process of `grpo_lightning.sandbox.server`; a program in it has failed to get out."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise SandboxUnavailable(f"the sandbox cannot start: it needs Linux (this is {sys.platform})")
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = ["-S", "-s", "-P", "-B", "-X", "utf8"]
        arguments = [str(theirs.fileno()), _PACKAGE, tempfile.gettempdir()]
        libraries = {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]} if "LD_LIBRARY_PATH" in os.environ else {}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *options, "-c", _START, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=libraries | {"PYTHONHASHSEED": "0"},
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is for the trainer
            )
        try:
            self._check()
        except BaseException:
            self.end()
            raise

    def _check(self) -> None:
        """Have a program attempt what it must not be able to do, before any other is run."""
        missing = self._reply(time.monotonic() + _START_SECONDS)["missing"]
        if missing is not None:
            raise SandboxUnavailable(f"the sandbox cannot start: it needs {missing}")
        with tempfile.NamedTemporaryFile() as outside:
            text = _ATTEMPTS.replace("OUTSIDE", repr(outside.name))
            outcome = self.run(_to_utf8(text), b"", _ATTEMPT_LIMITS)
        if outcome.stdout != "end\n" or not outcome.is_well:
            found = ", ".join((outcome.stdout or outcome.stderr).split("\n"))[-300:] or f"status {outcome.code}"
            raise SandboxUnavailable(f"the sandbox does not hold on this machine; a program in it did: {found}")

    def run(self, text: bytes, stdin: bytes, limits: Limits) -> Outcome:
        """Run one program; a ConnectionError, EOFError or TimeoutError says that the server died."""
        with ExitStack() as stack:
            files = [stack.enter_context(_memory_file(content)) for content in (text, stdin, b"", b"")]
            socket.send_fds(self.channel, [json.dumps(vars(limits)).encode()], [file.fileno() for file in files])
            reply = self._reply(time.monotonic() + limits.seconds + _SPARE_SECONDS)
            output = [os.pread(file.fileno(), limits.output_bytes, 0) for file in files[2:]]
        if reply["failed"] is not None:
            raise SandboxUnavailable(f"the sandbox cannot start: {reply['failed']}")
        stdout, stderr = (part.decode(errors="replace") for part in output)
        return Outcome(stdout, stderr, reply["ended"], reply["code"])

    def end(self) -> None:
        """End the server, which ends its program and removes its directory."""
        self.channel.close()
        try:
            self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _reply(self, deadline: float) -> Mapping[str, Any]:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError("it does not answer")
        message = self.channel.recv(_MESSAGE)
        if not message:
            raise EOFError("it ended")
        reply: Mapping[str, Any] = json.loads(message)
        return reply


def _to_utf8(text: str) -> bytes:
    """``text`` in UTF-8; half a surrogate pair, which a model can write, becomes bytes that are none."""
    return text.encode("utf-8", "surrogatepass")


def _memory_file(content: bytes) -> BinaryIO:
    """A file in memory, at its beginning."""
    file = os.fdopen(os.memfd_create("program"), "w+b")
    file.write(content)
    file.seek(0)
    return file


def _forget() -> None:
    global _server, _lock
    _lock = threading.RLock()
    if _server is not None:  # the parent's, which would not end before this process has closed it
        _server.channel.close()
        _server.process.returncode = 0  # nothing to wait for here
    _server = None


atexit.register(close)
os.register_at_fork(after_in_child=_forget)
