"""Metrics of a rollout: its rewards, groups, completions and tokens."""

import torch
from torch import Tensor

from grpo_lightning.loss import k3
from grpo_lightning.rollout.selection import replace_nan
from grpo_lightning.rollout.turns import turn_metrics
from grpo_lightning.sampler.native.token_sampling import MAX_SUPPORT
from grpo_lightning.types import Scored

_ROUNDING = 1e-6  # of float32 sums over up to some thousand completions


def sampled_metrics(scored: Scored) -> dict[str, Tensor]:
    """Metrics of everything that was sampled, whether or not it is trained on."""
    rewards = scored.rewards["total"].view(len(scored.prompts), -1)  # [B] -> [P, G]
    right = scored.right.view_as(rewards).float().mean(-1)
    lengths = scored.sampled.mask.sum(-1).float()
    metrics = {f"reward/{name}": values.nanmean() for name, values in scored.rewards.items()}
    metrics |= {
        "reward/std": replace_nan(rewards).std(-1).mean(),
        "group/all_right": (right == 1).float().mean(),
        "group/all_wrong": (right == 0).float().mean(),
        "group/mixed": ((right > 0) & (right < 1)).float().mean(),
        "completion/length_mean": lengths.mean(),
        "completion/length_max": lengths.max(),
        "completion/truncated_fraction": 1 - torch.tensor(scored.sampled.finished).float().mean(),
    }
    support = scored.sampled.support
    if support is not None and len(support.ids):
        sizes = support.sizes[support.sizes > 0].float()
        metrics["completion/set_size_mean"] = sizes.mean()
        metrics["completion/set_full_fraction"] = (sizes >= MAX_SUPPORT).float().mean()
    return metrics | turn_metrics(scored.sampled)


def advantage_metrics(advantages: Tensor) -> dict[str, Tensor]:
    """Mean and deviation of advantages [B]; a mean that is 0 but for rounding, below 1e-6 of the deviation, is 0."""
    mean, deviation = advantages.mean(), advantages.std()
    is_noise = mean.abs() < _ROUNDING * deviation
    return {"advantage/mean": torch.where(is_noise, 0.0, mean), "advantage/std": deviation}


def token_metrics(scored: Scored, ref_logprobs: Tensor, *, has_reference: bool) -> dict[str, Tensor]:
    """Metrics of the tokens that are trained on, under the policy that sampled them."""
    sampled = scored.sampled
    metrics = {"policy/entropy": sampled.entropy[sampled.mask].mean()}
    if has_reference:
        metrics["policy/kl_divergence"] = k3(sampled.logprobs, ref_logprobs)[sampled.mask].mean()
    return metrics
