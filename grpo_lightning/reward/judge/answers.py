"""What a judge has answered, in a file: what was asked once is not asked again.

A continued run so scores what it repeats as it did before, and jobs of a sweep that share a file ask for less. Any
number of processes may use one file: each line is written at once, and of several answers to one request the first in
the file is the one that counts, for all of them.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_lightning.reward.engine.weighted import RewardError


class Answers:
    """A file of answers, one JSON object per line; unfinished and damaged lines count as absent.

    Args:
        path: It is made at the first answer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        self._read = 0  # bytes, up to the end of a line

    def get(self, request: str) -> str | None:
        """The answer to a request, given by its hash; None if there is none."""
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
            with self._path.open("ab", buffering=0) as file:
                file.write(line)
        except OSError as error:
            message = f"{self._path}, the judge's answers, cannot be written: {error.strerror or error}"
            raise RewardError(message) from error
        self._refresh()
        return self._known.setdefault(request, answer)

    def _refresh(self) -> None:
        """Read what was added since the last time."""
        if not self._path.exists():
            return
        with self._path.open("rb") as lines:
            lines.seek(self._read)
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # not written to its end
                self._read += len(line)
                with suppress(ValueError, KeyError, TypeError):
                    found = json.loads(line)
                    self._known.setdefault(found["request"], found["answer"])
