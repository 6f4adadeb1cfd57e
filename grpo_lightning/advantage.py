"""Group-relative advantages: rewards of one prompt's completions in, advantages out, [P, G] -> [P, G].

P prompts, G completions each; groups never influence one another. A reward that does not apply is NaN: it enters no
mean and no deviation, and its advantage is 0. A group whose rewards are all equal teaches nothing: its advantages are
exactly 0, decided by ``max == min``, because a deviation that should be 0 rarely is (six float32 rewards of 0.6 have
6.5e-8).
"""

import torch
from torch import Tensor


def standardized(rewards: Tensor, *, eps: float = 1e-4, correction: int = 1) -> Tensor:
    """GRPO: (r - mean) / (std + eps) within the group.

    arXiv:2402.03300, section 4.1.2. The paper leaves the divisor of the deviation open: ``correction=1`` is the sample
    deviation (G - 1), as in TRL and verl, ``correction=0`` the population one.

    Args:
        rewards: [P, G] with G >= 2; NaN where none applies.
        eps: Added to the deviation, in units of reward.
        correction: 0 or 1, subtracted from G in the divisor.

    Returns:
        [P, G] advantages; those of a group sum to zero.

    Raises:
        ValueError: G < 2, or another ``correction``.
    """
    if correction not in (0, 1):
        raise ValueError(f"advantage.correction={correction}: allowed are 0 (population) and 1 (sample)")
    distance = centered(rewards)
    freedom = (rewards.isnan().logical_not().sum(-1, keepdim=True) - correction).clamp(min=1)
    deviation = (distance.square().sum(-1, keepdim=True) / freedom).sqrt()
    return torch.where(deviation > 0, distance / (deviation + eps), 0.0)


def centered(rewards: Tensor) -> Tensor:
    """Dr. GRPO: r - mean of the group, which does not favour prompts of low variance.

    arXiv:2503.20783. Args, returns and errors as in ``standardized``.
    """
    if rewards.dim() != 2 or rewards.shape[-1] < 2:
        raise ValueError(f"a group needs at least 2 completions, got rewards {tuple(rewards.shape)}")
    applies = ~rewards.isnan()
    count = applies.sum(-1, keepdim=True).clamp(min=1)
    known = rewards.nan_to_num(0.0)
    mean = known.sum(-1, keepdim=True) / count
    highest = known.masked_fill(~applies, -torch.inf).amax(-1, keepdim=True)
    lowest = known.masked_fill(~applies, torch.inf).amin(-1, keepdim=True)
    return torch.where(applies & (highest > lowest), known - mean, 0.0)


def leave_one_out(rewards: Tensor) -> Tensor:
    """RLOO: r - mean of the group's others = n / (n - 1) * centered, with n rewards that apply.

    arXiv:2402.14740. Args, returns and errors as in ``standardized``.
    """
    count = rewards.isnan().logical_not().sum(-1, keepdim=True)
    return centered(rewards) * (count / (count - 1).clamp(min=1))
