"""TensorBoard's Custom Scalars and HParams tabs."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from grpo_lightning.config.settings import value_at
from grpo_lightning.logger.base import warn_on_failure

CHARTS = {
    "Progress": {
        "pass@1 on held-out prompts": r"val/pass@1",
        "reward in training": r"reward/total",
        "reward on held-out prompts": r"val/reward/total",
        "pass@k and maj@k": r"val/(pass@(?!1$)|maj@).+",
        "each reward in training": r"reward/(?!total$|std$).+",
        "each reward on held-out prompts": r"val/reward/(?!total$).+",
        "loss": r"loss/total",  # of supervised training; with rewards it says nothing
    },
    "Health": {
        "groups with signal": r"group/mixed",
        "groups that are all right or all wrong": r"group/all_(right|wrong)",
        "deviation of rewards within groups": r"reward/std",
        "KL to the reference": r"policy/kl_divergence",
        "entropy": r"policy/entropy",
        "gradient norm": r"optim/grad_norm",
        "tokens clipped": r"policy/clip_fraction",
        "completion length": r"completion/length_(mean|max)",
        "truncated completions": r"completion/truncated_fraction",
        "rewards that failed": r"failure/.+",
    },
    "Speed": {
        "seconds of a step": r"time/.+",
        "tokens per second": r"perf/tokens_per_second",
        "memory": r"perf/peak_memory_gb",
        "learning rate": r"optim/lr",
    },
}
"""Category -> title of a chart -> the metrics that it shows, as a regular expression."""
_NOT_SHOWN = ("callbacks", "logger", "run_dir", "checkpoint", "mode", "trusted", "sweep", "hydra")
"""What keys begin with that change no result."""


class Charts(Callback):
    """Writes the layout of the Custom Scalars tab after the first step of a run, when its metrics are known."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        step: int = module.completed_steps  # type: ignore[assignment]
        if step != 1 or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                with warn_on_failure(logger):
                    logger.experiment.add_custom_scalars(chart_layout(module.metrics))  # type: ignore[arg-type]


def chart_layout(metrics: Collection[str]) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """The charts that show any of some metrics, as TensorBoard's writers take them."""
    has_rewards = any(name.startswith("reward/") for name in metrics)
    layout: dict[str, dict[str, tuple[str, list[str]]]] = {}
    for category, charts in CHARTS.items():
        for title, pattern in charts.items():
            is_shown = title != "loss" or not has_rewards
            if is_shown and any(re.fullmatch(pattern, name) for name in metrics):
                layout.setdefault(category, {})[title] = ("Multiline", [f"^{pattern}$"])
    return layout


class HParams(Callback):
    """Writes the settings that tell a run apart to the HParams tab, and all settings to the other loggers.

    Args:
        outcome: The scalar that is shown first, with its last value.
        metrics: Further scalars that are shown.
        parts: Groups of conf/ whose choice is shown, behind the overridden settings.
    """

    def __init__(self, *, outcome: str, metrics: Sequence[str], parts: Sequence[str]) -> None:
        self.metrics = list(dict.fromkeys((outcome, *metrics)))
        self.parts = parts

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        from torch.utils.tensorboard.summary import hparams

        settings: Mapping[str, Any] = module.settings  # type: ignore[assignment]
        for logger in trainer.loggers if trainer.is_global_zero else ():
            with warn_on_failure(logger):
                if isinstance(logger, TensorBoardLogger):
                    shown = hparams_columns(
                        settings, settings.get("overrides", ()), settings.get("choices", {}), self.parts
                    )
                    # Lightning's log_hyperparams would also write a value of each metric, which has none yet; the
                    # third summary would say that the run has succeeded.
                    for summary in hparams(shown, dict.fromkeys(self.metrics))[:2]:
                        logger.experiment.file_writer.add_summary(summary)
                elif settings:
                    logger.log_hyperparams(dict(settings))


def hparams_columns(
    settings: Mapping[str, Any], overrides: Sequence[str], choices: Mapping[str, Any], parts: Sequence[str]
) -> dict[str, float | str]:
    """Column -> value of the HParams tab: the overridden settings, then the choices of the groups in ``parts``."""
    keys = [word.partition("=")[0].lstrip("+").partition("@")[0] for word in overrides if not word.startswith("~")]
    columns: dict[str, float | str] = {}
    for key in (*keys, *parts):
        value = choices.get(key, value_at(settings, key))
        if key == "reward":  # an algorithm may have added some
            value = "+".join(settings.get("reward") or {})
        if key.startswith(_NOT_SHOWN) or value is None or isinstance(value, Mapping):
            continue
        columns[key] = value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
    return columns
