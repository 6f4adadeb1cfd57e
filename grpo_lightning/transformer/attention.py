"""Attention over a group that shares its prompt: the prompt is computed once and every completion continues it.

A stream is [prompt | completion 1 | ... | completion G | next prompt | ...], one row without padding. A prompt attends
to itself; a completion attends to its prompt and to itself, as if the two stood alone, so nothing but the amount of
work differs from G separate rows: S + sum(T) tokens instead of G (S + max T).

The stream enters through transformers' attention interface. A model with ``grouped(name)`` as its
``attn_implementation`` behaves as with ``name``, unless its forward pass is given ``grouped=`` an `Attention`, here a
`Stream`.

Shapes: B rows, G completions per prompt, S tokens of a prompt, T of a completion, N of a stream; Hq query heads, Hkv
key heads, D the size of a head, H that of a hidden state.
"""

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

from grpo_lightning.transformer import attention_cpu
from grpo_lightning.transformer.attention_flex import BLOCK, block_mask
from grpo_lightning.transformer.kernels import compiled

_PREFIX = "grouped_"
_MIN_FILL = 0.7
"""Segments at least this long, relative to the longest, are attended to in one call: padding against calls."""


class Attention(Protocol):
    """Takes the place of every layer's attention."""

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


def grouped(name: str) -> str:
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
    """Make a transformers model's attention replaceable, see `grouped`."""
    if model.config._attn_implementation is not None:
        model.config._attn_implementation = grouped(model.config._attn_implementation)


@cache
def _unused_mask(device: torch.device) -> Tensor:
    """A mask of four dimensions is handed through by transformers as it is, and none is built."""
    # Once for each device: a copy at every forward pass would make the CPU wait for a GPU.
    return torch.zeros(1, 1, 1, 1, device=device)


def forward(decoder: Any, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
    """Hidden states [B, N, H] of a transformers decoder with another attention.

    Args:
        decoder: The model without its head.
        ids: [B, N]
        positions: [B, N] of every token in its own row, prompt included.
        attention: What attends in every layer; it must fit B and N.
    """
    # What is kept for later tokens is up to ``attention``, which sees all keys and values.
    hidden: Tensor = decoder(
        input_ids=ids,
        position_ids=positions,
        attention_mask=_unused_mask(ids.device),
        use_cache=False,
        grouped=attention,
    ).last_hidden_state
    return hidden


@dataclass(frozen=True)
class Stream:
    """Groups laid out one after another, N tokens in all, with the attention of each token to what it may see."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    """For every group the length of its prompt (at least 1) and the lengths of its completions (0 is allowed)."""
    device: torch.device

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """Where every group's prompt starts, where its first completion starts, and where the group ends."""
        ends = list(accumulate(prompt + sum(completions) for prompt, completions in self.groups))
        return [
            (start, start + prompt, end) for start, end, (prompt, _) in zip([0, *ends], ends, self.groups, strict=False)
        ]

    @cached_property
    def positions(self) -> Tensor:
        """The position [1, N] of every token in its own row, prompt included."""
        parts = [
            torch.arange(first, first + length)
            for prompt, completions in self.groups
            for first, length in ((0, prompt), *((prompt, length) for length in completions))
        ]
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
        bounds = []
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
            # FlexAttention has no backward pass on a CPU.
            return attention_cpu.attend(query, key, value, spans=self.spans, segments=self.segments, scale=scale)
        return self.flex(query, key, value, scale)

    def flex(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The same as ``attend``, always by FlexAttention."""
        size = query.shape[2]
        # Without padding they would keep the layout they came in, which would be one more graph.
        query, key, value = (pad(each, (0, 0, 0, self.padding)).contiguous() for each in (query, key, value))
        attention = flex_for(self.device)
        gqa = query.shape[1] != key.shape[1]
        by_head: Any = attention(query, key, value, block_mask=self.block_mask, scale=scale, enable_gqa=gqa)
        output: Tensor = by_head[:, :, :size].transpose(1, 2)  # [1, Hq, N + padding, D] -> [1, N, Hq, D]
        return output


def flex_for(device: torch.device) -> Any:
    """The function that computes FlexAttention on a device."""
    return compiled_flex if device.type == "cuda" else flex_attention


def compiled_flex(*tensors: Tensor, **arguments: Any) -> Any:
    """``flex_attention`` as one kernel for streams of any length."""
    # Streams differ in length: with static shapes each would be compiled anew, and after a few torch gives up and
    # computes all N * N attention scores without the kernel.
    return compiled(flex_attention, dynamic=True, or_plain=False)(*tensors, **arguments)
