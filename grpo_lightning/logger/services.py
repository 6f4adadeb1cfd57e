"""Weights & Biases and MLflow, where a continued run is the same run."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers
from lightning.pytorch.utilities import rank_zero_only

from grpo_lightning.logger.base import SafeLogger, load_run_id, save_run_id


class WandbLogger(SafeLogger, loggers.WandbLogger):
    """Logs to W&B, or with ``offline`` to files that ``wandb sync`` uploads.

    A run keeps its identifier when it continues; steps that are made again appear there twice. It ends with the
    training, so that another run in this process is another one there.

    Args:
        save_dir: The run directory, where W&B's files and the identifier are.
        options: The other arguments of Lightning's logger of this name.
    """

    def __init__(self, save_dir: str, **options: Any) -> None:
        self._file = Path(save_dir) / ".wandb_id"
        super().__init__(save_dir=save_dir, **{"id": load_run_id(self._file) or secrets.token_hex(4), **options})
        self._wandb_init.pop("anonymous", None)  # W&B warns about it, whatever its value

    def open(self) -> Any:
        is_new, run = self._experiment is None, super().open()
        if is_new and self._experiment is not None:  # in the first process
            save_run_id(self._file, str(self._id))
        return run

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(status != "success"))
            self._experiment = None


class MLFlowLogger(SafeLogger, loggers.MLFlowLogger):
    """Logs to an MLflow server or database.

    A run keeps its identifier when it continues; steps that are made again appear there twice. Settings stay those of
    its first start.

    Args:
        directory: The run directory, where the identifier is.
        options: The arguments of Lightning's logger of this name.
    """

    def __init__(self, directory: str, **options: Any) -> None:
        self._file = Path(directory) / ".mlflow_id"
        self._continues = load_run_id(self._file) is not None
        super().__init__(**{"run_id": load_run_id(self._file), **options})

    def open(self) -> Any:
        is_new, client = not self._initialized, super().open()
        if is_new and self._initialized:
            save_run_id(self._file, str(self._run_id))
            client.update_run(self._run_id, status="RUNNING")
        return client

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars; ``val/pass@1`` is ``val/pass_at_1`` there, where names have no "@"."""
        super().log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Write the settings, once: MLflow refuses other values later."""
        if not self._continues:
            super().log_hyperparams(params)
