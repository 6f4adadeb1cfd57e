"""The sets of tokens that an engine draws from where sampling is truncated: what it is asked for, and what they were.

An engine does not tell the sets. They are made again from the policy's logits, by the engine's own filters in the
engine's order, so that they are the same but for a token whose probability lies on a bound.

Shapes: B rows of T completion tokens, n of these in a chunk; V the size of the vocabulary, K the most tokens of a set.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_lightning.sampler.native.token_sampling import MAX_SUPPORT, MIN_LOGIT, likeliest_tokens
from grpo_lightning.transformer.logprobs import Chunk
from grpo_lightning.types import Rollout, Sampled, Sampling, SamplingSupport


def options(sampling: Sampling) -> dict[str, Any]:
    """The filters of a request, as vLLM calls them; neutral ones where all tokens may be drawn.

    Args:
        sampling: How tokens are drawn. An engine bounds no set, so it is asked for at most `MAX_SUPPORT` tokens.
    """
    if not sampling.truncated or sampling.temperature == 0:
        return {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return {"top_p": sampling.top_p, "top_k": min(sampling.top_k or MAX_SUPPORT, MAX_SUPPORT), "min_p": sampling.min_p}


class EngineSupport(NamedTuple):
    """The sets of some tokens."""

    support: SamplingSupport
    """[n] or [B, T], each with the token that was drawn."""
    outside: Tensor
    """[n] or [B, T] (bool) whether that token would not have been in the set."""


def support_of_tokens(logits: Tensor, drawn: Tensor, sampling: Sampling) -> EngineSupport:
    """The sets that an engine with these logits draws from; a drawn token that is not in its set is added to it.

    vLLM's order: min_p first, then top_k of what is left, then top_p of what that leaves (``vllm/v1/sample/sampler.py``
    of version 0.32). The own sampler's is top_k, top_p, min_p, which differs where both top_p and min_p are used.

    Args:
        logits: [n, V] divided by the temperature; overwritten.
        drawn: [n] the tokens.
        sampling: How they were drawn, truncated.
    """
    asked, size = options(sampling), logits.shape[-1]
    shifted = logits.sub_(logits.amax(-1, keepdim=True)).clamp_(min=MIN_LOGIT)
    if asked["min_p"] > 0:
        shifted.masked_fill_(shifted.exp() < asked["min_p"], MIN_LOGIT)
    ids, _, inside = likeliest_tokens(shifted, None, top_k=asked["top_k"], top_p=asked["top_p"], min_p=0.0)
    drawn = drawn.unsqueeze(-1)  # [n] -> [n, 1]
    is_outside = ~((ids == drawn) & inside).any(-1, keepdim=True)
    # Room that is not needed gets the number behind the last token, and so comes last.
    tokens = torch.cat([ids.where(inside, size), drawn.where(is_outside, size)], -1).sort(-1).values  # [n, K + 1]
    is_token = tokens < size
    support = SamplingSupport(
        is_token.sum(-1, dtype=torch.int32), tokens[is_token].int()
    )  # [n, K + 1] -> [sum of sizes]
    return EngineSupport(support, is_outside.squeeze(-1))


def engine_support(rows: Sampled | Rollout, chunks: Iterable[Chunk], sampling: Sampling) -> EngineSupport:
    """The sets [B, T] of all completion tokens, and which tokens [B, T] were not in theirs; see `sets`.

    Args:
        rows: The completions.
        chunks: The logits of their tokens, in any order.
        sampling: How they were drawn, truncated.
    """
    length, count = rows.mask.shape[1], rows.mask.numel()
    device = rows.mask.device
    drawn = rows.ids[:, rows.ids.shape[1] - length :].flatten()  # [B, T] -> [B * T]
    numbers, parts = [torch.empty(0, dtype=torch.long, device=device)], [SamplingSupport.everything(drawn[:0])]
    outside = torch.zeros(count, dtype=torch.bool, device=device)
    for own, logits in chunks:
        found = support_of_tokens(logits, drawn[own], sampling)
        numbers.append(own)
        parts.append(found.support)
        outside[own] = found.outside
    known, support = torch.cat(numbers), SamplingSupport.concatenate(parts)
    sizes = support.sizes.new_zeros(count)
    sizes[known] = support.sizes
    ids = support.of(known.argsort()).ids  # row by row
    return EngineSupport(
        SamplingSupport(sizes.view_as(rows.mask), ids), outside.view_as(rows.mask)
    )  # [B * T] -> [B, T]
