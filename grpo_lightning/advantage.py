"""Group-relative advantages: rewards of one prompt's completions in, advantages out.

P prompts, G completions each; groups never influence one another unless a function says so. A reward that does not
apply is NaN: it enters no mean and no deviation, and its advantage is 0. A group whose rewards are all equal teaches
nothing: its advantages are exactly 0, decided by ``max == min``, because a deviation that should be 0 rarely is (six
float32 rewards of 0.6 have 6.5e-8).

A function receives what its parameters name: ``rewards`` [P, G], the weighted totals; ``scores`` [K, P, G] and
``weights`` [K] of the K single rewards; or ``steps`` [P, G, T], the weighted scores at the token where each step ends,
NaN elsewhere. It returns [P, G], the same for all tokens of a completion, or [P, G, T].
"""

import torch
from torch import Tensor


def standardized(rewards: Tensor, *, eps: float = 1e-4, correction: int = 1) -> Tensor:
    """The advantage of GRPO: (r - mean) / (std + eps) within the group.

    arXiv:2402.03300, section 4.1.2. The paper leaves the divisor of the deviation open: ``correction=1`` is the sample
    deviation (G - 1), as in TRL and verl, ``correction=0`` the population one.

    Args:
        rewards: [P, G] with G >= 2; NaN where none applies.
        eps: What is added to the deviation, in units of reward.
        correction: What is subtracted from G in the divisor, 0 or 1.

    Returns:
        [P, G] advantages; those of a group sum to zero.

    Raises:
        ValueError: G < 2, or ``correction`` is neither 0 nor 1.
    """
    distance = centered(rewards)
    deviation = _deviation(distance, ~rewards.isnan(), correction)
    return torch.where(deviation > 0, distance / (deviation + eps), 0.0)


def none(rewards: Tensor) -> Tensor:
    """Zeros [P, G]: rewards are measured, and the advantage is what ``rollout.teacher_coef`` adds."""
    return torch.zeros_like(rewards)


def centered(rewards: Tensor) -> Tensor:
    """The advantage of Dr. GRPO: r - mean of the group, which does not favour prompts of low variance.

    arXiv:2503.20783. Arguments are those of ``standardized``.
    """
    _check_group(rewards, -1)
    applies = ~rewards.isnan()
    count = applies.sum(-1, keepdim=True).clamp(min=1)
    known = rewards.nan_to_num(0.0)
    mean = known.sum(-1, keepdim=True) / count
    highest = known.masked_fill(~applies, -torch.inf).amax(-1, keepdim=True)
    lowest = known.masked_fill(~applies, torch.inf).amin(-1, keepdim=True)
    return torch.where(applies & (highest > lowest), known - mean, 0.0)


def leave_one_out(rewards: Tensor) -> Tensor:
    """The advantage of RLOO: r - mean of the group's others = n / (n - 1) * centered, with n rewards that apply.

    arXiv:2402.14740. Arguments are those of ``standardized``.
    """
    count = rewards.isnan().logical_not().sum(-1, keepdim=True)
    return centered(rewards) * (count / (count - 1).clamp(min=1))


def batch_standardized(rewards: Tensor, *, eps: float = 1e-4, correction: int = 1) -> Tensor:
    """The centered reward over the whole rollout's deviation: (r - mean of the group) / (std of all rewards + eps).

    arXiv:2508.08221, section 4.1.3; TRL's ``scale_rewards="batch"``. The batch is all P * G rewards of the rollout,
    over all processes.
    """
    applies = ~rewards.isnan()
    mean = rewards.nanmean()
    distance = torch.where(applies, rewards - mean, 0.0).flatten()
    deviation = _deviation(distance, applies.flatten(), correction)
    centers = centered(rewards)
    return torch.where(centers != 0, centers / (deviation + eps), 0.0)


def batch_whitened(rewards: Tensor, *, eps: float = 1e-4, correction: int = 1) -> Tensor:
    """The advantage of REINFORCE++ with a baseline: d = r - mean of the group, divided by (std of all d + eps).

    arXiv:2501.03262. The deviation leaves out how prompts differ from one another; each of the rollout's P * G
    completions, over all processes, counts once in it, where some systems count each of its tokens.
    """
    distance = centered(rewards)
    deviation = _deviation(distance.flatten(), ~rewards.isnan().flatten(), correction)
    return torch.where(distance != 0, distance / (deviation + eps), 0.0)


