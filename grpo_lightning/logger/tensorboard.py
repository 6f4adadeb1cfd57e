"""TensorBoard, which begins a new file where the old one cannot be written any more."""

import os
from contextlib import suppress

from lightning.pytorch import loggers

from grpo_lightning.logger.guarded import Guarded, warn


class TensorBoardLogger(Guarded, loggers.TensorBoardLogger):
    """Lightning's logger of this name, whose failures end no run; the arguments are its."""

    def reset(self) -> None:
        writer, self._experiment = self._experiment, None  # its thread is dead
        if writer is not None:
            with suppress(Exception):
                writer.close()

    def save(self) -> None:
        if self._experiment is not None and not os.path.isdir(self.log_dir):
            warn(self, f"{self.log_dir} was removed")  # Linux writes on into a file that nobody can open
            self.reset()
        super().save()
