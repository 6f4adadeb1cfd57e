"""Sums over a softmax, and its gradient, of as many logits as exist at a time.

Shapes: n tokens, V the size of the vocabulary.
"""

import torch
from torch import Tensor

from grpo_lightning.transformer import compiled

LEAST = -1e4
"""A log-probability below which exp gives 0; a finite stand-in for -inf."""


def dot(one: Tensor, other: Tensor) -> Tensor:
    """Sums of products over the last dimension, [..., V] and [..., V] -> [...], in their dtype under autocast, too."""
    kind = one.device.type
    if not torch.is_autocast_enabled(kind):
        sums: Tensor = torch.linalg.vecdot(one, other)
        return sums
    # Autocast would round both, and the sums, to 16 bits.
    with torch.autocast(kind, enabled=False):
        return dot(one, other)


def expected(logits: Tensor, log_total: Tensor) -> Tensor:
    """The mean [n] of the logits [n, V] under their own softmax."""
    logp = (logits - log_total).clamp_(min=LEAST)
    return dot(logp.exp(), logp) + log_total.squeeze(-1)


def log_sum(logits: Tensor) -> Tensor:
    """The log-sum-exp [n, 1] of logits [n, V]."""
    return (compiled.compiled(_logsumexp) if compiled.pays(logits) else _logsumexp)(logits)


def _logsumexp(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1, keepdim=True)


def softmax_gradient(logits: Tensor, log_total: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax less 1 for the chosen tokens, in ``dtype`` [n, V], by one kernel.

    Args:
        logits: [n, V]
        log_total: [n, 1] their log-sum-exp.
        chosen: [n, 1] the tokens.
        dtype: Of the result.
    """
    made: Tensor = compiled.compiled(_softmax_gradient)(logits, log_total, chosen, dtype)
    return made


def _softmax_gradient(logits: Tensor, log_total: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    places = torch.arange(logits.shape[-1], device=logits.device)
    return ((logits - log_total).exp() - (places == chosen).to(logits.dtype)).to(dtype)
