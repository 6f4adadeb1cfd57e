"""The further processes that Lightning starts in the first one: asking them to end, waiting for them, ending them."""

import signal
import time
from subprocess import Popen, TimeoutExpired
from typing import Any


class Launched:
    """The processes of a launcher of Lightning's, which has them in ``procs``."""

    def __init__(self) -> None:
        self._launcher: Any = None
        self._taken: list[Popen[Any]] = []

    def attach(self, launcher: Any) -> None:
        """Take note of what starts processes; None, or one without ``procs``, starts none."""
        self._launcher = launcher

    def ask_to_end(self) -> None:
        """Send them SIGTERM: not SIGINT, which the terminal has sent them, too, and of which two end at once."""
        for process in getattr(self._launcher, "procs", None) or ():
            process.send_signal(signal.SIGTERM)

    def take_over(self) -> None:
        """Let Lightning forget them: a thread of its ends this process when one of them does not end well."""
        processes = getattr(self._launcher, "procs", None) or []
        self._taken += processes
        processes.clear()

    def end(self, seconds: float) -> None:
        """Let them end by themselves within ``seconds``, and end those that do not."""
        self.take_over()
        until = time.monotonic() + seconds
        for process in self._taken:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        """End them, and wait for nothing."""
        self.take_over()
        for process in self._taken:
            process.kill()
