"""A look at the first rollout for the errors that training hides: it would go on and merely learn less."""

import torch

from grpo_lightning.policy import Policy
from grpo_lightning.types import Rollout, Sampling


class SelfCheckError(RuntimeError):
    """Sampling, scoring and reference do not describe the same distribution."""


@torch.no_grad()
def check_rollout(
    policy: Policy,
    reference: Policy | None,
    rollout: Rollout,
    sampling: Sampling,
    microbatch_tokens: int,
    *,
    tolerance: float = 1e-3,
    coarse: bool = False,
    filtered: bool = False,
) -> None:
    """Check a rollout made with weights that were not updated since.

    Args:
        policy: As it sampled.
        reference: Of the KL term, or None.
        rollout: With the sampler's log-probabilities as the old ones.
        sampling: How it was drawn.
        microbatch_tokens: Most tokens in one forward pass.
        tolerance: Largest difference in nats; in 16-bit or 8-bit arithmetic the mean may be 0.05 instead.
        coarse: Whether what sampled computes in 16 bits, whatever the policy does.
        filtered: Whether the sets of truncated sampling are the policy's, not the sampler's. They differ where a
            probability lies on a bound: then the largest differences of one token in a hundred do not count.

    Raises:
        SelfCheckError: Scoring the same tokens twice differs (something random is left on, so that no ratio is 1);
            scoring differs from the sampler (then the ratio of the first update is not 1); or a reference that is a
            copy of the policy is not at distance 0.
    """
    rows = rollout[rollout.mask.any(-1).nonzero().flatten()]
    if not len(rows):
        return  # every completion was cut at the limit, and rollout.mask_truncated leaves those out
    rows = rows[policy.microbatches(rows, microbatch_tokens)[0]]
    rounded = (torch.bfloat16, torch.float16, torch.int8)
    half = (
        coarse
        or any(p.dtype in rounded for p in policy.parameters())
        or torch.is_autocast_enabled(rows.ids.device.type)
    )
    allowed = 0.05 if half else tolerance
    gap_of = _mean_gap if half else _gap
    drawn_gap_of = _most_gaps if filtered and rows.support is not None and not half else gap_of
    first = policy.logprobs(rows, temperature=sampling.temperature)
    again = policy.logprobs(rows, temperature=sampling.temperature)
    if not torch.equal(first, again):
        raise SelfCheckError(
            f"scoring the same completions twice differs by up to {_gap(first, again, rows.mask):.2g} nats, so the "
            "ratio to the old policy is never 1: dropout or another random layer is still on in the policy"
        )
    if (gap := drawn_gap_of(first, rows.old_logprobs, rows.mask)) > allowed:
        alone = rows[torch.arange(1, device=rows.mask.device)]
        moved = gap_of(policy.logprobs(alone, temperature=sampling.temperature), first[:1], alone.mask)
        cause = (
            f"the log-probabilities of a completion change by {moved:.2g} with the rows beside it: the model does not "
            "respect attention_mask or position_ids (padding)"
            if moved > allowed
            else "the model scores a token otherwise in one pass than step by step with its cache, or another "
            "temperature was sampled than is scored"
        )
        raise SelfCheckError(
            f"recomputed log-probabilities differ from the sampler's by up to {gap:.2g} nats "
            f"(allowed: {allowed}): {cause}"
        )
    if reference is not None and reference.idle_device is None and _same_weights(policy, reference):
        whole = rows.without_support
        own = first if rows.support is None else policy.logprobs(whole, temperature=sampling.temperature)
        theirs = reference.logprobs(whole, temperature=sampling.temperature)
        if (gap := gap_of(own, theirs, rows.mask)) > allowed:
            raise SelfCheckError(
                f"the reference is a copy of the policy, yet their log-probabilities differ by up to {gap:.2g} nats: "
                "the KL term would pull to a wrong place (another dtype or attention implementation?)"
            )


def _gap(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> float:
    """The largest difference of a token inside the mask."""
    return float((one - other).abs()[mask].max())


def _most_gaps(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> float:
    """The largest difference without those of one token in a hundred, or of one in all, the largest."""
    gaps = (one - other).abs()[mask].sort().values
    return float(gaps[: len(gaps) - max(1, len(gaps) // 100)].max()) if len(gaps) > 1 else 0.0


def _mean_gap(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> float:
    """The mean difference: in 16 bits single tokens are off by a rounding of large logits."""
    return float((one - other).abs()[mask].mean())


def _same_weights(policy: Policy, reference: Policy) -> bool:
    own, theirs = dict(policy.named_parameters()), dict(reference.named_parameters())
    return own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)
