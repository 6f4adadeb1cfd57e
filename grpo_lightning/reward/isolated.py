"""A function in a process of its own, which is ended when a call takes too long."""

import atexit
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

_STARTING_SECONDS = 120.0  # importing reasoning_gym takes seconds, on a busy machine many
_COMMAND = "from grpo_lightning.reward.isolated import serve; serve()"


class Isolated:
    """What ``build(*arguments)`` returns, called by keywords in another process, which starts at the first call.

    A fresh interpreter, since a fork would inherit the trainer's threads and its GPU, and `multiprocessing` would run
    the user's script again to spawn. Everything that crosses over is pickled: ``build`` is a function of a module.

    Raises:
        TimeoutError: From a call, if it took longer than ``seconds``. The next call starts afresh.
        RuntimeError: From a call, if the function raised or its process died.
    """

    def __init__(self, build: Callable[..., Callable[..., Any]], *arguments: Any, seconds: float) -> None:
        self._build, self._arguments, self._seconds = build, arguments, seconds
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        atexit.register(self.close)

    def __call__(self, **arguments: Any) -> Any:
        if self._running is None:
            self._running = self._start()
            self._ask((self._build, self._arguments), _STARTING_SECONDS)
        return self._ask(arguments, self._seconds)

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._running is not None:
            process, connection = self._running
            self._running = None
            connection.close()
            process.kill()
            process.wait()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        theirs.close()
        return process, ours

    def _ask(self, message: Any, seconds: float) -> Any:
        if self._running is None:
            raise RuntimeError("the process does not run")
        connection = self._running[1]
        try:
            connection.send(message)
            if not connection.poll(seconds):
                self.close()
                raise TimeoutError(f"took longer than {seconds:g} s")
            error, value = connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as lost:
            self.close()
            raise RuntimeError("its process died") from lost
        if error is not None:
            raise RuntimeError(error)
        return value


def serve() -> None:
    """The other process: builds the function it is sent first, then answers calls until the trainer is gone."""
    connection: Connection = Connection(int(sys.argv[1]))
    build, arguments = connection.recv()
    function = build(*arguments)
    connection.send((None, None))
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        message: tuple[str | None, Any] = None, None
        try:
            message = None, function(**call)
        except Exception as error:
            message = f"{type(error).__name__}: {error}", None
        connection.send(message)
