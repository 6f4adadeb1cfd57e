"""What to log about a sampler that is not the policy: sums over tokens, which add up over micro-batches and processes.

Names that end in ``_max`` are maxima; the others become means when they are divided by the number of tokens.
"""

import torch
from torch import Tensor

from grpo_lightning.loss.surrogate import MAX_LOG_RATIO


@torch.no_grad()
def mismatch(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the sampler was from the policy.

    Args:
        log_ratio: [B, T] log pi_old - log mu of the sampled tokens.
        mask: [B, T] True on the tokens that count.

    Returns:
        The scalars "mismatch_mean", of |log_ratio| in nats, "mismatch_max", the largest, and "mismatch_kl", of
        Schulman's k3 for KL(mu || pi_old):  rho - 1 - log rho  (joschu.net/blog/kl-approx.html).
    """
    gaps = torch.where(mask, log_ratio, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sizes = gaps.abs()
    return {"mismatch_mean": sizes.sum(), "mismatch_max": sizes.max(), "mismatch_kl": (gaps.expm1() - gaps).sum()}


@torch.no_grad()
def corrections(factor: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """What a correction made of the mismatch.

    Args:
        factor: [B, T] by which the weights were multiplied.
        mask: [B, T] True on the tokens that count.

    Returns:
        The scalars "correction_mean" and "correction_max", of the factor, and "correction_masked", of where it is 0.
    """
    factor = torch.where(mask, factor, 0.0)
    return {
        "correction_mean": factor.sum(),
        "correction_max": factor.max(),
        "correction_masked": (mask & (factor == 0)).sum().to(factor.dtype),
    }
