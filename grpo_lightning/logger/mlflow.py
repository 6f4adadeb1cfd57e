"""MLflow, which goes on with a run where the run's directory says so."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers
from lightning.pytorch.utilities import rank_zero_only

from grpo_lightning.logger.known import keep, known


class MLFlowLogger(loggers.MLFlowLogger):
    """Logs to an MLflow server or database.

    A run has the same identifier there after a restart. Steps that are made again appear there twice, with the same
    values but for times; settings stay those of its first start.

    Args:
        directory: The run's, where the identifier is.
        options: The arguments of Lightning's logger of this name.
    """

    def __init__(self, directory: str, **options: Any) -> None:
        self._file = Path(directory) / ".mlflow_id"
        self._continues = known(self._file) is not None
        super().__init__(run_id=known(self._file), **options)

    @property
    def experiment(self) -> Any:
        """The client of the mlflow library."""
        is_new = not self._initialized
        with _without_git():
            client = super().experiment
        if is_new and self._initialized:
            keep(self._file, str(self._run_id))
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


@contextmanager
def _without_git() -> Iterator[None]:
    """Inside, MLflow does not ask git of which commit the program is.

    It would ask in the program's directory and in those above, where a stranger's ``.git/config`` may name commands.
    """
    from mlflow.tracking.context.git_context import GitRunContext

    asks: Any = GitRunContext
    before = asks.in_context
    asks.in_context = lambda _: False
    try:
        yield
    finally:
        asks.in_context = before
