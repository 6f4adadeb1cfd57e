"""MLflow, which goes on with a run where the run's directory says so."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from lightning.pytorch import loggers
from lightning.pytorch.utilities import rank_zero_only

from grpo_lightning.logger.known import STORE, keep, known
from grpo_lightning.output.terminal import printable


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
        self._given_place: str | None = options.get("artifact_location")
        self._continues = known(self._file) is not None
        super().__init__(run_id=known(self._file), **options)

    @property
    def experiment(self) -> Any:
        """The client of the mlflow library."""
        is_new = not self._initialized
        with _without_git():
            client = super().experiment
        if self._initialized:
            self._check_place(client)
        if is_new and self._initialized:
            keep(self._file, str(self._run_id))
            client.update_run(self._run_id, status="RUNNING")
        return client

    def _check_place(self, client: Any) -> None:
        """Refuse a database of this directory that has files of the run written or sent elsewhere.

        It says itself where, anew at every time, and may have come with other files; some places are opened by code
        that lies beside it.
        """
        if self._tracking_uri != STORE:
            return  # the user has named it
        place, own = str(client.get_run(self._run_id).info.artifact_uri), Path.cwd() / "mlruns"
        address = urlsplit(place)
        path = Path(unquote(address.path) if address.scheme == "file" else place)
        is_local = address.scheme in ("", "file") and address.netloc == "" and path.resolve() != own.resolve()
        is_given = self._given_place is not None and place.startswith(self._given_place)
        if not is_given and not (is_local and path.resolve().is_relative_to(own.parent.resolve() / own.name)):
            raise ValueError(
                printable(
                    f"logger.mlflow.tracking_uri={STORE}: this database has files of the run written to {place}; "
                    f"allowed is {own}, so move mlflow.db away, or choose another logger.mlflow.experiment_name"
                )
            )

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
