"""The policy loss as independent choices: a surrogate, a KL estimator, token weights, and a correction of these.

    loss = sum over (b, t) of  weights * correction * (kl_coef * kl - objective - entropy_coef * entropy)

A published variant is one combination, spelled out in conf/loss/*.yaml; nothing here branches on its name. Weights are
computed once for a whole optimizer step, over all ranks, and sliced into micro-batches, so accumulated gradients equal
the undivided ones by construction.

Shapes: B completions, T completion tokens. Log-probabilities and entropies are in nats, float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_lightning.types import Rollout

Function = TypeVar("Function", bound=Callable[..., Any])

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond it a ratio says nothing and overflows."""

Surrogate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(log_ratio, advantages, mask), all [B, T] -> the objective to maximize, and where it is bounded (bool)."""
Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logprobs, ref_logprobs, log_ratio), all [B, T] -> per-token KL(policy || reference) in nats, [B, T]."""
Weights = Callable[[Tensor], Tensor]
"""mask [B, T] of all rows of an optimizer step, whatever process they fall to -> [B, T]."""
Correction = Callable[[Tensor, Tensor], Tensor]
"""(log pi_old - log mu, mask), both [B, T], mu the sampler -> what the weights are multiplied by, [B, T]."""

_METRICS = {
    "clip_fraction": "policy/clip_fraction",
    "ratio_mean": "policy/ratio_mean",
    "ratio_max": "policy/ratio_max",
    "mismatch_mean": "policy/mismatch_mean",
    "mismatch_max": "policy/mismatch_max",
    "mismatch_kl": "policy/mismatch_kl",
    "correction_mean": "correction/mean",
    "correction_max": "correction/max",
    "correction_masked": "correction/masked",
}
"""What sums over tokens are logged as, once they are divided; those that end in ``_max`` are maxima."""


def per_token(function: Function) -> Function:
    """Decorator of a surrogate or correction that looks at each token alone, which saves work in the LM head."""
    function.per_token = True  # type: ignore[attr-defined]
    return function


