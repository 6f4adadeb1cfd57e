"""Parts of a benchmark in processes of their own. One that ends before its time says why."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Worker:
    """A module in a process of its own, which makes one step for every line on its standard input.

    Args:
        module: With a ``main`` that answers every line "go" with a line of JSON, and ends at an empty line.
        arguments: Of its command line.
        checkout: Directory of the project whose module it is.
        environment: Further variables.
    """

    def __init__(self, module: str, *arguments: str, checkout: Path = ROOT, **environment: str) -> None:
        self._module = module
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (a pipe that nobody reads would fill and stop the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=checkout,
            env=os.environ | environment,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        try:
            if kind is None and self._process.poll() is None:
                self._process.communicate("\n", timeout=60)
        finally:
            self._process.kill()  # does nothing to a process that has ended
            self._process.wait()
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.stdout.close()
            self._errors.close()

    def step(self) -> dict[str, float]:
        """What the next step took."""
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._error() from None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise self._error()

    def result(self, timeout: float | None = None) -> Any:
        """The JSON in the last line that the process prints until it ends by itself.

        Raises:
            RuntimeError: It ended otherwise, or not in time.
        """
        try:
            text, _ = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self._module}: not done after {timeout:.0f} s") from None
        if self._process.returncode or not text.strip():
            raise self._error()
        return json.loads(text.splitlines()[-1])

    def _error(self) -> RuntimeError:
        code = self._process.wait()
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4000))
        text = self._errors.read().decode(errors="replace").strip()[-2000:]
        return RuntimeError(f"{self._module} ended with {code}: {text or 'nothing on standard error'}")


def result(module: str, *arguments: str, timeout: float | None = None, **environment: str) -> Any:
    """The JSON in the last line that a module prints in a process of its own."""
    with Worker(module, *arguments, **environment) as worker:
        return worker.result(timeout)
