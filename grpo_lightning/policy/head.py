"""From logits to the log-probability of the chosen token and the entropy."""

import torch
from torch import Tensor


def token_logprobs(
    logits: Tensor, ids: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log softmax(logits / temperature) at ``ids``, and the entropy of the whole distribution.

    Args:
        logits: [..., V] of any float dtype; the sums run in float32.
        ids: [...] token chosen.
        temperature: Divides the logits, > 0.
        entropy_gradient: Whether the entropy passes a gradient, which holds more tensors of the logits' size.

    Returns:
        Log-probabilities [...] and entropies [...], float32, in nats.
    """
    scaled = logits.float() / temperature
    normalizer = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - normalizer
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        expected = ((scaled - normalizer.unsqueeze(-1)).exp() * scaled).nan_to_num(0.0).sum(-1)
        entropy = normalizer - expected
    return logprobs, entropy


def truncate(logits: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Logits with the tokens that must not be drawn at -inf; the likeliest token always stays.

    The filters apply one after another: top_k, then top_p on what is left (arXiv:1904.09751), then min_p
    (arXiv:2407.01082), in the order of transformers' ``generate``.

    Args:
        logits: [B, V]
        top_k: Keep this many; 0 keeps all.
        top_p: Keep the smallest set of the likeliest tokens whose probabilities reach this; 1 keeps all.
        min_p: Keep tokens at least this likely, relative to the likeliest; 0 keeps all.

    Returns:
        [B, V]
    """
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        descending, order = logits.sort(descending=True, stable=True)
        probabilities = descending.softmax(-1)
        beyond = probabilities.cumsum(-1) - probabilities >= top_p
        beyond[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    if min_p > 0:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    return logits
