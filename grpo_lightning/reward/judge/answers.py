"""What a judge has answered, in a file: what was asked once is not asked again.

A continued run so scores what it repeats as it did before, and jobs of a sweep that share a file ask for less. Any
number of processes may use one file: each line is written at once, and of several answers to one request the first in
the file is the one that counts, for all of them.
"""

import json
import os
from pathlib import Path
from typing import Any

from grpo_lightning.reward.engine.weighted import RewardError

_BEGINNING = b'{"request": "'


class Answers:
    """A file of answers, one JSON object per line; unfinished and damaged lines count as absent.

    Args:
        path: It is made at the first answer. A file that begins otherwise is refused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        self._read = 0  # bytes, up to the end of a line

    def get(self, request: str) -> str | None:
        """The answer to a request, given by its hash; None if there is none.

        Raises:
            RewardError: The file cannot be read, or is another one.
        """
        if request not in self._known:
            self._refresh()
        return self._known.get(request)

    def put(self, request: str, answer: str, **more: Any) -> str:
        """Write an answer down.

        Args:
            request: The hash of what was asked.
            answer: The text.
            more: What else a reader may want to know.

        Returns:
            The answer that counts: another process may have been first.

        Raises:
            RewardError: The file cannot be written.
        """
        line = json.dumps({"request": request, **more, "answer": answer}).encode() + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                size = os.fstat(file).st_size
                torn = b"\n" if size and os.pread(file, 1, size - 1) != b"\n" else b""  # of a process that was killed
                if os.write(file, torn + line) != len(torn + line):
                    raise OSError("the disk is full")
            finally:
                os.close(file)
        except OSError as error:
            raise self._problem("cannot be written", error) from error
        self._refresh()
        return self._known.setdefault(request, answer)

    def _refresh(self) -> None:
        """Read what was added since the last time."""
        try:
            file = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._problem("cannot be read", error) from error
        with open(file, "rb") as lines:
            if os.fstat(file).st_size < self._read:
                self._read = 0  # it was shortened or replaced
            if self._read == 0 and not _BEGINNING.startswith(lines.read(len(_BEGINNING))):
                raise RewardError(f"{self._path} is no file of a judge's answers, and is not written to")
            lines.seek(self._read)
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # not written to its end
                self._read += len(line)
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            found = json.loads(line)
            request, answer = found["request"], found["answer"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        if isinstance(request, str) and isinstance(answer, str):
            self._known.setdefault(request, answer)

    def _problem(self, what: str, error: OSError) -> RewardError:
        return RewardError(f"{self._path}, the judge's answers, {what}: {error.strerror or error}")
