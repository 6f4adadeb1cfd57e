"""Reading prompts before the first token of their completions is drawn, as streams without padding.

Shapes: P prompts, p of them in a stream of N tokens; S tokens of the longest prompt; Hkv key heads, D the size of a
head; H that of a hidden state.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.transformer.attention import Stream, forward


class _Reading:
    """A stream of prompts whose keys and values [N, Hkv, D] are kept, by layer."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # [1, Hkv, N, D] -> [N, Hkv, D]
        self.kept[layer] = key[0].transpose(0, 1).to(value.dtype), value[0].transpose(0, 1)
        return self.stream.attend(layer, query, key, value, scale)


def read_prompts(
    decoder: Any, prompts: Sequence[Sequence[int]], *, tokens: int, ranks: Ranks
) -> tuple[Tensor, dict[int, tuple[Tensor, ...]], Tensor | None]:
    """What a decoder makes of some prompts.

    Args:
        decoder: The model without its head.
        prompts: [P] the token ids of each prompt.
        tokens: The most tokens in one forward pass; a prompt that is longer goes alone.
        ranks: The processes that may have to make every forward pass together.

    Returns:
        Hidden states [P, H] of every prompt's last token; layer -> keys and values [P, Hkv, S, D]; and what is to be
        added to attention scores, [P, 1, 1, S], -inf where a prompt is padded, None where all are as long.
    """
    device = decoder.device
    longest = max(map(len, prompts))
    last, kept = [], []
    chunks = _chunks(prompts, tokens)
    # Another process may have more to read, and every forward pass of sharded weights takes all processes.
    idle = ranks.most(len(chunks)) - len(chunks)
    for number, chunk in enumerate([chunks[0]] * idle + chunks):
        reading = _Reading(Stream(tuple((len(prompt), ()) for prompt in chunk), device))
        ids = torch.tensor([token for prompt in chunk for token in prompt], device=device)
        hidden = forward(decoder, ids[None], reading.stream.positions, reading)[0]  # [1, N, H] -> [N, H]
        if number < idle:
            continue
        starts = torch.tensor([[start] for start, _, _ in reading.stream.spans], device=device)
        ends = torch.tensor([end - 1 for _, _, end in reading.stream.spans], device=device)
        # [p, 1] with [S] -> [p, S]; behind a shorter prompt stand its neighbour's keys, which are ruled out below.
        places = (starts + torch.arange(longest, device=device)).clamp(max=len(ids) - 1)
        last.append(hidden[ends])
        kept.append(
            {
                # [N, Hkv, D] -> [p, S, Hkv, D] -> [p, Hkv, S, D]
                layer: tuple(t[places].transpose(1, 2).contiguous() for t in tensors)
                for layer, tensors in reading.kept.items()
            }
        )
    by_layer: dict[int, tuple[Tensor, ...]] = {}
    for layer in kept[0]:
        keys, values = zip(*(part[layer] for part in kept), strict=True)
        by_layer[layer] = torch.cat(keys), torch.cat(values)
    # Without a bias the kernel has no mask to read: prompts of equal length need none.
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    beyond = torch.arange(longest, device=device) >= lengths  # [P, S]
    bias: Tensor | None = None
    if beyond.any():
        # [P, S] -> [P, 1, 1, S]
        bias = torch.zeros(beyond.shape, device=device).masked_fill(beyond, -torch.inf)[:, None, None]
    return torch.cat(last), by_layer, bias


def _chunks(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[Sequence[int]]]:
    """The prompts in their order, as many together as stay within a budget of tokens."""
    chunks: list[list[Sequence[int]]] = []
    room = 0
    for prompt in prompts:
        if not chunks or len(prompt) > room:
            chunks.append([])
            room = tokens
        chunks[-1].append(prompt)
        room -= len(prompt)
    return chunks
