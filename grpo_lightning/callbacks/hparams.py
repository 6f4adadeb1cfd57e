"""The HParams tab of TensorBoard: what a run was told to be beside how it goes, and its settings for other loggers."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from torch.utils.tensorboard.writer import FileWriter

from grpo_lightning.callbacks.loggers import attempt
from grpo_lightning.checkpoint.tensorboard import SUFFIX
from grpo_lightning.distributed.signals import Preempted

Value = bool | float | str

TAG = "~hparams"
"""What the tags of the tab's own scalars begin with; TensorBoard sorts it behind all others."""
_END = f".end{SUFFIX}"
"""Ends the name of the file that says how a run ended, which a continued run removes."""
_NO_RESULT = (
    "callbacks",
    "logger",
    "run_dir",
    "checkpoint",
    "mode",
    "trusted",
    "trusted_settings",
    "requeue",
    "sweep",
    "hydra",
)
_ENDED = {"finished": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE, "interrupted": api_pb2.STATUS_UNKNOWN}


class HParams(Callback):
    """Writes the columns of a run at its start, its results after every validation, and at its end how it ended.

    While it has not ended, the tab calls it running; one that was interrupted, which may go on, has an unknown status.
    A continued run keeps the columns of its first start.

    Args:
        outcome: The scalar whose first, best (largest) and last value are shown.
        metrics: Scalars whose last value is shown besides.
        parts: Groups of conf/ whose choice is shown, behind the settings that were overridden.
    """

    def __init__(self, *, outcome: str, metrics: Sequence[str], parts: Sequence[str]) -> None:
        self.outcome = outcome
        self.metrics = list(dict.fromkeys((outcome, *metrics)))
        self.parts = parts
        self._overrides: Sequence[str] = ()
        self._choices: Mapping[str, Any] = {}
        self._swept: Sequence[str] = ()
        self._found: dict[str, float] = {}
        self._written_at = -1
        self._seconds_before = 0.0
        self._started = time.time()

    def describe(self, *, overrides: Sequence[str], choices: Mapping[str, Any], swept: Sequence[str] = ()) -> None:
        """Say what the user asked for.

        Args:
            overrides: Such as ``rollout.group_size=8``.
            choices: Group of conf/ -> the name of what was chosen.
            swept: Keys in which the jobs of a sweep differ; their columns come first.
        """
        self._overrides, self._choices, self._swept = overrides, choices, swept

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._started = time.time()
        if not trainer.is_global_zero:
            return
        settings: Mapping[str, Any] = module.settings  # type: ignore[assignment]
        for logger in trainer.loggers:
            with attempt(logger):
                if isinstance(logger, TensorBoardLogger):
                    self._begin(logger, columns(settings, self._overrides, self._choices, self.parts))
                elif settings:
                    logger.log_hyperparams(dict(settings))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if not self.outcome.startswith("val/"):
            self._see(module)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        validated: int = module.validated_at  # type: ignore[assignment]
        # a continued run begins with a validation of its own only where its checkpoint has none of that step
        if trainer.state.fn == "fit" and self._written_at < validated == module.completed_steps:
            self._written_at = validated
            self._see(module)
            self._results(trainer, module)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._end(trainer, "finished")

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        if trainer.state.fn == "fit":
            is_interrupt = isinstance(exception, Preempted | KeyboardInterrupt)
            self._end(trainer, "interrupted" if is_interrupt else "failed")

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        own = {"found": dict(self._found), "seconds": self._seconds(), "written_at": self._written_at}
        checkpoint["hparams"] = own

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if own := checkpoint.get("hparams"):  # not known of earlier versions
            self._found, self._seconds_before = dict(own["found"]), own["seconds"]
            self._written_at = own["written_at"]

    def _seconds(self) -> float:
        return self._seconds_before + time.time() - self._started

    def _see(self, module: Any) -> None:
        value = module.metrics.get(self.outcome, math.nan)
        if math.isfinite(value):
            self._found.setdefault("first", value)
            self._found["best"] = max(self._found.get("best", value), value)

    def _results(self, trainer: Trainer, module: Any) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                with attempt(logger):
                    for name, value in {**self._found, "seconds": self._seconds()}.items():
                        logger.experiment.add_scalar(f"{TAG}/{name}", value, module.completed_steps)

    def _begin(self, logger: TensorBoardLogger, shown: Mapping[str, Value]) -> None:
        for path in Path(logger.log_dir).glob(f"events.out.tfevents.*{_END}"):
            with suppress(OSError):
                path.unlink()
        # TensorBoard sorts by name, but for those that differ, and shows the first five until others are ticked
        first = set(self._swept) & shown.keys() or {_key(word) for word in self._overrides}
        infos = [
            api_pb2.HParamInfo(name=name, type=_type(value), differs=name in first) for name, value in shown.items()
        ]
        titles = {f"{TAG}/first": f"{self.outcome} first", f"{TAG}/best": f"{self.outcome} best"}
        titles |= {name: name for name in self.metrics} | {f"{TAG}/seconds": "seconds"}
        metrics = [
            api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=title) for tag, title in titles.items()
        ]
        directory = Path(logger.save_dir or "").absolute()
        start = SessionStartInfo(group_name=f"{directory.name} in {directory.parent}", start_time_secs=self._started)
        for name, value in shown.items():
            kind = "bool_value" if isinstance(value, bool) else "string_value" if isinstance(value, str) else None
            setattr(start.hparams[name], kind or "number_value", value)
        experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=metrics, time_created_secs=self._started)
        writer: Any = logger.experiment._get_file_writer()
        writer.add_summary(_summary(metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=experiment)))
        writer.add_summary(_summary(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start)))

    def _end(self, trainer: Trainer, how: str) -> None:
        """Write how the run ended into a file of its own: what a checkpoint keeps of the others must not say it."""
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                with attempt(logger):
                    logger.experiment.flush()
                    file: Any = FileWriter(logger.log_dir, filename_suffix=_END)
                    end = SessionEndInfo(status=_ENDED[how], end_time_secs=time.time())
                    file.add_summary(_summary(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end)))
                    file.close()


