"""Which metrics a run will have; docs/metrics.md says what they mean."""

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_lightning.settings.contradictions import Reader, Unsound
from grpo_lightning.settings.suggestions import nearest

_SFT = {
    "loss": ("total",),
    "optim": ("grad_norm", "lr", "skipped"),
    "time": ("update", "step"),
}
_MISMATCH = ("mismatch_mean", "mismatch_max", "mismatch_kl")
_GRPO = {
    "reward": ("std",),
    "advantage": ("mean", "std"),
    "group": ("all_right", "all_wrong", "mixed", "tries", "kept", "carried"),
    "reward_model": ("loss", "accuracy"),
    "policy": ("kl_divergence", "entropy", "clip_fraction", "ratio_mean", "ratio_max", *_MISMATCH),
    "correction": ("mean", "max", "masked"),
    "loss": ("policy", "kl", "entropy"),
    "completion": ("length_mean", "length_max", "truncated_fraction", "set_size_mean", "set_full_fraction"),
    "sampler": ("weight_version", "support_miss_rate"),
    "episode": ("turns", "turns_max", "reply_tokens", "failed", "bad_calls", "cut_replies"),
    "time": ("environment", "sync", "wake", "rollout", "reward", "score", "wait"),
    "perf": ("tokens_per_second", "gemm_fraction", "peak_memory_gb"),
}
OF_SFT = tuple(f"{group}/{name}" for group, names in _SFT.items() for name in names)
OF_GRPO = OF_SFT + tuple(f"{group}/{name}" for group, names in _GRPO.items() for name in names)
"""Names that do not depend on the settings."""


def sweep_metric_problems(get: Reader) -> Iterator[str]:
    """Whether ``sweep_metric`` is among the metrics of the run; other modules than this project's have their own."""
    name = get("sweep_metric")
    if not str(get("module._target_")).startswith("grpo_lightning.module."):
        return
    known = _known(get)
    if name in known or str(name).startswith("varying/"):
        return
    listed = [one for one in known if one.startswith("val/")]
    meant = nearest(str(name), known)
    guess = f"; the nearest is {meant}" if meant and meant not in listed else ""
    shown = "null" if name is None else name
    yield f"sweep_metric={shown}: allowed are {', '.join(listed)} and the metrics of training{guess}"


def _known(get: Reader) -> list[str]:
    if any(k > get("validation.samples_per_prompt") for k in get("validation.ks")):
        raise Unsound("validation.ks")
    metrics = [f"val/{kind}@{k}" for kind in ("pass", "maj") for k in get("validation.ks")]
    metrics += [f"val/reward/{name}" for name in ("total", *_named(get, "validation.reward"))]
    if not str(get("module._target_")).endswith("GRPOLightningModule"):
        return [*metrics, *OF_SFT]
    own = _named(get, "reward")
    return [
        *metrics,
        *OF_GRPO,
        *(f"reward/{name}" for name in ("total", *own)),
        *(f"failure/{name}" for name in own),
    ]


def _named(get: Reader, key: str) -> list[str]:
    try:
        rewards: Any = get(key)
    except Unsound:
        return []
    return list(rewards) if isinstance(rewards, Mapping) else []