def ratio_of(log_ratio: Tensor) -> Tensor:
    """The exponential, of an exponent clamped to +-`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# Surrogates: what is maximized in place of the expected reward, per token; r = pi / pi_old = exp(log_ratio), A the
# advantage. All take log_ratio, advantages and mask, [B, T] each (an outcome advantage is the same along a row), and
# return the objective [B, T] and where a bound is active [B, T] (bool), for policy/clip_fraction.


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
        log_ratio: [B, T], like ``advantages`` and ``mask``.
        advantages: [B, T]
        mask: [B, T] True on the tokens that count.
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


def _check_shapes(log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> None:
    if not log_ratio.shape == advantages.shape == mask.shape:
        shapes = f"advantages {tuple(advantages.shape)} and mask {tuple(mask.shape)}"
        raise ValueError(f"{shapes} must match log_ratio {tuple(log_ratio.shape)}")


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean [B, 1] over the tokens of each row that count; 0 in a row without any."""
    return (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


# Per-token estimates of KL(policy || reference) in nats, [B, T], from the policy's own samples: joschu.net/blog/
# kl-approx.html. All take the tokens' log-probabilities under the policy and the reference, and log pi - log pi_old,
# which only `k3_weighted` needs.


def k1(logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """Schulman's k1 = log pi - log pi_ref: unbiased as a value, can be negative.

    As a loss term on the policy's own samples its expected gradient is zero: it belongs in the reward
    (``rollout.kl_penalty``).
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """Schulman's k2 = (log pi - log pi_ref)^2 / 2: biased, but on-policy with the gradient of KL(pi || ref)."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """Schulman's k3 = pi_ref / pi - log(pi_ref / pi) - 1: unbiased as a value, never negative, low variance.

    arXiv:2402.03300, Eq. 4. On-policy its expected gradient is that of KL(ref || pi).
    """
    distance = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return distance.exp() - distance - 1


def k3_weighted(logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor) -> Tensor:
    """The estimate (pi / pi_old) k3, whose ratio has its gradient: unbiased off-policy, too.

    DeepSeek-V3.2, arXiv:2512.02556, Eq. 7. Its expected gradient is that of KL(pi || ref); on-policy its value is that
    of ``k3``.
    """
    return ratio_of(log_ratio) * k3(logprobs, ref_logprobs)


# Token weights [B, T], 0 where masked: how much each token counts. mask [B, T] has all rows of the optimizer step,
# whatever process they fall to, and is True on the tokens that count; the sum of the weights scales the loss.


def completion_mean(mask: Tensor) -> Tensor:
    """Completions count equally, tokens equally within one: GRPO's 1/B sum 1/|o_i| (arXiv:2402.03300, Eq. 3)."""
    return mask / (mask.sum(-1, keepdim=True).clamp(min=1) * len(mask))


def token_mean(mask: Tensor) -> Tensor:
    """Every token of the optimizer step counts equally: DAPO's remedy for long answers (arXiv:2503.14476, Eq. 8)."""
    return mask / mask.sum().clamp(min=1)


def constant(mask: Tensor, *, length: int) -> Tensor:
    """Every token has the weight 1 / (B * length), with a constant number of tokens: Dr. GRPO (arXiv:2503.20783)."""
    return mask / (length * len(mask))


def completion_sum(mask: Tensor) -> Tensor:
    """A completion counts by its length: its tokens are summed, 1 / B each.

    RLOO (arXiv:2402.14740), where the whole completion is one action; LUSPO, which weighs a completion's mean by its
    length.
    """
    return mask / len(mask)


# Corrections for a sampler that computes other probabilities mu than training does, pi_old: an engine, another dtype.
# An expectation under pi_old is one under mu in which everything counts rho = pi_old / mu times as much; bounds keep
# the variance of rho small, at the price of some bias. All take log_ratio = log pi_old - log mu and mask, [B, T] each,
# and return a factor [B, T] >= 0 of the loss's weights, without gradient; 0 where masked. Weights are not normalized
# again: factors below 1 on average make the step smaller.


def no_correction() -> None:
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
    return torch.where(mask & (low <= ratio) & (ratio <= high), ratio, 0.0)


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
    return torch.where(mask & (low <= ratio) & (ratio <= high), ratio, 0.0)  # [B, 1] -> [B, T]


def geometric_mask(log_ratio: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """The factor of each token  1 where low <= M <= high, else 0, with M the geometric mean of its completion's rho.

    As in NeMo-RL's recipes of ProRL, with 0.999 and 1.002. It leaves out completions on which policy and sampler differ
    on the whole, whatever their length, and weighs the others alike: it bounds the error and corrects nothing. The
    scatter of M falls with the square root of the length, so short completions need wider bounds.
    """
    ratio = ratio_of(_sum(log_ratio, mask) / mask.sum(-1, keepdim=True).clamp(min=1))  # [B, 1]
    return (mask & (low <= ratio) & (ratio <= high)).to(log_ratio.dtype)


def _sum(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The sum [B, 1] over the tokens of each row that count."""
    return torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True)


@torch.no_grad()
def mismatch(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the sampler was from the policy, as sums over tokens; ``*_max`` is a maximum.

    |log_ratio| in nats, and Schulman's k3 for KL(mu || pi_old):  rho - 1 - log rho  (joschu.net/blog/kl-approx.html).
    """
    gaps = torch.where(mask, log_ratio, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sizes = gaps.abs()
    return {"mismatch_mean": sizes.sum(), "mismatch_max": sizes.max(), "mismatch_kl": (gaps.expm1() - gaps).sum()}


@torch.no_grad()
def corrections(factor: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Of a correction's factor [B, T] the sum over tokens, the maximum, and how often it is 0."""
    factor = torch.where(mask, factor, 0.0)
    return {
        "correction_mean": factor.sum(),
        "correction_max": factor.max(),
        "correction_masked": (mask & (factor == 0)).sum().to(factor.dtype),
    }


@dataclass(frozen=True)
class PolicyLoss:
    """A scalar made of one surrogate, one KL estimator, one weighting of tokens and, if any, a correction of it."""

    surrogate: Surrogate
    kl: Estimator
    weights: Weights
    kl_coef: float
    """Weight of the KL term; 0 needs no reference. Numbers may vary with the step, see `grpo_lightning.schedule`."""
    entropy_coef: float
    """Weight of the entropy bonus."""
    correction: Correction | None = None
    """For a sampler that is not the policy; None where it is."""

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, rows: Rollout, weights: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of some rows of an optimizer step, under that step's ``weights``.

        Args:
            logprobs: [B, T] of the sampled tokens, with gradient; 0 where masked.
            entropy: [B, T] of the distributions they were drawn from, with gradient; None where there is no bonus.
            rows: The rows, with old and reference log-probabilities and advantages.
            weights: [B, T] the rows' part of ``self.weights(mask)``, times what ``correct`` returns.

        Returns:
            The scalar to minimize, and detached parts of it, which add up over the rows of the step:
            "total", "policy", "kl" and "entropy", the last two times their coefficients and where these are not 0.
        """
        log_ratio = logprobs - rows.old_logprobs
        objective, _ = self._objective(log_ratio, rows.advantages, rows.mask)
        parts = {"policy": -(weights * objective).sum()}
        if self.kl_coef:
            parts["kl"] = self.kl_coef * (weights * self.kl(logprobs, rows.ref_logprobs, log_ratio)).sum()
        if self.entropy_coef:
            if entropy is None:
                raise ValueError(f"entropy: expected [B, T] with loss.entropy_coef={self.entropy_coef}, got None")
            parts["entropy"] = -self.entropy_coef * (weights * entropy).sum()
        loss = torch.stack(list(parts.values())).sum()
        return loss, {name: part.detach() for name, part in (parts | {"total": loss}).items()}

    def _objective(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """What the surrogate returns: the objective and where it is bounded, a value for each token."""
        returned: Any = self.surrogate(log_ratio, advantages, mask)
        pair = returned if isinstance(returned, tuple) else (returned,)
        shapes = [tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__ for value in pair]
        if shapes != [tuple(log_ratio.shape)] * 2:
            raise ValueError(
                f"loss.surrogate: expected (objective, bounded), both {list(log_ratio.shape)}, a value for each token "
                f"that is not reduced, got {shapes}"
            )
        return pair[0], pair[1]

    @torch.no_grad()
    def correct(self, log_ratio: Tensor, mask: Tensor, *, on_policy: bool) -> Tensor:
        """Factor of the weights that corrects for a sampler that is not the policy.

        Args:
            log_ratio: [B, T] log pi - log mu of the sampled tokens, pi the policy as it is, mu the sampler.
            mask: [B, T] True on the tokens that count.
            on_policy: Whether the policy's own log-probabilities are the old ones. If not, the surrogate's ratio
                pi / mu is itself the importance weight, and a correction only masks tokens.
        """
        if self.correction is None:
            return torch.ones_like(log_ratio)
        factor = self.correction(log_ratio, mask)
        return factor if on_policy else (factor != 0).to(factor.dtype)

    def gradient_by_logprobs(
        self, rows: Rollout, weights: Tensor, *, on_policy: bool
    ) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The gradient of the loss with respect to some log-probabilities, known from these alone; see ``__call__``.

        Returns:
            (log-probabilities [n], their numbers [n] in a flattened [B, T]) -> gradient [n]; None where the gradient
            depends on other tokens, too, or on the entropy.
        """
        functions = [self.surrogate] if self.correction is None else [self.surrogate, self.correction]
        if self.entropy_coef or not all(getattr(getattr(f, "func", f), "per_token", False) for f in functions):
            return None
        old, ref, advantages, mask, given = (
            values.flatten() for values in (rows.old_logprobs, rows.ref_logprobs, rows.advantages, rows.mask, weights)
        )

        def at(logprobs: Tensor, numbers: Tensor) -> Tensor:
            logprobs, counts = logprobs.detach(), mask[numbers].unsqueeze(0)  # [n], [1, n]
            factor = self.correct((logprobs - old[numbers]).unsqueeze(0), counts, on_policy=on_policy)
            of_tokens = given[numbers].unsqueeze(0) * factor
            with torch.enable_grad():
                free = logprobs.clone().requires_grad_()
                log_ratio = (free - (logprobs if on_policy else old[numbers])).unsqueeze(0)
                objective, _ = self._objective(log_ratio, advantages[numbers].unsqueeze(0), counts)
                loss = -(of_tokens * objective).sum()
                if self.kl_coef:
                    kl = self.kl(free.unsqueeze(0), ref[numbers].unsqueeze(0), log_ratio)
                    loss = loss + self.kl_coef * (of_tokens * kl).sum()
                gradient: Tensor = torch.autograd.grad(loss, free)[0]
            return gradient

        return at

    def has_gradient(self, rows: Rollout) -> Tensor:
        """Which rows can have a gradient, [B] (bool).

        The others (advantage zero, or no token that counts) need no forward pass; they still count in the weights.
        """
        has_tokens = rows.mask.any(-1)
        return has_tokens if self.kl_coef or self.entropy_coef else has_tokens & (rows.advantages != 0).any(-1)

    @torch.no_grad()
    def statistics(self, logprobs: Tensor, rows: Rollout) -> dict[str, Tensor]:
        """Sums over tokens for logging, in which every token counts alike whatever the weights; and "ratio_max"."""
        log_ratio = (logprobs - rows.old_logprobs) * rows.mask
        ratio = ratio_of(log_ratio)
        _, bounded = self._objective(log_ratio, rows.advantages, rows.mask)
        terms = {"tokens": torch.ones_like(ratio), "clip_fraction": bounded.float(), "ratio_mean": ratio}
        sums = {name: (term * rows.mask).sum() for name, term in terms.items()}
        return sums | {"ratio_max": (ratio * rows.mask).max()}

    @staticmethod
    def metrics(parts: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Metrics by name, from parts of the loss and sums over tokens that were added up over an optimizer step."""
        count = sums["tokens"].clamp(min=1)
        known = {name: value for name, value in sums.items() if name in _METRICS}
        logged = {_METRICS[name]: v if name.endswith("_max") else v / count for name, v in known.items()}
        return {f"loss/{name}": part for name, part in parts.items()} | logged
