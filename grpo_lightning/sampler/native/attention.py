"""Attention of single tokens to keys and values that the rows of a group share.

Shapes: b rows in the batch now, p prompts that they belong to, m rows of the largest group; Hq query heads, Hkv key
heads, R = Hq / Hkv query heads that read one key head, D the size of a head; S tokens of the longest prompt, C keys
that a row looks at.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNED = 8
"""Numbers of 16 bits in 16 bytes, at multiples of which the kernels for GPUs want rows to begin."""
_MAX_HEAD_SIZE = 256
"""The size of a head that FlashAttention takes at most."""


class Grouping:
    """Which rows belong to one prompt, and where they stand once every group is padded to the largest one.

    Args:
        group_of: [b] the number of each row's prompt, from 0 to p - 1; a prompt may have no row.
        groups: Prompts, p.
        members: Rows to which every group is padded; None: those of the largest one.
        device: Where the rows are.
    """

    def __init__(self, group_of: Sequence[int], groups: int, *, members: int | None, device: torch.device) -> None:
        rows_of: list[list[int]] = [[] for _ in range(groups)]
        for row, group in enumerate(group_of):
            rows_of[group].append(row)
        largest = members or max(map(len, rows_of))
        # A smaller group repeats a row of its own, an empty one any row.
        slots = [row for rows in rows_of for row in rows + (rows[-1:] or [0]) * (largest - len(rows))]
        places = [0] * len(group_of)
        for group, rows in enumerate(rows_of):
            for member, row in enumerate(rows):
                places[row] = group * largest + member
        self._slots: Tensor | None = None
        """[p * m] the row in every place; None where every row is in the place of its number."""
        self._places: Tensor | None = None
        """[b] the place of every row."""
        if members is not None or slots != list(range(len(group_of))):
            self._slots, self._places = (torch.tensor(numbers, device=device) for numbers in (slots, places))

    def become(self, other: "Grouping") -> bool:
        """Take over another one's places without moving in memory, if it is of the same size; else return False."""
        pairs = [(self._slots, other._slots), (self._places, other._places)]
        if any(mine is None or its is None or mine.shape != its.shape for mine, its in pairs):
            return False
        for mine, its in pairs:
            if mine is not None and its is not None:
                mine.copy_(its)
        return True

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of every row to its prompt, whose keys and values are read once for the whole group.

        Args:
            query: [b, Hkv, R, D]
            key: [p, Hkv, S, D]
            value: [p, Hkv, S, D]
            bias: [p, 1, 1, S] what is added to the attention scores, if anything.
            scale: What the attention scores are multiplied by before.

        Returns:
            The output [b, Hkv, R, D] and the log-sum-exp of the attention scores [b, Hkv, R].
        """
        groups, heads, width = len(key), key.shape[1], key.shape[-1]
        placed = query if self._slots is None else query.index_select(0, self._slots)
        # [p * m, Hkv, R, D] -> [p, m, Hkv, R, D] -> [p, Hkv, m, R, D] -> [p, Hkv, m * R, D]
        stacked = placed.view(groups, -1, *query.shape[1:]).transpose(1, 2).reshape(groups, heads, -1, width)
        output, sums = attend(stacked, key, value, bias, scale)
        # [p, Hkv, m * R, D] -> [p, Hkv, m, R, D] -> [p, m, Hkv, R, D] -> [p * m, Hkv, R, D]
        output = output.view(groups, heads, -1, query.shape[2], width).transpose(1, 2).reshape(-1, *query.shape[1:])
        # [p, Hkv, m * R] -> [p, Hkv, m, R] -> [p, m, Hkv, R] -> [p * m, Hkv, R]
        sums = sums.reshape(groups, heads, -1, query.shape[2]).transpose(1, 2).reshape(-1, *query.shape[1:3])
        if self._places is not None:  # [p * m, ...] -> [b, ...]
            output, sums = output.index_select(0, self._places), sums.index_select(0, self._places)
        return output, sums


class KeyCounts(NamedTuple):
    """How many of its keys every row looks at, as the kernel for GPUs takes it; all are int32."""

    tokens: Tensor
    """[b]"""
    queries: Tensor
    """[b + 1] where the query of each row begins."""
    firsts: Tensor
    """[b + 1] where the keys of each row begin, in rows of D numbers."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | KeyCounts | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of some queries to all keys.

    Args:
        query: [n, Hkv, L, D] for n rows or groups, and L queries for each head of each.
        key: [n, Hkv, S, D]
        value: [n, Hkv, S, D]
        bias: [n, 1, 1, S] what is added to the attention scores, if anything; or which keys there are.
        scale: What the attention scores are multiplied by before.

    Returns:
        The output [n, Hkv, L, D] and the log-sum-exp of the attention scores [n, Hkv, L].
    """
    if isinstance(bias, KeyCounts):
        return _attend_counted(query, key, value, bias, scale)
    if query.device.type == "cpu":
        if key.shape != value.shape or query.shape[1] != key.shape[1]:  # which the kernel does not compare
            raise ValueError(
                f"attention of {list(query.shape)} to keys {list(key.shape)} and values {list(value.shape)}"
            )
        if bias is not None:
            bias = bias.expand(-1, -1, query.shape[2], -1)  # [n, 1, 1, S] -> [n, 1, L, S]
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        results: tuple[Tensor, Tensor] = flash(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
        return results
    if _is_aligned(query):
        if bias is not None:
            bias = bias.expand(-1, query.shape[1], query.shape[2], -1)  # [n, 1, 1, S] -> [n, Hkv, L, S]
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        output, sums, *_ = efficient(query, key, value, bias, True, scale=scale)
        return output, sums[..., : query.shape[2]]  # which has room for a multiple of 32 queries
    return attend_written_out(query, key, value, bias, scale)


def _attend_counted(
    query: Tensor, key: Tensor, value: Tensor, counts: KeyCounts, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend` by FlashAttention, which reads no more keys than there are, and those of a row in several places."""
    rows, heads, queries, width = query.shape
    # The kernel takes a list of tokens [n, Hkv, D] and where in it those of a row begin: for it the next token is the
    # next D numbers, and the next head all the room of a head further.
    size = (rows - 1) * heads * (key.stride(1) // width) + key.shape[2]
    listed = [one.as_strided((size, heads, width), (width, one.stride(1), 1)) for one in (key, value)]
    output, sums, *_ = torch.ops.aten._flash_attention_forward(
        query.reshape(rows, -1, width),  # [b, Hkv, R, D] -> [b, Hq, D]
        *listed,
        counts.queries,
        counts.firsts,
        1,
        key.shape[2],
        0.0,
        False,
        False,
        scale=scale,
        seqused_k=counts.tokens,
    )
    # [b, Hq, D] -> [b, Hkv, R, D], and [Hq, b] -> [Hkv, R, b] -> [b, Hkv, R]
    return output.view(query.shape), sums.view(heads, queries, rows).permute(2, 0, 1)


def attend_written_out(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend` as matrix products: for a single token of each row the attention scores are few."""
    scores = (query @ key.transpose(2, 3)).float() * scale  # [n, Hkv, L, D] [n, Hkv, D, S] -> [n, Hkv, L, S]
    if bias is not None:
        scores = scores + bias
    sums = scores.logsumexp(-1)
    return (scores - sums.unsqueeze(-1)).exp().to(value.dtype) @ value, sums


def merge_attention(own: Tensor, own_sums: Tensor, prompt: Tensor, prompt_sums: Tensor) -> Tensor:
    """The attention [b, Hkv, R, D] to two parts, from that to each and the log-sum-exps of its scores [b, Hkv, R]."""
    # e^prompt / (e^prompt + e^own), [b, Hkv, R] -> [b, Hkv, R, 1]; it never overflows.
    fraction = (prompt_sums - own_sums).sigmoid().unsqueeze(-1).to(own.dtype)
    return torch.lerp(own, prompt, fraction)


def exclusion_bias(places: Tensor, dtype: torch.dtype) -> Tensor:
    """-inf in the places [n, C], elsewhere 0, as what is added to attention scores: [n, 1, 1, C]."""
    rows, width = places.shape
    zeros = torch.zeros(rows, -(-width // _ALIGNED) * _ALIGNED, dtype=dtype, device=places.device)[:, :width]
    return zeros.masked_fill_(places, -torch.inf)[:, None, None]


def counts_keys(keys: Tensor) -> bool:
    """Whether the kernel for these keys is told how many of them a row looks at, and reads no others.

    That is FlashAttention, which NVIDIA's GPUs from Ampere on have.
    """
    if not _is_aligned(keys) or keys.shape[-1] > _MAX_HEAD_SIZE or torch.version.hip is not None:
        return False
    is_there = torch.backends.cuda.is_flash_attention_available()
    return is_there and torch.cuda.get_device_capability(keys.device) >= (8, 0)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether torch's attention kernels for GPUs take it."""
    return tensor.device.type == "cuda" and tensor.element_size() == 2 and tensor.shape[-1] % _ALIGNED == 0


def visible_keys(lengths: Tensor, keys: Tensor, width: int, window: int | None, counts: bool) -> Tensor | KeyCounts:
    """Which of its keys every completion looks at, as `attend` takes it: a bias [b, 1, 1, C] or their numbers.

    Args:
        lengths: [b] the tokens of each before the one that looks.
        keys: [b, Hkv, room, D] of any layer.
        width: How many of them are handed to `attend`, C.
        window: How many tokens back it may look, itself included; None: all the way.
        counts: Whether the kernel for all layers takes how many keys there are, see `counts_keys`.
    """
    if window is None and counts:
        numbers = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
        return KeyCounts(lengths.int() + 1, numbers, numbers * (keys.stride(0) // keys.shape[-1]))
    places, now = torch.arange(width, device=lengths.device), lengths.unsqueeze(-1)
    hidden = places > now
    if window is not None:
        hidden = hidden | (places <= now - window)
    return exclusion_bias(hidden, keys.dtype)
