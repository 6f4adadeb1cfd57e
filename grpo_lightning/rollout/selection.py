"""Which groups, which of a group's completions, and which of their tokens are trained on."""

import torch
from torch import Tensor

from grpo_lightning.advantage import replace_nan


def mixed(outcomes: Tensor) -> Tensor:
    """Groups whose outcomes differ: in the others every advantage is zero.

    The filter of DAPO's dynamic sampling, arXiv:2503.14476, section 3.2. It sees the outcome reward as its function
    gave it, never the clipped total: a length bonus would make every group look as if it taught something.

    Args:
        outcomes: [P, G] NaN where the outcome reward does not apply.

    Returns:
        [P] (bool) whether to train on the group.
    """
    highest = outcomes.nan_to_num(-torch.inf).amax(-1)
    lowest = outcomes.nan_to_num(torch.inf).amin(-1)
    return highest > lowest


def max_variance(rewards: Tensor, *, size: int) -> Tensor:
    """The ``size`` completions of each group whose rewards vary most: some of the highest and some of the lowest.

    Max-variance down-sampling of PODS, arXiv:2504.13818, Algorithm 2: of all splits into highest and lowest the best.

    Args:
        rewards: [P, G]; NaN counts as the group's mean.
        size: How many are kept, from 2 to G.

    Returns:
        [P, size] indices into each group, increasing.

    Raises:
        ValueError: ``size`` is out of range.
    """
    group_size = rewards.shape[-1]
    if not 2 <= size <= group_size:
        raise ValueError(f"rollout.downsample.size={size}: allowed is 2 to the group's size, {group_size}")
    known = replace_nan(rewards)
    order = known.sort(dim=-1, stable=True).indices
    splits = torch.stack(
        [torch.cat([order[:, :low], order[:, group_size - (size - low) :]], -1) for low in range(1, size)]
    )  # [size - 1, P, size]: each has the lowest and the highest
    variances = known.expand(len(splits), -1, -1).gather(-1, splits).var(-1, correction=0)
    chosen: Tensor = splits[variances.argmax(0), torch.arange(len(rewards))]
    return chosen.sort(-1).values


def top_entropy(entropy: Tensor, mask: Tensor, *, fraction: float) -> Tensor:
    """The tokens of highest entropy, where a completion could have gone another way.

    arXiv:2506.01939, section 5: with the top 20 % alone training is as good or better.

    Args:
        entropy: [B, T] in nats.
        mask: [B, T] True on the tokens that count.
        fraction: Of the tokens that count in the rollout, in (0, 1].

    Returns:
        [B, T] (bool) False where masked.
    """
    values = entropy[mask]
    if not len(values):
        return mask
    least = values.topk(max(1, round(fraction * len(values)))).values[-1]
    return mask & (entropy >= least)
