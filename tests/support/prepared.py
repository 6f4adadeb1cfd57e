"""Commands of Python in processes that have the libraries already, each seconds shorter than one that imports them.

A process that has imported torch and the like, and nothing of this package, is forked for every command. What a test
asks of the start of Python, such as which files are found first and what is imported at all, takes a Python of its own.
"""

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.composed import ROOT

LIBRARIES = (
    *("lightning.pytorch", "torch.utils.tensorboard", "torch.distributed.checkpoint.state_dict", "datasets", "peft"),
    *("transformers.models.llama.modeling_llama", "reasoning_gym", "hydra", "pebble"),
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)


def run(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """What ``python`` does with the arguments, a file or ``-m`` and a module first, as subprocess.run tells it."""
    process = Process(arguments, cwd=cwd, env=env)
    out, errors = process.communicate(timeout)
    return subprocess.CompletedProcess(["python", *arguments], process.wait(), out, errors)


class Process:
    """A command that runs, as subprocess.Popen has it.

    Args:
        arguments: A file, or ``-m`` and a module, and the arguments.
        cwd: The directory in which it starts.
        env: Its environment; this process's where none is given.
        together: Whether what it writes to its errors stands in its output, too, as a terminal shows them.
    """

    def __init__(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None, together: bool = False
    ) -> None:
        self.returncode: int | None = None
        self._place = tempfile.TemporaryDirectory()
        self._out, self._errors = (Path(self._place.name) / name for name in ("out", "errors"))
        self._errors.touch()
        self.pid = _server().begin(
            arguments=list(arguments),
            cwd=str(cwd),
            env=dict(os.environ if env is None else env),
            out=str(self._out),
            errors=str(self._out if together else self._errors),
        )

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = _server().ended(self.pid)
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired("python", timeout, self._out.read_bytes(), self._errors.read_bytes())
            time.sleep(0.01)
        return status

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """What it has written to its output and to its errors, once it has ended."""
        self.wait(timeout)
        return self._out.read_text(errors="replace"), self._errors.read_text(errors="replace")


class _Server:
    """The process that is forked; it ends when this one does."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        code = f"import sys; sys.path.append({str(ROOT)!r}); from tests.support import prepared; prepared.serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=environment,
            start_new_session=True,
        )
        self._asked: Any = self._process.stdin
        self._answers: Any = self._process.stdout
        self._lines: list[bytes] = []
        self._rest = b""
        self._ended: dict[int, int] = {}
        atexit.register(self._close)

    def _close(self) -> None:
        self._asked.close()
        self._process.wait()

    def begin(self, **command: Any) -> int:
        print(json.dumps(command), file=self._asked, flush=True)
        while True:
            told = self._told()
            if "pid" in told:
                return int(told["pid"])

    def ended(self, pid: int) -> int | None:
        while pid not in self._ended and (self._lines or select.select([self._answers], [], [], 0)[0]):
            self._told()
        return self._ended.pop(pid, None)

    def _told(self) -> dict[str, int]:
        while not self._lines:
            block = os.read(self._answers.fileno(), 65536)
            if not block:
                raise RuntimeError(f"the prepared process has ended with {self._process.wait()}")
            *self._lines, self._rest = (self._rest + block).split(b"\n")
        told: dict[str, int] = json.loads(self._lines.pop(0))
        if "status" in told:
            self._ended[told["of"]] = told["status"]
        return told


@cache
def _server() -> _Server:
    return _Server()


def serve() -> None:
    """Fork for every command that standard input tells of, one in a line, and tell of each that ends."""
    for name in LIBRARIES:
        __import__(name)
    own = [place for place in sys.path if place != str(ROOT)]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    awake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    rest = b""
    while True:
        ready = select.select([0, awake], [], [])[0]
        if awake in ready:
            os.read(awake, 4096)
            while (ended := _ended()) is not None:
                print(json.dumps({"of": ended[0], "status": ended[1]}), file=answers, flush=True)
        if 0 in ready:
            block = os.read(0, 65536)
            if not block:
                return
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                command = json.loads(line)
                pid = os.fork()
                if not pid:
                    os.close(awake)
                    os.close(woken)
                    answers.close()
                    _begin(own=own, **command)
                print(json.dumps({"pid": pid}), file=answers, flush=True)


def _ended() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _begin(own: list[str], arguments: list[str], cwd: str, env: dict[str, str], out: str, errors: str) -> None:
    """Become the command, and end with its exit status."""
    from lightning.fabric.utilities import rank_zero

    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for descriptor, path in ((0, os.devnull), (1, out), (2, errors)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0  # Lightning looks for it when it is imported
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "grpo_lightning")]:
        del sys.modules[name]
    sys.orig_argv = [sys.executable, *arguments]
    is_module = arguments[0] == "-m"
    first = cwd if is_module else str(Path(arguments[0]).resolve().parent)
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *own]
    status = 0
    try:
        sys.argv = arguments[1:] if is_module else [*arguments]
        if is_module:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)
