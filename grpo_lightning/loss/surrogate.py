"""Surrogate objectives: what is maximized in place of the expected reward, per token.

r = pi / pi_old of a sampled token, A its advantage. Every function has the same first arguments and results:

Args:
    log_ratio: [B, T] log pi - log pi_old of the sampled tokens; r = exp(log_ratio).
    advantages: [B, T] A; an outcome advantage is the same along a row.
    mask: [B, T] True on the tokens that count.

Returns:
    The objective [B, T], to be maximized, and where a bound is active [B, T] (bool), for policy/clip_fraction.

Raises:
    ValueError: ``advantages`` or ``mask`` differ in shape from ``log_ratio``.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond it a ratio says nothing and overflows."""


def per_token(function: Function) -> Function:
    """Mark a surrogate or a correction that depends on each token alone: it saves work in the LM head."""
    function.per_token = True  # type: ignore[attr-defined]
    return function


@per_token
def clipped(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The pessimistic objective of each token  min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A).

    PPO (arXiv:1707.06347, Eq. 7), applied per token by GRPO (arXiv:2402.03300, Eq. 3).
    ``epsilon_high > epsilon_low`` is DAPO's clip-higher (arXiv:2503.14476). With A < 0 the plain objective falls
    without bound as r grows; either option bounds it.

    Where a bound is active, and only there, a token that counts passes no gradient.

    Args:
        log_ratio: [B, T], like ``advantages`` and ``mask``; see above.
        advantages: [B, T]
        mask: [B, T]
        epsilon_low: The largest decrease of the ratio that still has a gradient, in (0, 1).
        epsilon_high: The largest increase of the ratio that still has one, > 0.
        dual_clip: A bound c > 1 for A < 0, where the objective is at least c A (arXiv:1912.09729, Eq. 5).
        delta: A bound of the ratio in the first term, min(r, delta) A, > 1 + epsilon_high (INTELLECT-2,
            arXiv:2505.07291).
    """
    _check_shapes(log_ratio, advantages, mask)
    ratio = ratio_of(log_ratio)
    first = ratio if delta is None else ratio.clamp(max=delta)
    objective = torch.minimum(first * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return objective, (objective != ratio * advantages) & mask


def gspo(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, epsilon_low: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """The clipped objective of the whole completion's ratio  s = exp(mean over its tokens of log_ratio).

    GSPO, arXiv:2507.18071, Eq. 5, in the token form of its Eq. 14: every token has the value of s and the gradient of
    its own log-probability, so that the mean over a completion's tokens has the gradient of s. Goes with
    ``completion_mean``: with ``token_mean`` long completions count more. The bound is active on all tokens of a
    completion or on none.
    """
    _check_shapes(log_ratio, advantages, mask)
    own = log_ratio - log_ratio.detach()
    ratio = ratio_of(_row_mean(log_ratio.detach(), mask) + own)
    bound = ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages
    return torch.minimum(ratio * advantages, bound), (bound < ratio * advantages) & mask


def response_clipped(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, epsilon_low: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """The clipped objective of the whole response's ratio  R = exp(sum over its tokens of log_ratio), on each token.

    PPO (arXiv:1707.06347, Eq. 7) with a response as one action, as some guides to GRPO write it. The sum leaves
    [1 - epsilon_low, 1 + epsilon_high] after a small change of a long response; ``gspo`` takes the mean instead. Goes
    with ``completion_mean``. The bound is active on all tokens of a completion or on none.
    """
    _check_shapes(log_ratio, advantages, mask)
    total = (log_ratio * mask).sum(-1, keepdim=True)  # [B, 1]
    ratio = ratio_of(total)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    return objective, (objective != ratio * advantages) & mask


@per_token
def cispo(log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, ratio_max: float) -> tuple[Tensor, Tensor]:
    """The objective  min(r, ratio_max) A log pi,  its weight without gradient: all tokens teach, none too strongly.

    CISPO of MiniMax-M1, arXiv:2506.13585, Eq. 4. In place of log pi stands log_ratio, which differs by a constant.
    ``ratio_max`` is an absolute ratio > 1, not a distance from 1; the gradient passes where the weight is capped, too.
    """
    _check_shapes(log_ratio, advantages, mask)
    ratio = ratio_of(log_ratio).detach()
    return ratio.clamp(max=ratio_max) * advantages * log_ratio, (ratio > ratio_max) & mask


@per_token
def sapo(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, tau_positive: float, tau_negative: float
) -> tuple[Tensor, Tensor]:
    """The objective  A sigmoid(tau (r - 1)) 4 / tau,  whose gradient fades away from r = 1 instead of being cut.

    Soft Adaptive Policy Optimization, arXiv:2511.20347, Eq. 5 and 6. The gradient at r = 1 is A; it fades faster with a
    larger tau, which is ``tau_positive`` where A > 0 and ``tau_negative`` elsewhere. No bound is ever active.
    """
    _check_shapes(log_ratio, advantages, mask)
    ratio = ratio_of(log_ratio)
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    return advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, torch.zeros_like(mask)


def gmpo(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, epsilon_low: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """The objective A times the geometric mean of a completion's clipped ratios, on each of its tokens.

    Geometric-Mean Policy Optimization, arXiv:2507.20673, Eq. 4: log r is clipped to [-epsilon_low, epsilon_high],
    pessimistically by the sign of A, and averaged over the completion. Goes with ``completion_mean``. The bounds are
    bounds of log r.
    """
    _check_shapes(log_ratio, advantages, mask)
    sign = advantages.sign()
    clipped_log = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-epsilon_low, epsilon_high))
    ratio = ratio_of(_row_mean(clipped_log, mask))
    return ratio * advantages, (clipped_log != log_ratio) & mask & (advantages != 0)


@per_token
def reinforce(log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The objective  A log pi,  the policy gradient without any ratio: unbiased for a single update of each rollout.

    Williams (1992). In place of log pi stands log_ratio, which differs by a constant. No bound is ever active.
    """
    _check_shapes(log_ratio, advantages, mask)
    return advantages * log_ratio, torch.zeros_like(mask)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """The exponential, of an exponent clamped to +-`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean [B, 1] over the tokens of each row that count; 0 in a row without any."""
    return (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _check_shapes(log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> None:
    if advantages.shape != log_ratio.shape or mask.shape != log_ratio.shape:
        raise ValueError(
            f"advantages {tuple(advantages.shape)} and mask {tuple(mask.shape)} must match "
            f"log_ratio {tuple(log_ratio.shape)}"
        )
