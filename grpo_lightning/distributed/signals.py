"""SIGTERM: a run is asked to end, and does so between two generated tokens."""

import signal
from typing import Any

from lightning import Trainer


class SigtermListener:
    """Knows whether the process was asked to end.

    Args:
        trainer: Whose own handler does for one process; with several its handler would start a broadcast wherever this
            process happens to be, and is replaced.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._was_asked = False

    @property
    def was_heard(self) -> bool:
        """Whether SIGTERM has come."""
        return self._was_asked or self._trainer.received_sigterm

    def listen(self) -> None:
        """Take SIGTERM over from the trainer, which registers its handler anew for each of its stages."""
        if self._trainer.world_size > 1:
            signal.signal(signal.SIGTERM, self._ask_to_end)

    def _ask_to_end(self, number: int, frame: Any) -> None:
        launcher: Any = self._trainer.strategy.launcher
        if launcher is not None and not self._was_asked:
            launcher.kill(number)  # the processes that this one started
        self._was_asked = True
