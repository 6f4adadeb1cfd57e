"""The HParams tab of TensorBoard: what a run was told to be beside how it goes, and its settings for other loggers."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

from grpo_lightning.config.tree import value_at
from grpo_lightning.logger.guarded import attempt
from grpo_lightning.supervisor import recorded_status

Value = float | str

_NO_RESULT = (*("callbacks", "logger", "run_dir", "checkpoint", "mode", "trusted", "sweep", "hydra"),)
"""Beginnings of keys that change no result."""


class HParams(Callback):
    """Writes the settings of a run that tell it apart, once: TensorBoard shows them beside the last values of metrics.

    Args:
        outcome: The scalar that is shown first.
        metrics: Scalars that are shown besides.
        parts: Groups of conf/ whose choice is shown, behind the settings that were overridden.
    """

    def __init__(self, *, outcome: str, metrics: Sequence[str], parts: Sequence[str]) -> None:
        self.metrics = list(dict.fromkeys((outcome, *metrics)))
        self.parts = parts

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        settings: Mapping[str, Any] = module.settings  # type: ignore[assignment]
        asked = recorded_status()
        for logger in trainer.loggers if trainer.is_global_zero else ():
            with attempt(logger):
                if isinstance(logger, TensorBoardLogger):
                    shown = columns(settings, asked.get("overrides", ()), asked.get("choices", {}), self.parts)
                    # Lightning's log_hyperparams would also write a value of each metric, which has none yet.
                    for summary in hparams(shown, dict.fromkeys(self.metrics))[:2]:  # the last says that it succeeded
                        logger.experiment.file_writer.add_summary(summary)
                elif settings:
                    logger.log_hyperparams(dict(settings))


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
    keys = [word.partition("=")[0].lstrip("+").partition("@")[0] for word in overrides if not word.startswith("~")]
    shown: dict[str, Value] = {}
    for key in (*keys, *parts):
        value = choices.get(key, value_at(settings, key))
        if key == "reward":  # an algorithm may have added some
            value = "+".join(settings.get("reward") or {})
        if key.startswith(_NO_RESULT) or value is None or isinstance(value, Mapping):
            continue
        shown[key] = value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
    return shown
