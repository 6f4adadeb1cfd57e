"""Attention over a group that shares its prompt: the prompt is computed once and every completion continues it.

A stream is [prompt | completion 1 | ... | completion G | next prompt | ...], one row without padding. A prompt attends
to itself; a completion attends to its prompt and to itself, as if the two stood alone, so nothing but the amount of
work differs from G separate rows: S + sum(T) tokens instead of G (S + max T). On a CPU, tokens with which all prompts
begin, such as a system prompt, may stand before the first prompt, once.

The stream enters through transformers' attention interface. A model with ``register_grouped(name)`` as its
``attn_implementation`` behaves as with ``name``, unless its forward pass is given ``grouped=`` an `Attention`, here a
`Stream`. On a GPU FlexAttention computes it, with a block mask made from the groups and not from N * N pairs of tokens;
on a CPU, where FlexAttention has no backward pass, the flash kernels of scaled dot product attention do.

Shapes: B rows, G completions per prompt, S tokens of a prompt, T of a completion, N of a stream; n segments of at most
L tokens side by side; Hq query heads, Hkv key heads, D the size of a head, H that of a hidden state; b = N / `BLOCK`
blocks, s spans (prompts and completions).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_lightning.transformer.lm_head import compile_function

BLOCK = 128
"""Queries, and keys, of a block: FlexAttention's own default."""
_PREFIX = "grouped_"
Groups = Sequence[tuple[int, tuple[int, ...]]]
"""For every group the length of its prompt (at least 1) and the lengths of its completions (0 is allowed)."""
MIN_SAVED = 1e10
"""Floating-point operations of a forward pass that a shared prefix has to save: its attention takes more calls."""
_MIN_FILL = 0.7
"""Segments at least this long, relative to the longest, are attended to in one call: padding against calls."""


class Attention(Protocol):
    """Replacement for the attention of every layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The attention output of a layer.

        Args:
            layer: The layer's number, from 0.
            query: [B, Hq, N, D] with rotary positions applied.
            key: [B, Hkv, N, D] likewise; query head h reads key head h * Hkv // Hq.
            value: [B, Hkv, N, D]
            scale: What the attention scores are multiplied by.

        Returns:
            [B, N, Hq, D]
        """
        ...


