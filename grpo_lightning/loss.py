"""The policy loss as three independent choices: a surrogate, a KL estimator and token weights.

    loss = sum over (b, t) of  weights * (kl_coef * kl - objective - entropy_coef * entropy)

A published variant is one combination, spelled out in conf/loss/*.yaml; nothing here branches on its name. Weights are
computed once for a whole optimizer step, over all ranks, and sliced into micro-batches, so accumulated gradients equal
the undivided ones by construction.

Shapes: B completions, T completion tokens. Log-probabilities and entropies are in nats, float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.batch import Rollout

Surrogate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(log_ratio, advantages, mask), all [B, T] -> the objective to maximize, and where it passes no gradient (bool)."""
Estimator = Callable[[Tensor, Tensor], Tensor]
"""(logprobs, ref_logprobs), both [B, T] -> per-token KL(policy || reference) in nats, [B, T]."""
Weights = Callable[[Tensor, Tensor], Tensor]
"""(mask [B, T] of this rank's share of an optimizer step, tokens [] sampled in it, averaged over ranks) -> [B, T].

Ranks are averaged by the strategy, so a weighting that counts tokens divides by that average, not by its own count.
"""

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond it a ratio says nothing and overflows."""


def clipped(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, epsilon_low: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """Per-token pessimistic objective  min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A),  r = exp(log_ratio).

    PPO (arXiv:1707.06347, Eq. 7), applied per token by GRPO (arXiv:2402.03300, Eq. 3).
    ``epsilon_high > epsilon_low`` is DAPO's clip-higher (arXiv:2503.14476).

    Args:
        log_ratio: [B, T] log pi - log pi_old of the sampled tokens.
        advantages: [B, T] an outcome advantage is the same along a row.
        mask: [B, T] True on the tokens that count.
        epsilon_low: Largest decrease of the ratio that still earns gradient, in (0, 1).
        epsilon_high: Largest increase that does, > 0.

    Returns:
        The objective [B, T], to be maximized, and where the bound is active [B, T] (bool): there, and only there, a
        token that counts passes no gradient.

    Raises:
        ValueError: ``advantages`` or ``mask`` differ in shape from ``log_ratio``.
    """
    if advantages.shape != log_ratio.shape or mask.shape != log_ratio.shape:
        raise ValueError(
            f"advantages {tuple(advantages.shape)} and mask {tuple(mask.shape)} must match "
            f"log_ratio {tuple(log_ratio.shape)}"
        )
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bound = ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages
    return torch.minimum(ratio * advantages, bound), (bound < ratio * advantages) & mask


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Schulman's k1 = log pi - log pi_ref: unbiased as a value, can be negative.

    joschu.net/blog/kl-approx.html. As a loss term on the policy's own samples its expected gradient is zero: it belongs
    into the reward.

    Args:
        logprobs: [B, T] under the policy.
        ref_logprobs: [B, T] under the reference.

    Returns:
        [B, T] nats; zero where the two agree.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Schulman's k2 = (log pi - log pi_ref)^2 / 2: biased as a value; on-policy its gradient is that of KL(pi || ref).

    joschu.net/blog/kl-approx.html. Args and returns as in ``k1``; never negative.
    """
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Schulman's k3 = pi_ref / pi - log(pi_ref / pi) - 1: unbiased as a value, never negative, low variance.

    arXiv:2402.03300, Eq. 4; joschu.net/blog/kl-approx.html. On-policy its expected gradient is that of KL(ref || pi).
    Args and returns as in ``k1``.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1


def completion_mean(mask: Tensor, tokens: Tensor) -> Tensor:
    """Completions count equally, tokens equally within one: GRPO's 1/B sum 1/|o_i| (arXiv:2402.03300, Eq. 3).

    Args:
        mask: [B, T] True on the tokens that count, of all this rank's completions in one optimizer step.
        tokens: [] tokens that count in the step, averaged over ranks.

    Returns:
        [B, T] 1 / (B * tokens of the row); 0 where masked.
    """
    return mask / (mask.sum(-1, keepdim=True).clamp(min=1) * len(mask))


def token_mean(mask: Tensor, tokens: Tensor) -> Tensor:
    """Every token of the optimizer step counts equally, on whatever rank: DAPO's remedy for long answers.

    arXiv:2503.14476, Eq. 8. Args and returns as in ``completion_mean``; 1 / tokens.
    """
    return mask / tokens.clamp(min=1)


def constant(mask: Tensor, tokens: Tensor, *, length: int) -> Tensor:
    """Every token counts 1 / (B * length) whatever its neighbours: Dr. GRPO (arXiv:2503.20783).

    Args and returns as in ``completion_mean``; ``length`` is a constant number of tokens, usually the limit.
    """
    return mask / (length * len(mask))


@dataclass(frozen=True)
class PolicyLoss:
    """One surrogate, one KL estimator and one weighting, summed into a scalar."""

    surrogate: Surrogate
    kl: Estimator
    weights: Weights
    kl_coef: float
    """Weight of the KL term; 0 needs no reference."""
    entropy_coef: float
    """Weight of the entropy bonus."""

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, rows: Rollout, weights: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of some rows of an optimizer step, under that step's ``weights``.

        Args:
            logprobs: [B, T] of the sampled tokens, with gradient; 0 where masked.
            entropy: [B, T] of the distributions they were drawn from; needs a gradient only with a bonus.
            rows: What was sampled, under which policy, and how good it was.
            weights: [B, T] the rows' share of ``self.weights(mask, tokens)``.

        Returns:
            The scalar to minimize, and detached parts of it, which add up over the rows of the step:
            "total", "policy", "kl" (each times its coefficient).
        """
        objective, _ = self.surrogate(logprobs - rows.old_logprobs, rows.advantages, rows.mask)
        parts = {"policy": -(weights * objective).sum()}
        if self.kl_coef:
            parts["kl"] = self.kl_coef * (weights * self.kl(logprobs, rows.ref_logprobs)).sum()
        if self.entropy_coef:
            parts["entropy"] = -self.entropy_coef * (weights * entropy).sum()
        loss = torch.stack(list(parts.values())).sum()
        return loss, {name: part.detach() for name, part in (parts | {"total": loss}).items()}

    @torch.no_grad()
    def statistics(self, logprobs: Tensor, entropy: Tensor, rows: Rollout) -> dict[str, Tensor]:
        """What to log about some rows: sums over their tokens, so that every token counts alike whatever the weights.

        Args:
            logprobs: [B, T] of the sampled tokens.
            entropy: [B, T]
            rows: As in ``__call__``.

        Returns:
            Sums [] "tokens", "kl_divergence" (k3 to the reference, if there is one), "entropy", "clip_fraction" and
            "ratio_mean", which become means when divided by "tokens"; and "ratio_max" [], a maximum.
        """
        log_ratio = (logprobs - rows.old_logprobs) * rows.mask
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        _, active = self.surrogate(log_ratio, rows.advantages, rows.mask)
        terms = {
            "tokens": torch.ones_like(ratio),
            "entropy": entropy,
            "clip_fraction": active.float(),
            "ratio_mean": ratio,
        }
        if self.kl_coef:
            terms["kl_divergence"] = k3(logprobs, rows.ref_logprobs)
        sums = {name: (term * rows.mask).sum() for name, term in terms.items()}
        return sums | {"ratio_max": (ratio * rows.mask).max()}
