"""Per-token estimates of KL(policy || reference) from the policy's own samples."""

from torch import Tensor

from grpo_lightning.loss.surrogate import MAX_LOG_RATIO, ratio_of


def k1(logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """Schulman's k1 = log pi - log pi_ref: unbiased as a value, can be negative.

    joschu.net/blog/kl-approx.html. As a loss term on the policy's own samples its expected gradient is zero: it belongs
    in the reward (``rollout.kl_penalty``).

    Args:
        logprobs: [B, T] log-probabilities of the sampled tokens under the policy.
        ref_logprobs: [B, T] their log-probabilities under the reference.
        log_ratio: [B, T] their log-probabilities under the policy less those under the policy that sampled; only
            ``k3_weighted`` needs it.

    Returns:
        The estimates [B, T] in nats; zero where the two agree.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """Schulman's k2 = (log pi - log pi_ref)^2 / 2: biased as a value; on-policy its gradient is that of KL(pi || ref).

    joschu.net/blog/kl-approx.html. Args and returns are those of ``k1``; never negative.
    """
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """Schulman's k3 = pi_ref / pi - log(pi_ref / pi) - 1: unbiased as a value, never negative, low variance.

    arXiv:2402.03300, Eq. 4; joschu.net/blog/kl-approx.html. On-policy its expected gradient is that of KL(ref || pi).
    Args and returns are those of ``k1``.
    """
    distance = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return distance.exp() - distance - 1


def k3_weighted(logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor) -> Tensor:
    """The estimate (pi / pi_old) k3, whose ratio has its gradient: unbiased off-policy, too.

    DeepSeek-V3.2, arXiv:2512.02556, Eq. 7. Its expected gradient is that of KL(pi || ref); on-policy its value is that
    of ``k3``. Args and returns are those of ``k1``.
    """
    return ratio_of(log_ratio) * k3(logprobs, ref_logprobs)
