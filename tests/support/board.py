"""TensorBoard's own answers about a directory of runs, as its pages get them, without a server."""

from pathlib import Path
from typing import Any

from tensorboard import default, program
from tensorboard.backend import application
from tensorboard.backend.event_processing import data_ingester
from werkzeug.test import Client


class Board:
    """TensorBoard's application over a directory."""

    def __init__(self, directory: Path) -> None:
        board = program.TensorBoard(plugins=default.get_plugins())
        board.configure(logdir=str(directory), load_fast="false", samples_per_plugin={"scalars": 1000, "text": 100})
        ingester = data_ingester.LocalDataIngester(board.flags)
        runs = ingester.deprecated_multiplexer
        runs.AddRunsFromDirectory(str(directory))
        runs.Reload()
        self._client = Client(
            application.TensorBoardWSGIApp(board.flags, board.plugin_loaders, ingester.data_provider, None, runs)
        )

    def get(self, path: str, **query: str) -> Any:
        return self._client.get(f"/data/{path}", query_string=query).json

    def plugin(self, path: str, **query: str) -> Any:
        return self.get(f"plugin/{path}", **query)

    def post(self, path: str, **body: Any) -> Any:
        return self._client.post(f"/data/plugin/{path}", json={"experimentName": "", **body}).json

    def steps(self, run: str, tag: str) -> list[int]:
        """The steps of a scalar."""
        return [step for _, step, _ in self.plugin("scalars/scalars", run=run, tag=tag)]

    def hparams(self) -> tuple[list[str], dict[str, dict[str, Any]]]:
        """The columns of the HParams tab, settings before metrics, and run -> column -> value."""
        found = self.post("hparams/experiment", hparamsLimit=0)
        columns = [info["name"] for info in found["hparamInfos"]]
        metrics = [info["name"]["tag"] for info in found["metricInfos"]]
        asked = [{"hparam": name} for name in columns] + [{"metric": {"tag": tag}} for tag in metrics]
        states = [f"STATUS_{state}" for state in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")]
        groups = self.post(
            "hparams/session_groups", allowedStatuses=states, colParams=asked, startIndex=0, sliceSize=100
        )["sessionGroups"]
        rows = {}
        for group in groups:
            [session] = group["sessions"]
            values = {value["name"]["tag"]: value["value"] for value in session["metricValues"]}
            rows[session["name"]] = {**group["hparams"], **values}
        return [*columns, *metrics], rows
