"""Corrections of the loss for tokens that another distribution than the policy drew: an engine, another dtype.

An engine that samples from the policy's weights computes other probabilities than training does, mu in place of pi_old.
An expectation under pi_old is one under mu in which everything counts rho = pi_old / mu times as much; bounds keep the
variance of rho small, at the price of some bias. The factor multiplies the weights of the loss, without gradient.

The exponent of rho = exp(log_ratio) is clamped to +-20, also that of a product. Weights are not normalized again:
factors below 1 on average make the step smaller. Every correction has the same first arguments and result:

Args:
    log_ratio: [B, T] log pi_old - log mu of the sampled tokens.
    mask: [B, T] True on the tokens that count.

Returns:
    The factor [B, T] >= 0; 0 where masked.
"""

import torch
from torch import Tensor

from grpo_lightning.loss.surrogate import MAX_LOG_RATIO, per_token, ratio_of


def none() -> None:
    """No correction: for a sampler that computes what the policy computes, up to rounding."""


@per_token
def token_truncation(log_ratio: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """The factor of each token  min(rho, cap).

    Truncated importance sampling (TIS): Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training", after Ionides (2008); ``cap`` >= 1. The tokens before it in the completion stay uncorrected.
    """
    return torch.where(mask, ratio_of(log_ratio).clamp(max=cap), 0.0)


@per_token
def token_mask(log_ratio: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """The factor of each token  rho where low <= rho <= high, else 0.

    IcePop (Ring-1T, arXiv:2510.18855): a token on which policy and sampler disagree that much has no gradient. ``low``
    lies in [0, 1), ``high`` above 1.
    """
    ratio = ratio_of(log_ratio)
    return torch.where(mask & _inside(ratio, low, high), ratio, 0.0)


def sequence_truncation(log_ratio: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """The factor of each token  min(product of rho over its completion, cap).

    As one of TRL's modes (huggingface/trl#4493). Without a cap the gradient would be that of samples of the policy
    itself; the product's variance grows exponentially with the length. All tokens of a completion have the same factor.
    """
    return torch.where(mask, ratio_of(_sum(log_ratio, mask)).clamp(max=cap), 0.0)  # [B, 1] -> [B, T]


def sequence_mask(log_ratio: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """The factor of each token  R where low <= R <= high, else 0, with R the product of rho over its completion.

    TRL's default mode (huggingface/trl#4493), with a lower bound besides. The product leaves any bounds if the
    completion is long enough: 0.012 nats per token make it 3.3 after 100 tokens (huggingface/trl#4772).
    """
    ratio = ratio_of(_sum(log_ratio, mask))  # [B, 1]
    return torch.where(mask & _inside(ratio, low, high), ratio, 0.0)  # [B, 1] -> [B, T]


def geometric_mask(log_ratio: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """The factor of each token  1 where low <= M <= high, else 0, with M the geometric mean of its completion's rho.

    As in NeMo-RL's recipes of ProRL, with 0.999 and 1.002. It leaves out completions on which policy and sampler differ
    on the whole, whatever their length, and weighs the others alike: it bounds the error and corrects nothing. The
    scatter of M falls with the square root of the length, so short completions need wider bounds.
    """
    mean = _sum(log_ratio, mask) / mask.sum(-1, keepdim=True).clamp(min=1)  # [B, 1]
    return (mask & _inside(ratio_of(mean), low, high)).to(log_ratio.dtype)


def _sum(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The sum [B, 1] over the tokens of each row that count."""
    return torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True)


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return (low <= ratio) & (ratio <= high)


@torch.no_grad()
def mismatch(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the sampler was from the policy, as sums over tokens that add up over micro-batches and processes.

    Returns:
        Sums that become means when divided by the number of tokens, and a maximum where the name ends in ``_max``:
        "mismatch_mean", of |log_ratio| in nats, "mismatch_max", the largest, and "mismatch_kl", of
        Schulman's k3 for KL(mu || pi_old):  rho - 1 - log rho  (joschu.net/blog/kl-approx.html).
    """
    gaps = torch.where(mask, log_ratio, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sizes = gaps.abs()
    return {"mismatch_mean": sizes.sum(), "mismatch_max": sizes.max(), "mismatch_kl": (gaps.expm1() - gaps).sum()}


@torch.no_grad()
def corrections(factor: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Statistics of a correction's factor [B, T], as `mismatch` returns them.

    Returns:
        The scalars "correction_mean" and "correction_max", of the factor, and "correction_masked", of where it is 0.
    """
    factor = torch.where(mask, factor, 0.0)
    return {
        "correction_mean": factor.sum(),
        "correction_max": factor.max(),
        "correction_masked": (mask & (factor == 0)).sum().to(factor.dtype),
    }
