"""Attention over a group that shares its prompt: the prompt is computed once and every completion continues it.

A stream is [prompt | completion 1 | ... | completion G | next prompt | ...], one row without padding. A prompt attends
to itself; a completion attends to its prompt and to itself, as if the two stood alone, so nothing but the amount of
work differs from G separate rows: P + sum(R) tokens instead of G (P + max R).

The stream enters through transformers' attention interface. A model built with ``grouped(name)`` as its
``attn_implementation`` behaves as with ``name``, unless its forward pass is given ``grouped=`` one of the objects that
know how to attend, here `Stream`.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_PREFIX = "grouped_"
_UNUSED_MASK = torch.zeros(1, 1, 1, 1)
"""A mask of four dimensions is handed through by transformers as it is, and none is built."""


class Attention(Protocol):
    """What takes the place of a layer's attention."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention output of a layer.

        Args:
            layer: Its number.
            query: [B, Hq, N, D] with rotary positions applied.
            key: [B, Hkv, N, D] likewise; query head h reads key head h * Hkv // Hq.
            value: [B, Hkv, N, D]
            scale: Multiplies the scores.

        Returns:
            [B, N, Hq, D]
        """
        ...


def grouped(name: str) -> str:
    """The name of an attention implementation that knows `Attention` objects and else does what ``name`` does.

    ``name`` itself where transformers does not let it be replaced, as with eager.
    """
    if name.startswith(_PREFIX) or name not in ALL_ATTENTION_FUNCTIONS or name not in ALL_MASK_ATTENTION_FUNCTIONS:
        return name

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        grouped: Attention | None = kwargs.pop("grouped", None)
        if grouped is not None:
            scale = kwargs.get("scaling")
            return grouped.attend(
                module.layer_idx, query, key, value, query.shape[-1] ** -0.5 if scale is None else scale
            ), None
        plain: Any = ALL_ATTENTION_FUNCTIONS[name]
        found: tuple[Tensor, Any] = plain(module, query, key, value, mask, *args, **kwargs)
        return found

    AttentionInterface.register(_PREFIX + name, attention)
    AttentionMaskInterface.register(_PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return _PREFIX + name


def forward(decoder: Any, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
    """Hidden states [B, N, H] of a transformers decoder whose attention is ``attention``.

    Args:
        decoder: Without its head.
        ids: [B, N]
        positions: [B, N] of every token in its own row, prompt included.
        attention: Must fit B and N.
    """
    hidden: Tensor = decoder(
        input_ids=ids,
        position_ids=positions,
        attention_mask=_UNUSED_MASK.to(ids.device),
        use_cache=False,
        grouped=attention,
    ).last_hidden_state
    return hidden


@dataclass(frozen=True)
class Stream:
    """Where the parts of a stream lie. N tokens in all, R completions.

    Sources: Hydragen, arXiv:2402.05099, for splitting attention at the end of a shared prompt; the blocks are joined
    by their log-sum-exp as in FlashAttention-2, arXiv:2307.08691, whose backward pass needs only the joined values.
    """

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    """Of every group the prompt's length (at least 1) and those of its completions (0 is allowed)."""
    device: torch.device

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """Of every group: start of its prompt, of its first completion, and its end."""
        ends = list(accumulate(prompt + sum(completions) for prompt, completions in self.groups))
        return [
            (start, start + prompt, end) for start, end, (prompt, _) in zip([0, *ends], ends, self.groups, strict=False)
        ]

    @cached_property
    def positions(self) -> Tensor:
        """[1, N] of every token in its own row."""
        parts = [
            torch.arange(first, first + length)
            for prompt, completions in self.groups
            for first, length in ((0, prompt), *((prompt, length) for length in completions))
        ]
        return torch.cat(parts)[None].to(self.device)

    @cached_property
    def predictors(self) -> list[Tensor]:
        """Of every completion of length n: the n + 1 places whose hidden states predict its tokens and the next one."""
        found = []
        for (_, prompt_end, _), (_, completions) in zip(self.spans, self.groups, strict=True):
            start = prompt_end
            for length in completions:
                found.append(torch.cat([torch.tensor([prompt_end - 1]), torch.arange(start, start + length)]))
                start += length
        return found

    @cached_property
    def segments(self) -> list[tuple[Tensor, Tensor]]:
        """Prompts and completions of similar length side by side, for causal attention of each to itself.

        Returns:
            Pairs of places [n, L] in the stream, 0 where padded, and which are real [n, L].
        """
        bounds = []
        for (start, prompt_end, _), (_, completions) in zip(self.spans, self.groups, strict=True):
            bounds.append((start, prompt_end - start))
            for length in completions:
                bounds.append((prompt_end, length))
                prompt_end += length
        batches: list[list[tuple[int, int]]] = []
        for start, length in sorted(bounds, key=lambda bound: -bound[1]):
            if not length:
                continue
            if batches and length >= _LEAST_FILL * batches[-1][0][1]:
                batches[-1].append((start, length))
            else:
                batches.append([(start, length)])
        found = []
        for batch in batches:
            starts, lengths = torch.tensor(batch).unsqueeze(-1).unbind(1)
            steps = torch.arange(batch[0][1])
            real = steps < lengths
            found.append(((starts + steps).where(real, 0).to(self.device), real.to(self.device)))
        return found

    @cached_property
    def block_mask(self) -> Any:
        """For FlexAttention."""
        group = torch.cat([torch.full((end - start,), i) for i, (start, _, end) in enumerate(self.spans)])
        row, number = [], 0
        for prompt, completions in self.groups:
            row.append(torch.full((prompt,), -1))
            for length in completions:
                row.append(torch.full((length,), number))
                number += 1
        groups, rows = group.to(self.device), torch.cat(row).to(self.device)

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = (rows[key] == -1) | (rows[key] == rows[query])
            return (groups[key] == groups[query]) & own & (key <= query)

        size = len(groups)
        return create_block_mask(visible, None, None, size, size, device=str(self.device))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)  # autocast leaves rotated ones in float32
        if self.device.type == "cpu":
            found: Tensor = _Cascade.apply(query, key, value, self, scale)
            return found
        return self.flex(query, key, value, scale)

    def flex(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """As ``attend``, by FlexAttention."""
        attention = _compiled_flex() if self.device.type == "cuda" else flex_attention
        gqa = query.shape[1] != key.shape[1]
        found: Any = attention(query, key, value, block_mask=self.block_mask, scale=scale, enable_gqa=gqa)
        out: Tensor = found.transpose(1, 2)
        return out


_LEAST_FILL = 0.7
"""Segments at least this long, relative to the longest, are attended to in one call: padding against calls."""


def _compiled_flex() -> Any:
    if not _FLEX:
        _FLEX.append(torch.compile(flex_attention, dynamic=True))
    return _FLEX[0]


_FLEX: list[Any] = []


class _Cascade(torch.autograd.Function):
    """Attention of a `Stream` by the CPU's flash kernels.

    Queries of a completion see two blocks of keys, its prompt's and its own. With o, l the output and the log-sum-exp
    of each block, l = log(e^l1 + e^l2) and o = e^(l1 - l) o1 + e^(l2 - l) o2. The kernel's backward pass for one block
    uses o and l only through e^(score - l) and the dot product of o with its gradient, so it is called with the joined
    values. Everything in here is [N, H, D], the sums [N, H].
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, stream: Stream, scale: float) -> Tensor:
        q, k, v = _by_token(query, key, value)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for places, real in stream.segments:
            one, sums = _flash(*(_side_by_side(t, places) for t in (q, k, v)), causal=True, scale=scale)
            out[places[real]], lse[places[real]] = one[real], sums[real]
        for start, middle, end in stream.spans:
            if middle == end:
                continue
            mine, theirs = slice(middle, end), slice(start, middle)
            one, sums = _flash(q[None, mine], k[None, theirs], v[None, theirs], causal=False, scale=scale)
            joined = torch.logaddexp(sums[0], lse[mine])
            shares = (sums[0] - joined).exp(), (lse[mine] - joined).exp()
            found, own = (share.unsqueeze(-1).to(out.dtype) for share in shares)
            out[mine].mul_(own).addcmul_(one[0], found)
            lse[mine] = joined
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.stream, ctx.scale = stream, scale
        return out[None]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        stream: Stream = ctx.stream
        q, k, v = _by_token(query, key, value)
        slopes = gradient[0]
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start, middle, end in stream.spans:
            if middle == end:
                continue
            mine, theirs = slice(middle, end), slice(start, middle)
            tensors = [slopes[mine], q[mine], k[theirs], v[theirs], out[mine], lse[mine]]
            parts = _flash_backward(*(t[None] for t in tensors), causal=False, scale=ctx.scale)
            dq[mine], dk[theirs], dv[theirs] = (part[0] for part in parts)
        for places, real in stream.segments:
            tensors = [_side_by_side(t, places) for t in (slopes, q, k, v, out)]
            sums = _side_by_side(lse, places).masked_fill(~real.unsqueeze(-1), torch.inf)  # padding has no weights
            tensors[0] *= real[..., None, None]
            parts = _flash_backward(*(*tensors, sums), causal=True, scale=ctx.scale)
            for whole, part in zip((dq, dk, dv), parts, strict=True):
                whole.index_add_(0, places[real], part[real])
        heads = key.shape[1]
        return (
            dq.transpose(0, 1)[None],
            *(part.unflatten(1, (heads, -1)).sum(2).transpose(0, 1)[None] for part in (dk, dv)),
            None,
            None,
        )


def _by_token(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """[1, H, N, D] -> [N, Hq, D], keys and values repeated for the query heads that share them."""
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return [q, *(t.repeat_interleave(repeats, 1) if repeats > 1 else t for t in (k, v))]


def _side_by_side(values: Tensor, places: Tensor) -> Tensor:
    """What lies at [n, L] places: [N, ...] -> [n, L, ...]."""
    return values.index_select(0, places.flatten()).view(*places.shape, *values.shape[1:])


def _flash(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """[n, L, H, D] -> output [n, L, H, D] and log-sum-exp [n, L, H]."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _flash_backward(
    slopes: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> list[Tensor]:
    """Gradients of query, key and value, [n, L, H, D]."""
    tensors = [t.transpose(1, 2) for t in (slopes, query, key, value, out, lse)]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return [t.transpose(1, 2) for t in backward(*tensors, 0.0, causal, scale=scale)]
