"""How much each token counts: the mask of a whole optimizer step -> weights [B, T], whose sum scales the loss.

``mask`` [B, T] has all rows of the step, whatever process they fall to.
"""

from torch import Tensor


def completion_mean(mask: Tensor) -> Tensor:
    """Completions count equally, tokens equally within one: GRPO's 1/B sum 1/|o_i| (arXiv:2402.03300, Eq. 3).

    Args:
        mask: [B, T] True on the tokens that count, of all completions in one optimizer step.

    Returns:
        The weights [B, T], 1 / (B * tokens of the row); 0 where masked.
    """
    return mask / (mask.sum(-1, keepdim=True).clamp(min=1) * len(mask))


def token_mean(mask: Tensor) -> Tensor:
    """Every token of the optimizer step counts equally: DAPO's remedy for long answers.

    arXiv:2503.14476, Eq. 8. Args and returns are those of ``completion_mean``; each weight is 1 / tokens of the step.
    """
    return mask / mask.sum().clamp(min=1)


def constant(mask: Tensor, *, length: int) -> Tensor:
    """Every token has the weight 1 / (B * length) whatever its neighbours: Dr. GRPO (arXiv:2503.20783).

    Args and returns are those of ``completion_mean``; ``length`` is a constant number of tokens, usually the limit.
    """
    return mask / (length * len(mask))


def completion_sum(mask: Tensor) -> Tensor:
    """A completion counts by its length: its tokens are summed, 1 / B each.

    RLOO (arXiv:2402.14740), where the whole completion is one action; LUSPO, which weighs a completion's mean by its
    length. Args and returns are those of ``completion_mean``.
    """
    return mask / len(mask)
