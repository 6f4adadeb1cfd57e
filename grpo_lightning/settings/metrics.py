"""Which metrics a run will have; docs/metrics.md says what they mean."""

import re
from collections.abc import Mapping
from typing import Any

from grpo_lightning.settings.contradictions import Reader, Unsound
from grpo_lightning.settings.suggestions import nearest

OF_SFT = (
    "loss/total",
    "optim/grad_norm",
    "optim/lr",
    "optim/skipped",
    "time/update",
    "time/step",
)
OF_GRPO = (
    *OF_SFT,
    "reward/std",
    "advantage/mean",
    "advantage/std",
    "group/all_right",
    "group/all_wrong",
    "group/mixed",
    "group/tries",
    "group/kept",
    "group/carried",
    "reward_model/loss",
    "reward_model/accuracy",
    "policy/kl_divergence",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/ratio_mean",
    "policy/ratio_max",
    "policy/mismatch_mean",
    "policy/mismatch_max",
    "policy/mismatch_kl",
    "correction/mean",
    "correction/max",
    "correction/masked",
    "loss/policy",
    "loss/kl",
    "loss/entropy",
    "completion/length_mean",
    "completion/length_max",
    "completion/truncated_fraction",
    "completion/set_size_mean",
    "completion/set_full_fraction",
    "sampler/weight_version",
    "sampler/outside",
    "episode/turns",
    "episode/turns_max",
    "episode/reply_tokens",
    "episode/failed",
    "episode/bad_calls",
    "episode/cut_replies",
    "time/environment",
    "time/sync",
    "time/wake",
    "time/rollout",
    "time/reward",
    "time/score",
    "time/wait",
    "perf/tokens_per_second",
    "perf/gemm_fraction",
    "perf/peak_memory_gb",
)
"""Names that do not depend on the settings."""


def sweep_metric_problems(get: Reader) -> list[str]:
    """Whether ``sweep_metric`` is among the metrics of the run; other modules than this project's have their own."""
    name = get("sweep_metric")
    if not str(get("module._target_")).startswith("grpo_lightning.module."):
        return []
    known = _known(get)
    if name in known or re.fullmatch(r"varying/.+", str(name)):
        return []
    listed = [one for one in known if one.startswith("val/")]
    meant = nearest(str(name), known)
    guess = f"; the nearest is {meant}" if meant and meant not in listed else ""
    return [
        f"sweep_metric={'null' if name is None else name}: allowed are {', '.join(listed)} and the metrics of training"
        f"{guess}"
    ]


def _known(get: Reader) -> list[str]:
    is_grpo = str(get("module._target_")).endswith("GRPOLightningModule")
    if any(k > get("validation.samples_per_prompt") for k in get("validation.ks")):
        raise Unsound("validation.ks")
    rewards = ["total", *_named(get, "validation.reward")]
    metrics = [f"val/{kind}@{k}" for kind in ("pass", "maj") for k in get("validation.ks")]
    metrics += [f"val/reward/{name}" for name in rewards]
    metrics += OF_GRPO if is_grpo else OF_SFT
    if is_grpo:
        own = _named(get, "reward")
        metrics += [f"reward/{name}" for name in ("total", *own)] + [f"failure/{name}" for name in own]
    return metrics


def _named(get: Reader, key: str) -> list[str]:
    try:
        rewards: Any = get(key)
    except Unsound:
        return []
    return list(rewards) if isinstance(rewards, Mapping) else []
