"""Weights & Biases, which goes on with a run where the run's directory says so."""

import secrets
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers
from lightning.pytorch.utilities import rank_zero_only

from grpo_lightning.logger.guarded import Guarded, keep_id, known_id


class WandbLogger(Guarded, loggers.WandbLogger):
    """Logs to W&B, or with ``offline`` to files that ``wandb sync`` uploads.

    A run has the same identifier there after a restart. Steps that are made again appear there twice, with the same
    values but for times. It ends with the training, so that a next run in this process is another one.

    Args:
        save_dir: The run's directory, where W&B's files and the identifier are.
        options: The other arguments of Lightning's logger of this name.
    """

    def __init__(self, save_dir: str, **options: Any) -> None:
        self._file = Path(save_dir) / ".wandb_id"
        super().__init__(save_dir=save_dir, **{"id": known_id(self._file) or secrets.token_hex(4), **options})
        self._wandb_init.pop("anonymous", None)  # which W&B warns about, whatever it is

    def begin(self) -> Any:
        is_new, run = self._experiment is None, super().begin()
        if is_new and self._experiment is not None:  # in the first process
            keep_id(self._file, str(self._id))
        return run

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(status != "success"))
            self._experiment = None
