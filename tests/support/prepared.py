"""Commands of Python in processes that have the libraries already, each seconds shorter than one that imports them.

A fork server of its own, beside that of reward workers, imports torch and the like, and nothing of this package, and is
forked for every command.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)  # a process that is forked imports this module, too
FORKED = multiprocessing.get_context("forkserver")
SERVER = forkserver.ForkServer()
SERVER.set_forkserver_preload(
    [
        *("lightning.pytorch", "torch.utils.tensorboard", "torch.distributed.checkpoint.state_dict", "datasets"),
        *("transformers.models.llama.modeling_llama", "peft", "reasoning_gym", "hydra", "pebble"),
    ]
)


def run(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """What ``python`` does with the arguments, a file or ``-m`` and a module first, as subprocess.run tells it."""
    process = Process(arguments, cwd=cwd, env=env)
    out, errors = process.communicate(timeout)
    return subprocess.CompletedProcess(["python", *arguments], process.wait(), out, errors)


class Process:
    """A command that runs, as subprocess.Popen has it; ``together`` writes errors into its output, too."""

    def __init__(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None, together: bool = False
    ) -> None:
        self._place = tempfile.TemporaryDirectory()
        self._files = [Path(self._place.name) / name for name in ("out", "errors")]
        self._files[1].touch()
        written = [str(self._files[0]), str(self._files[0 if together else 1])]
        given = ([*arguments], str(cwd), dict(os.environ if env is None else env), *written)
        self._process = FORKED.Process(target=_become, args=given)
        with mock.patch.object(forkserver, "connect_to_new_process", SERVER.connect_to_new_process):
            self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired("python", timeout, *(path.read_bytes() for path in self._files))
        return self.returncode

    def communicate(self, timeout: float = 300) -> tuple[str, ...]:
        """What it has written to its output and to its errors, once it has ended."""
        self.wait(timeout)
        return tuple(path.read_text(errors="replace") for path in self._files)


def _become(arguments: list[str], cwd: str, env: dict[str, str], out: str, errors: str) -> None:
    """Be the command, and end with its exit status."""
    from lightning.fabric.utilities import rank_zero

    for descriptor, path in ((0, os.devnull), (1, out), (2, errors)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = os.fdopen(0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # a command is nobody's worker
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0  # Lightning looks for it when it is imported
    is_module = arguments[0] == "-m"
    first = cwd if is_module else str(Path(arguments[0]).resolve().parent)
    own = [place for place in sys.path if place not in ("", ROOT)]
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *own]
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = arguments[1:] if is_module else [*arguments]
    status = 0
    try:
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
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)
