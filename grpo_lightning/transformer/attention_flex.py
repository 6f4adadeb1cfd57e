"""FlexAttention's block mask of a stream of groups, made from their spans and not from N * N pairs of tokens.

A kernel works on blocks of `BLOCK` queries by `BLOCK` keys: it skips those of which no query may see any key, looks at
every pair in those that are partly visible, and does not look in those that are wholly visible.

Shapes: N tokens, b = N / `BLOCK` blocks, s spans.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries, and keys, of a block: FlexAttention's own default."""
Groups = Sequence[tuple[int, tuple[int, ...]]]
"""For every group the length of its prompt (at least 1) and the lengths of its completions (0 is allowed)."""


def block_mask(groups: Groups, device: torch.device) -> BlockMask:
    """The mask in which a prompt attends to itself and a completion to its prompt and to itself, all causally.

    Memory and time grow with b times the number of prompts and completions; b * b numbers are what a kernel reads.

    Args:
        groups: Which lie one after another, N tokens in all.
        device: Where the attention is computed.

    Raises:
        ValueError: N is not a multiple of `BLOCK`.
    """
    bounds, prompts = _bounds(groups)
    size = bounds[-1][1] if bounds else 0
    if size % BLOCK or not size:
        raise ValueError(f"a stream of {size} tokens is not a multiple of {BLOCK}")
    pairs = _visible_pairs(bounds, prompts, size // BLOCK)
    whole = pairs == BLOCK * BLOCK
    starts, ends, own = (tokens.to(device) for tokens in _seen(bounds, prompts))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_prompt = (key >= starts[query]) & (key < ends[query])
        return (in_prompt | (key >= own[query])) & (key <= query)

    return BlockMask.from_kv_blocks(
        *_listed((pairs > 0) & ~whole, device),
        *_listed(whole, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(size, size),
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


def _seen(bounds: Sequence[tuple[int, int]], prompts: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """For every token where its group's prompt starts, where that ends, and where its own span starts, [N] each."""
    lengths = torch.tensor([end - start for start, end in bounds])  # [s]
    starts, ends = torch.tensor(prompts, dtype=torch.int32).unbind(-1)  # [s, 2] -> [s] twice
    own = torch.tensor([start for start, _ in bounds], dtype=torch.int32)
    return starts.repeat_interleave(lengths), ends.repeat_interleave(lengths), own.repeat_interleave(lengths)


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


def _listed(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks of keys are true for every block of queries, [1, 1, b], and which, first of all, [1, 1, b, b]."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None].to(device), order.int()[None, None].to(device)
