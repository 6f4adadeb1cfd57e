"""A loss of your own: a surrogate that punishes large steps smoothly instead of clipping them.

python train.py --config-dir examples/conf loss=quadratic loss.surrogate.beta=0.5 module.minibatch_size=64

``conf/loss/quadratic.yaml`` beside this file names the function; KL estimator and token weights are chosen there, too.
"""

import torch
from torch import Tensor

from grpo_lightning.loss import per_token, ratio_of


@per_token  # what it makes of a token depends on this token alone: less work in the LM head
def quadratic(log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, beta: float) -> tuple[Tensor, Tensor]:
    """The objective of each token  r A - beta / 2 log(r)^2,  PPO's penalty (arXiv:1707.06347, section 4) with k2.

    Args:
        log_ratio: [B, T] log pi - log pi_old of the sampled tokens; r is its exponential.
        advantages: [B, T]
        mask: [B, T] True on the tokens that count.
        beta: Weight of the penalty.

    Returns:
        The objective [B, T], to be maximized, and where a bound is active [B, T]: nowhere.
    """
    return ratio_of(log_ratio) * advantages - beta / 2 * log_ratio.square(), torch.zeros_like(mask)
