"""The HParams tab of TensorBoard: the settings of a finished run beside its final metrics."""

from collections.abc import Collection, Mapping
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

from grpo_lightning.callbacks.loggers import attempt

_NO_RESULT = {"callbacks", "logger", "run_dir", "checkpoint", "mode", "taught", "data.levels"}


class HParams(Callback):
    """Writes the run's settings once it is finished.

    Args:
        metrics: Names of scalars to show beside the settings; those that were never written are left out.
    """

    def __init__(self, *, metrics: list[str]) -> None:
        self.metrics = metrics

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        values: Mapping[str, float] = module.metrics  # type: ignore[assignment]
        final = {name: values[name] for name in self.metrics if name in values}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                # Only the settings: the metrics' values are the last scalars of the same names.
                with attempt(logger):
                    for summary in hparams(flat(module.settings), final):  # type: ignore[arg-type]
                        logger.experiment._get_file_writer().add_summary(summary)


def flat(
    config: Mapping[str, Any], *, prefix: str = "", parts: Collection[str] | None = None
) -> dict[str, bool | int | float | str]:
    """Nested settings by their dotted keys, ``a.b.c`` -> value, with lists and null as text.

    Targets are left out, and whatever changes no result: where files go, and the copies of a part inside another one.
    """
    parts = config.keys() if parts is None else parts
    flattened: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        copied = prefix and key in parts and isinstance(value, Mapping)
        if key.startswith("_") or copied or name in _NO_RESULT:
            continue
        if isinstance(value, Mapping):
            flattened |= flat(value, prefix=f"{name}.", parts=parts)
        else:
            flattened[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flattened
