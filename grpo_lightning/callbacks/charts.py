"""TensorBoard's Custom Scalars tab: what to look at first, in a few charts with several lines each."""

import re
from collections.abc import Collection
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from grpo_lightning.logger.guarded import attempt

CHARTS = {
    "Progress": {
        "right answers to held-out prompts": r"val/pass@1",
        "reward in training": r"reward/total",
        "reward on held-out prompts": r"val/reward/total",
        "right answers, of several samples": r"val/(pass@(?!1$)|maj@).+",
        "each reward in training": r"reward/(?!total$|std$).+",
        "each reward on held-out prompts": r"val/reward/(?!total$).+",
        "loss": r"loss/total",  # of supervised training; with rewards it says nothing
    },
    "Health": {
        "groups that teach": r"group/mixed",
        "groups that are all right or all wrong": r"group/all_(right|wrong)",
        "deviation of rewards within groups": r"reward/std",
        "KL to the reference": r"policy/kl_divergence",
        "entropy": r"policy/entropy",
        "gradient norm": r"optim/grad_norm",
        "tokens clipped": r"policy/clip_fraction",
        "completion length": r"completion/length_(mean|max)",
        "completions cut at the length limit": r"completion/truncated_fraction",
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


class Charts(Callback):
    """Writes the layout of the tab after the first step of a run, when it is known which metrics there are."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        step: int = module.completed_steps  # type: ignore[assignment]
        if step != 1 or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                with attempt(logger):
                    logger.experiment.add_custom_scalars(layout(module.metrics))  # type: ignore[arg-type]


def layout(metrics: Collection[str]) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """The charts that show any of some metrics, as TensorBoard's writers take them.

    Args:
        metrics: Their names.
    """
    is_supervised = not any(name.startswith("reward/") for name in metrics)
    found: dict[str, dict[str, tuple[str, list[str]]]] = {}
    for category, charts in CHARTS.items():
        for title, pattern in charts.items():
            is_noise = title == "loss" and not is_supervised
            if not is_noise and any(re.fullmatch(pattern, name) for name in metrics):
                found.setdefault(category, {})[title] = ("Multiline", [f"^{pattern}$"])
    return found
