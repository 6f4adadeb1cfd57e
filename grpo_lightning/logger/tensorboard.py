"""TensorBoard, which begins a new file where the old one cannot be written any more."""

from contextlib import suppress

from lightning.pytorch import loggers

from grpo_lightning.logger.guarded import Guarded


class TensorBoardLogger(Guarded, loggers.TensorBoardLogger):
    """Lightning's logger of this name, whose failures end no run; the arguments are its."""

    def reset(self) -> None:
        writer, self._experiment = self._experiment, None  # its thread is dead
        if writer is not None:
            with suppress(Exception):
                writer.close()