def columns(
    settings: Mapping[str, Any], overrides: Sequence[str], choices: Mapping[str, Any], parts: Sequence[str]
) -> dict[str, Value]:
    """What tells a run apart from others: column -> value, the overridden settings before the chosen parts.

    Args:
        settings: The run's, without secrets.
        overrides: What the user changed.
        choices: Group of conf/ -> the name of what was chosen.
        parts: Groups that have a column whoever chose them.
    """
    keys = [_key(word) for word in overrides if not word.startswith("~")]
    shown: dict[str, Value] = {}
    for key in (*keys, *parts):
        value = choices.get(key, _value(settings, key))
        if key == "reward":  # an algorithm may have added some
            value = "+".join(settings.get("reward") or {})
        if key.startswith(_NO_RESULT) or value is None or isinstance(value, Mapping):
            continue
        shown[key] = value if isinstance(value, bool | int | float | str) else str(value)
    return shown


def describe(trainer: Trainer, **facts: Any) -> None:
    """Tell a trainer's `HParams`, if it has one, what its ``describe`` takes."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, HParams):
            callback.describe(**facts)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+").partition("@")[0]


def _value(settings: Mapping[str, Any], key: str) -> Any:
    """The setting of a dotted key; None where there is none."""
    node: Any = settings
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _type(value: Value) -> Any:
    if isinstance(value, bool):
        return api_pb2.DATA_TYPE_BOOL
    return api_pb2.DATA_TYPE_STRING if isinstance(value, str) else api_pb2.DATA_TYPE_FLOAT64


def _summary(tag: str, content: HParamsPluginData) -> Summary:
    one = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)
    return Summary(value=[one])