def per_reward(scores: Tensor, weights: Tensor, *, eps: float = 1e-4, correction: int = 1) -> Tensor:
    """Every reward standardized in its group by itself, then weighted and summed.

    Rewards of different scales keep the influence that their weights give them, and combinations of equal sum stay
    distinct. ``scores`` [K, P, G] are before their ``weights`` [K]; the rest is as in ``standardized``.
    """
    # [K] -> [K, 1, 1], times [K, P, G]
    return (weights.view(-1, 1, 1) * standardized(scores, eps=eps, correction=correction)).sum(0)


def gdpo(scores: Tensor, weights: Tensor, *, eps: float = 1e-4, correction: int = 1) -> Tensor:
    """The advantage of GDPO: that of ``per_reward``, then (a - mean) / (std + eps) over all P * G completions.

    arXiv:2601.05242. The last step keeps the scale the same whatever the number of rewards.
    """
    summed = per_reward(scores, weights, eps=eps, correction=correction)  # whose mean is 0, as that of every group is
    applies = ~scores.isnan().all(0)
    deviation = _deviation(summed.flatten(), applies.flatten(), correction)
    return torch.where(summed != 0, summed / (deviation + eps), 0.0)


def process(steps: Tensor, *, eps: float = 1e-4, correction: int = 1) -> Tensor:
    """Process supervision: a token's advantage is the sum of the standardized scores of steps ending at or after it.

    arXiv:2402.03300, section 4.1.3: the scores of all steps of all the group's completions are standardized together.
    A reward of the whole completion is one step that ends at its last token.

    Args:
        steps: [P, G, T] score at the token where a step ends, NaN elsewhere.
        eps: What is added to the deviation, in units of the score.
        correction: What is subtracted in the divisor of the deviation from the number of scores, 0 or 1.

    Returns:
        [P, G, T] advantages; a group whose scores are all equal has 0.
    """
    _check_group(steps, 1)
    # [P, G, T] -> [P, G * T] -> [P, G * T + 1]
    flat = torch.nn.functional.pad(steps.flatten(1), (0, 1), value=torch.nan)
    normalized = standardized(flat, eps=eps, correction=correction)[:, :-1].view_as(steps)
    return normalized.flip(-1).cumsum(-1).flip(-1)  # the sum from each token to the last


def to_go(steps: Tensor) -> Tensor:
    """Reward-to-go: the scores at a token or behind it, less the mean of the sums of the group's others.

    The policy gradient theorem with scores at the ends of turns: what was scored before a token does not depend on it.
    The baseline does not depend on the completion either, so the expected gradient is that of the expected sum, also
    where the policy itself decides how many turns there are; `process` has another one there, since it standardizes
    the scores of all turns together.

    Args:
        steps: [P, G, T] score at the token where a turn or step ends, NaN elsewhere.

    Returns:
        [P, G, T] advantages; 0 in completions without any score, which enter no mean, and in groups of which fewer
        than two completions have one.
    """
    _check_group(steps, 1)
    applies = (~steps.isnan()).any(-1, keepdim=True)  # [P, G, 1]
    scores = steps.nan_to_num(0.0)
    sums = scores.sum(-1, keepdim=True)  # [P, G, T] -> [P, G, 1]
    others = applies.sum(1, keepdim=True) - 1
    baseline = (sums.sum(1, keepdim=True) - sums) / others.clamp(min=1)
    ahead = scores.flip(-1).cumsum(-1).flip(-1)
    return torch.where(applies & (others > 0), ahead - baseline, 0.0)


def _check_group(rewards: Tensor, dim: int) -> None:
    if rewards.dim() < 2 or rewards.shape[dim] < 2:
        raise ValueError(f"a group needs at least 2 completions, got rewards {tuple(rewards.shape)}")


def _deviation(distance: Tensor, applies: Tensor, correction: int) -> Tensor:
    """The root [..., 1] of the mean square of ``distance`` where it applies, with n - ``correction`` as the divisor."""
    if correction not in (0, 1):
        raise ValueError(f"advantage.correction={correction}: allowed are 0 (population) and 1 (sample)")
    freedom = (applies.sum(-1, keepdim=True) - correction).clamp(min=1)
    return (distance.square().sum(-1, keepdim=True) / freedom).sqrt()


def replace_nan(rewards: Tensor) -> Tensor:
    """[P, G] with every NaN replaced by the mean of its group's other rewards; 0 in a group of NaN."""
    return torch.where(rewards.isnan(), rewards.nanmean(-1, keepdim=True).nan_to_num(0.0), rewards)
