"""Attention to a shared prompt and to a completion's own tokens, by the CPU's flash kernels, with its gradient.

Queries of a completion see two blocks of keys, its prompt's and its own. With o, l the output and the log-sum-exp of
each block, l = log(e^l1 + e^l2) and o = e^(l1 - l) o1 + e^(l2 - l) o2. The kernel's backward pass for one block uses o
and l only through e^(attention score - l) and the dot product of o with its gradient, so it is called with the joined
values.

Sources: Hydragen, arXiv:2402.05099, for splitting attention at the end of a shared prompt; the blocks are joined by
their log-sum-exp as in FlashAttention-2, arXiv:2307.08691, whose backward pass needs only the joined values.

Shapes: N tokens in a stream, n segments of at most L tokens side by side; Hq query heads, Hkv key heads, D the size of
a head. Inside, everything has its token first, [N, Hq, D], and the log-sum-exps are [N, Hq].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spans: Sequence[tuple[int, int, int]],
    segments: Sequence[tuple[Tensor, Tensor]],
    scale: float,
) -> Tensor:
    """The attention output [1, N, Hq, D] of a stream of groups.

    Args:
        query: [1, Hq, N, D]
        key: [1, Hkv, N, D]
        value: [1, Hkv, N, D]
        spans: For every group the start of its prompt, of its first completion, and its end.
        segments: Pairs of places [n, L] of prompts and completions, and which of them are real [n, L].
        scale: What the attention scores are multiplied by.
    """
    output: Tensor = _Cascade.apply(query, key, value, spans, segments, scale)
    return output


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: Sequence[tuple[int, int, int]],
        segments: Sequence[tuple[Tensor, Tensor]],
        scale: float,
    ) -> Tensor:
        q, k, v = _by_token(query, key, value)
        # [N, Hq, D] and [N, Hq]; the kernel gives log-sum-exps in float32 whatever the inputs are.
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for places, real in segments:
            to_itself, sums = _flash(*(_side_by_side(t, places) for t in (q, k, v)), causal=True, scale=scale)
            out[places[real]], lse[places[real]] = to_itself[real], sums[real]
        # One call per group with the queries of all its completions, which read the prompt's keys once.
        for start, middle, end in spans:
            if middle == end:
                continue
            prompt, completions = slice(start, middle), slice(middle, end)
            to_prompt, sums = _flash(q[None, completions], k[None, prompt], v[None, prompt], causal=False, scale=scale)
            joined = torch.logaddexp(sums[0], lse[completions])
            fractions = (sums[0] - joined).exp(), (lse[completions] - joined).exp()
            # [N, Hq] -> [N, Hq, 1]
            of_prompt, of_own = (fraction.unsqueeze(-1).to(out.dtype) for fraction in fractions)
            out[completions].mul_(of_own).addcmul_(to_prompt[0], of_prompt)
            lse[completions] = joined
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.spans, ctx.segments, ctx.scale = spans, segments, scale
        return out[None]  # [N, Hq, D] -> [1, N, Hq, D]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        q, k, v = _by_token(query, key, value)
        dout = gradient[0]
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start, middle, end in ctx.spans:
            if middle == end:
                continue
            prompt, completions = slice(start, middle), slice(middle, end)
            tensors = [dout[completions], q[completions], k[prompt], v[prompt], out[completions], lse[completions]]
            parts = _flash_backward(*(t[None] for t in tensors), causal=False, scale=ctx.scale)
            dq[completions], dk[prompt], dv[prompt] = (part[0] for part in parts)
        for places, real in ctx.segments:
            tensors = [_side_by_side(t, places) for t in (dout, q, k, v, out)]
            # Padding repeats the stream's first token: with an infinite sum it has no weights, and so no gradient.
            sums = _side_by_side(lse, places).masked_fill(~real.unsqueeze(-1), torch.inf)
            tensors[0] *= real[..., None, None]  # [n, L, Hq, D] * [n, L, 1, 1]
            parts = _flash_backward(*(*tensors, sums), causal=True, scale=ctx.scale)
            # Added, since the loop above has left there what prompts and completions owe each other.
            for whole, part in zip((dq, dk, dv), parts, strict=True):
                whole.index_add_(0, places[real], part[real])
        heads = key.shape[1]
        return (
            dq.transpose(0, 1)[None],  # [N, Hq, D] -> [1, Hq, N, D]
            # [N, Hq, D] -> [N, Hkv, Hq / Hkv, D] -> [N, Hkv, D] -> [1, Hkv, N, D]
            *(part.unflatten(1, (heads, -1)).sum(2).transpose(0, 1)[None] for part in (dk, dv)),
            None,
            None,
            None,
        )


def _by_token(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries, keys and values with the token first, keys and values repeated for the query heads that read them."""
    repeats = query.shape[1] // key.shape[1]
    if key.shape != value.shape or query.shape[1] != repeats * key.shape[1]:  # which the kernels do not compare
        raise ValueError(f"attention of {list(query.shape)} to keys {list(key.shape)} and values {list(value.shape)}")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [1, H, N, D] -> [N, H, D]
    # [N, Hkv, D] -> [N, Hq, D]
    return [q, *(t.repeat_interleave(repeats, 1) if repeats > 1 else t for t in (k, v))]


def _side_by_side(values: Tensor, places: Tensor) -> Tensor:
    """What lies at [n, L] places: [N, ...] -> [n, L, ...]."""
    # [N, ...] -> [n * L, ...] -> [n, L, ...]
    return values.index_select(0, places.flatten()).view(*places.shape, *values.shape[1:])


def _flash(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The output [n, L, Hq, D] and log-sum-exp [n, L, Hq] of attention, all with as many heads."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # [n, L, Hq, D] -> [n, Hq, L, D]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)  # [n, Hq, L, D] -> [n, L, Hq, D], [n, Hq, L] -> [n, L, Hq]


def _flash_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> list[Tensor]:
    """The gradients of query, key and value, [n, L, Hq, D]."""
    # [n, L, Hq, D] -> [n, Hq, L, D], and of the log-sum-exp [n, L, Hq] -> [n, Hq, L]
    tensors = [t.transpose(1, 2) for t in (dout, query, key, value, out, lse)]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return [t.transpose(1, 2) for t in backward(*tensors, 0.0, causal, scale=scale)]  # [n, Hq, L, D] -> [n, L, Hq, D]
