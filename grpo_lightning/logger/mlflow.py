"""MLflow, which goes on with a run where the run's directory says so."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers
from lightning.pytorch.utilities import rank_zero_only

from grpo_lightning.logger.guarded import Guarded, keep_id, known_id


class MLFlowLogger(Guarded, loggers.MLFlowLogger):
    """Logs to an MLflow server or database.

    A run has the same identifier there after a restart. Steps that are made again appear there twice, with the same
    values but for times; settings stay those of its first start.

    Args:
        directory: The run's, where the identifier is.
        options: The arguments of Lightning's logger of this name.
    """

    def __init__(self, directory: str, **options: Any) -> None:
        self._file = Path(directory) / ".mlflow_id"
        self._continues = known_id(self._file) is not None
        super().__init__(**{"run_id": known_id(self._file), **options})

    def begin(self) -> Any:
        is_new, client = not self._initialized, super().begin()
        if is_new and self._initialized:
            keep_id(self._file, str(self._run_id))
            client.update_run(self._run_id, status="RUNNING")
        return client

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars; ``val/pass@1`` is ``val/pass_at_1`` there, where no name has that sign."""
        super().log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Write the settings, once: MLflow refuses others later."""
        if not self._continues:
            super().log_hyperparams(params)
