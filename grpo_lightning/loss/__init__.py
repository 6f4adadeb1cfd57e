"""The policy loss as independent choices: a surrogate, a KL estimator, token weights, and a correction of these.

    loss = sum over (b, t) of  weights * correction * (kl_coef * kl - objective - entropy_coef * entropy)

A published variant is one combination, spelled out in conf/loss/*.yaml; nothing here branches on its name. Weights are
computed once for a whole optimizer step, over all ranks, and sliced into micro-batches, so accumulated gradients equal
the undivided ones by construction.

Shapes: B completions, T completion tokens. Log-probabilities and entropies are in nats, float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.loss.kl import k1, k2, k3, k3_weighted
from grpo_lightning.loss.surrogate import cispo, clipped, gmpo, gspo, ratio_of, reinforce, response_clipped, sapo
from grpo_lightning.loss.weights import completion_mean, completion_sum, constant, token_mean
from grpo_lightning.types import Rollout

__all__ = [
    "PolicyLoss",
    "cispo",
    "clipped",
    "completion_mean",
    "completion_sum",
    "constant",
    "gmpo",
    "gspo",
    "k1",
    "k2",
    "k3",
    "k3_weighted",
    "reinforce",
    "response_clipped",
    "sapo",
    "token_mean",
]

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
    """For a sampler that is not the policy, see `grpo_lightning.loss.correction`; None where it is."""

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

        Raises:
            ValueError: There is an entropy bonus and no entropy.
        """
        log_ratio = logprobs - rows.old_logprobs
        objective, _ = self.surrogate(log_ratio, rows.advantages, rows.mask)
        parts = {"policy": -(weights * objective).sum()}
        if self.kl_coef:
            parts["kl"] = self.kl_coef * (weights * self.kl(logprobs, rows.ref_logprobs, log_ratio)).sum()
        if self.entropy_coef:
            if entropy is None:
                raise ValueError(f"entropy: expected [B, T] with loss.entropy_coef={self.entropy_coef}, got None")
            parts["entropy"] = -self.entropy_coef * (weights * entropy).sum()
        loss = torch.stack(list(parts.values())).sum()
        return loss, {name: part.detach() for name, part in (parts | {"total": loss}).items()}

    @torch.no_grad()
    def correct(self, log_ratio: Tensor, mask: Tensor, *, on_policy: bool) -> Tensor:
        """Factor of the weights that corrects for a sampler that is not the policy.

        Args:
            log_ratio: [B, T] log pi - log mu of the sampled tokens, pi the policy as it is, mu the sampler.
            mask: [B, T] True on the tokens that count.
            on_policy: Whether the policy's log-probabilities take the place of the sampler's as the old ones. If not,
                the surrogate's ratio pi / mu has the correction in itself, and only what a mask leaves out counts.

        Returns:
            [B, T], 1 without a correction.
        """
        if self.correction is None:
            return torch.ones_like(log_ratio)
        factor = self.correction(log_ratio, mask)
        return factor if on_policy else (factor != 0).to(factor.dtype)

    def gradient(self, rows: Rollout, weights: Tensor, *, on_policy: bool) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The gradient of the loss with respect to some log-probabilities, known from these alone.

        Args:
            rows: As in ``__call__``.
            weights: [B, T] the rows' part of ``self.weights(mask)``.
            on_policy: Whether the log-probabilities take the place of the old ones.

        Returns:
            (log-probabilities [n], their numbers [n] in a flattened [B, T]) -> gradient [n]; None where the gradient
            depends on other tokens, too, or on the entropy.
        """
        if self.entropy_coef or not _is_per_token(self.surrogate):
            return None
        if self.correction is not None and not _is_per_token(self.correction):
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
                objective, _ = self.surrogate(log_ratio, advantages[numbers].unsqueeze(0), counts)
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
        """Sums over tokens for logging, in which every token counts alike whatever the weights.

        Returns:
            The scalars "tokens", "clip_fraction" and "ratio_mean", sums that become means when divided by "tokens";
            and "ratio_max", a maximum.
        """
        log_ratio = (logprobs - rows.old_logprobs) * rows.mask
        ratio = ratio_of(log_ratio)
        _, bounded = self.surrogate(log_ratio, rows.advantages, rows.mask)
        terms = {"tokens": torch.ones_like(ratio), "clip_fraction": bounded.float(), "ratio_mean": ratio}
        sums = {name: (term * rows.mask).sum() for name, term in terms.items()}
        return sums | {"ratio_max": (ratio * rows.mask).max()}

    @staticmethod
    def metrics(parts: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Metrics of an optimizer step by name.

        Args:
            parts: Those of ``__call__``, added up over the step.
            sums: Those of ``statistics`` and `grpo_lightning.loss.correction`, added up over the step; of ``*_max`` the
                largest.
        """
        count = sums["tokens"].clamp(min=1)
        known = {name: value for name, value in sums.items() if name in _METRICS}
        logged = {_METRICS[name]: v if name.endswith("_max") else v / count for name, v in known.items()}
        return {f"loss/{name}": part for name, part in parts.items()} | logged


def _is_per_token(function: Surrogate | Correction) -> bool:
    """Whether what a function makes of a token depends on this token alone."""
    return getattr(getattr(function, "func", function), "per_token", False)