def register_grouped(name: str) -> str:
    """The name of an attention implementation that knows `Attention` objects and else does what ``name`` does.

    ``name`` itself where transformers does not let it be replaced, as with eager.
    """
    if name.startswith(_PREFIX) or name not in ALL_ATTENTION_FUNCTIONS or name not in ALL_MASK_ATTENTION_FUNCTIONS:
        return name

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        # A decoder hands keywords that it does not know down to every layer's attention.
        grouped: Attention | None = kwargs.pop("grouped", None)
        if grouped is not None:
            scale = kwargs.get("scaling")
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            return grouped.attend(module.layer_idx, query, key, value, scale), None
        # Looked up at every call: whoever registers another function of this name later is followed.
        plain: Any = ALL_ATTENTION_FUNCTIONS[name]
        output: tuple[Tensor, Any] = plain(module, query, key, value, mask, *args, **kwargs)
        return output

    AttentionInterface.register(_PREFIX + name, attention)
    # Masks are looked up by the same name; without an entry of its own the model would get none at all.
    AttentionMaskInterface.register(_PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return _PREFIX + name


def use_grouped(model: Any) -> None:
    """Make a transformers model's attention replaceable, see `register_grouped`."""
    if model.config._attn_implementation is not None:
        model.config._attn_implementation = register_grouped(model.config._attn_implementation)


@cache
def _unused_mask(device: torch.device) -> Tensor:
    # transformers hands a mask of four dimensions through as it is, and builds none. One for each device: a copy at
    # every forward pass would make the CPU wait for a GPU.
    return torch.zeros(1, 1, 1, 1, device=device)


def forward(decoder: Any, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
    """Hidden states [B, N, H] of a transformers decoder (the model without its head) with another attention.

    Args:
        decoder: Of a model with `use_grouped`.
        ids: [B, N]
        positions: [B, N] of every token in its own row, prompt included.
        attention: Attends in every layer; it must fit B and N.
    """
    hidden: Tensor = decoder(
        input_ids=ids,
        position_ids=positions,
        attention_mask=_unused_mask(ids.device),
        use_cache=False,
        grouped=attention,
    ).last_hidden_state
    return hidden


def shared_prefix(decoder: Any, prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with and are computed once for all; 0 where that saves too little."""
    if decoder.device.type != "cpu" or len(prompts) < 2:
        return 0
    first, *_, last = sorted(map(list, prompts))  # by whose order the others lie between them
    common = next((n for n, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    length = min(common, min(map(len, prompts)) - 1)  # of every prompt the last token is left
    saved = 2 * decoder.num_parameters(exclude_embeddings=True) * length * (len(prompts) - 1)
    return length if saved >= MIN_SAVED else 0


@dataclass(frozen=True)
class Stream:
    """Groups laid out one after another, N tokens in all, with the attention of each token to what it may see."""

    groups: Groups
    device: torch.device
    prefix: int = 0
    """Tokens before the groups that belong to every prompt, and are not counted in its length."""

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """Where every group's prompt starts, where its first completion starts, and where the group ends."""
        sizes = (prompt + sum(completions) for prompt, completions in self.groups)
        bounds = list(accumulate(sizes, initial=self.prefix))
        return [
            (start, start + prompt, end)
            for start, end, (prompt, _) in zip(bounds[:-1], bounds[1:], self.groups, strict=True)
        ]

    @cached_property
    def positions(self) -> Tensor:
        """The position [1, N] of every token in its own row, prompt included."""
        parts = [torch.arange(self.prefix)]
        for prompt, completions in self.groups:
            end = self.prefix + prompt
            parts += [torch.arange(self.prefix, end), *(torch.arange(end, end + length) for length in completions)]
        return torch.cat(parts)[None].to(self.device)  # [N] -> [1, N]

    @cached_property
    def predictors(self) -> list[Tensor]:
        """For every completion of length n, the n + 1 places whose hidden states predict its tokens and the next one.

        The first is the end of the prompt, which all completions of the group have in common.
        """
        places = []
        for (_, prompt_end, _), (_, completions) in zip(self.spans, self.groups, strict=True):
            start = prompt_end
            for length in completions:
                places.append(torch.cat([torch.tensor([prompt_end - 1]), torch.arange(start, start + length)]))
                start += length
        return places

    @cached_property
    def segments(self) -> list[tuple[Tensor, Tensor]]:
        """Prompts and completions of similar length side by side, for causal attention of each to itself.

        Returns:
            Pairs of places [n, L] in the stream, 0 where padded, and which are real [n, L].
        """
        bounds = [(0, self.prefix)]
        for (start, prompt_end, _), (_, completions) in zip(self.spans, self.groups, strict=True):
            bounds.append((start, prompt_end - start))
            for length in completions:
                bounds.append((prompt_end, length))
                prompt_end += length
        batches: list[list[tuple[int, int]]] = []
        # From the longest to the shortest, so that the first of a batch says how wide it is.
        for start, length in sorted(bounds, key=lambda bound: -bound[1]):
            if not length:
                continue
            if batches and length >= _MIN_FILL * batches[-1][0][1]:
                batches[-1].append((start, length))
            else:
                batches.append([(start, length)])
        pairs = []
        for batch in batches:
            starts, lengths = torch.tensor(batch).unsqueeze(-1).unbind(1)  # [n, 2] -> [n, 2, 1] -> [n, 1] twice
            steps = torch.arange(batch[0][1])  # [L]
            real = steps < lengths  # [n, L]
            pairs.append(((starts + steps).where(real, 0).to(self.device), real.to(self.device)))
        return pairs

    @cached_property
    def padding(self) -> int:
        """How many tokens are appended for FlexAttention, which only attend to each other.

        Every number of blocks from 2 on is one graph with dynamic shapes: a last block that is not full would be
        another one, and so would be a single block, since torch compiles sizes of 1 on their own.
        """
        size = self.spans[-1][-1]
        return max(-size % BLOCK, 2 * BLOCK - size)

    @cached_property
    def block_mask(self) -> BlockMask:
        """FlexAttention's mask of the stream and its padding."""
        return block_mask((*self.groups, (self.padding, ())), self.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # Under autocast the rotation leaves queries and keys in float32.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if self.device.type == "cpu":
            # Of which the first two bound keys, and the last two the queries that see them all.
            shared = [(0, self.prefix, query.shape[2]), *self.spans] if self.prefix else self.spans
            output: Tensor = _Cascade.apply(query, key, value, shared, self.segments, scale)
            return output
        return self.flex(query, key, value, scale)

    def flex(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The same as ``attend``, always by FlexAttention."""
        size = query.shape[2]
        # Without padding they would keep the layout they came in, which would be one more graph.
        query, key, value = (pad(each, (0, 0, 0, self.padding)).contiguous() for each in (query, key, value))
        # Streams differ in length: with static shapes each would be compiled anew, and after a few torch gives up and
        # computes all N * N attention scores without the kernel.
        is_cuda = self.device.type == "cuda"
        attention: Any = compile_function(flex_attention, dynamic=True, or_plain=False) if is_cuda else flex_attention
        gqa = query.shape[1] != key.shape[1]
        by_head: Tensor = attention(query, key, value, block_mask=self.block_mask, scale=scale, enable_gqa=gqa)
        return by_head[:, :, :size].transpose(1, 2)  # [1, Hq, N + padding, D] -> [1, N, Hq, D]


def block_mask(groups: Groups, device: torch.device) -> BlockMask:
    """The mask in which a prompt attends to itself and a completion to its prompt and to itself, all causally.

    The groups lie one after another, N tokens in all, a multiple of `BLOCK`. Memory and time grow with b times the
    number of spans, not with N * N as those of torch's own ``create_block_mask``.
    """
    bounds, prompts = _bounds(groups)
    size = bounds[-1][1]
    pairs = _visible_pairs(bounds, prompts, size // BLOCK)
    whole = pairs == BLOCK * BLOCK
    lengths = torch.tensor([end - start for start, end in bounds])  # [s]
    # For every token where its group's prompt starts, where that ends, and where its own span starts, [N] each.
    starts, ends, own = (
        torch.tensor(values, dtype=torch.int32).repeat_interleave(lengths).to(device)
        for values in (*zip(*prompts, strict=True), [start for start, _ in bounds])
    )

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_prompt = (key >= starts[query]) & (key < ends[query])
        return (in_prompt | (key >= own[query])) & (key <= query)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        # How many blocks of keys every block of queries has, [1, 1, b], and which, first of all, [1, 1, b, b].
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None, None].to(device), order.int()[None, None].to(device)

    partial = (pairs > 0) & ~whole
    return BlockMask.from_kv_blocks(
        *listed(partial), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(size, size)
    )


def _bounds(groups: Groups) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Where prompts and completions start and end, and where the prompt of each does; without empty ones."""
    bounds, prompts, start = [], [], 0
    for prompt, completions in groups:
        first = start
        for length in (prompt, *completions):
            if length:
                bounds.append((start, start + length))
                prompts.append((first, first + prompt))
                start += length
    return bounds, prompts


def _visible_pairs(bounds: Sequence[tuple[int, int]], prompts: Sequence[tuple[int, int]], blocks: int) -> Tensor:
    """How many pairs of a query and a key that it may see lie in every block, [b of queries, b of keys]."""
    # Of a span's own keys a query in a later block sees all that lie in an earlier one; within a block of which it has
    # m tokens there are m (m + 1) / 2 pairs.
    own = _overlaps(bounds, blocks)  # [s, b]
    pairs = (own.T @ own).tril(-1)  # [b, s] [s, b] -> [b, b]
    pairs.diagonal().add_((own * (own + 1) / 2).sum(0))
    # A completion sees all of its prompt; those of one group lie in a row.
    places = sorted({prompt: end for prompt, (_, end) in zip(prompts, bounds, strict=True)}.items())
    completions = [(prompt_end, end) for (_, prompt_end), end in places]
    seen: Tensor = pairs + _overlaps(completions, blocks).T @ _overlaps([prompt for prompt, _ in places], blocks)
    return seen


def _overlaps(bounds: Sequence[tuple[int, int]], blocks: int) -> Tensor:
    """How many tokens every span has in every block, [s, b]."""
    # In float64, which has a fast product, counts exactly and is not rounded under autocast.
    starts, ends = torch.tensor(bounds, dtype=torch.float64).unsqueeze(-1).unbind(1)  # [s, 2, 1] -> [s, 1] twice
    edges = torch.arange(blocks, dtype=torch.float64) * BLOCK  # [b]
    return (ends.minimum(edges + BLOCK) - starts.maximum(edges)).clamp_(min=0)  # [s, b]


class _Cascade(torch.autograd.Function):
    """Attention to a shared prompt and to a completion's own tokens, by the CPU's flash kernels, with its gradient.

    Queries see their own keys and those before: of a completion its prompt's, of all a prefix's. With o, l the output
    and the log-sum-exp of each block, l = log(e^l1 + e^l2) and o = e^(l1 - l) o1 + e^(l2 - l) o2. The kernel's backward
    pass for one block uses o and l only through e^(attention score - l) and the dot product of o with its gradient, so
    it is called with the joined values. Inside, everything has its token first, [N, Hq, D], and the log-sum-exps are
    [N, Hq].

    Sources: Hydragen, arXiv:2402.05099, for splitting attention at the end of a shared prompt; FlashAttention-2,
    arXiv:2307.08691, for joining blocks by their log-sum-exp, and its backward pass.
    """

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
            # [N, Hq] -> [N, Hq, 1]
            of_prompt, of_own = (
                (sum_ - joined).exp().unsqueeze(-1).to(out.dtype) for sum_ in (sums[0], lse[completions])
            )
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
            for whole, part, place in zip((dq, dk, dv), parts, (completions, prompt, prompt), strict=True):
                whole[place] += part[0]
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
