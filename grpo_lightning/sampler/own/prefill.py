"""Reading prompts before the first token of their completions is drawn, as streams without padding.

Shapes: P prompts, p of them in a stream of N tokens; S tokens of the longest prompt; n tokens of a completion; Hkv
key heads, D the size of a head; H that of a hidden state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.sampler.own.buffers import Pair
from grpo_lightning.transformer.attention import Stream, forward


@dataclass
class Read:
    """What a decoder made of some prompts, and of a completion of each."""

    lengths: list[int]
    """[P] tokens of every prompt."""
    hidden: Tensor
    """[P, H] at every prompt's last token."""
    keys: dict[int, Pair]
    """Layer -> keys and values [P, Hkv, S, D]; behind a shorter prompt they mean nothing."""
    completions: list[tuple[Tensor, dict[int, Pair]]] = field(default_factory=list)
    """[P] the last hidden state [H] of each completion, and layer -> its keys and values [Hkv, n, D]."""

    def last(self, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The different last hidden states [k, H] of some prompts [n], and which is whose [n]."""
        number = {group: i for i, group in enumerate(sorted(set(groups), key=str))}  # another order rounds otherwise
        hidden = torch.stack([self.hidden[group] for group in number])
        return hidden, torch.tensor([number[group] for group in groups], device=hidden.device)


class _Reading:
    """A stream of prompts whose keys and values [N, Hkv, D] are kept, by layer."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.kept: dict[int, Pair] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # [1, Hkv, N, D] -> [N, Hkv, D]
        self.kept[layer] = key[0].transpose(0, 1).to(value.dtype), value[0].transpose(0, 1)
        return self.stream.attend(layer, query, key, value, scale)


def read_prompts(
    decoder: Any,
    prompts: Sequence[Sequence[int]],
    *,
    completions: Sequence[Sequence[int]] = (),
    tokens: int,
) -> Read:
    """What a decoder makes of some prompts.

    Args:
        decoder: The model without its head.
        prompts: [P] the token ids of each prompt.
        completions: [P] the token ids of the completion to read behind each prompt; empty: prompts only.
        tokens: The most tokens in one forward pass; a prompt that is longer goes alone.
    """
    device = decoder.device
    longest = max(map(len, prompts))
    own = [[ids] for ids in completions] or [[] for _ in prompts]
    sizes = [len(prompt) + sum(map(len, rows)) for prompt, rows in zip(prompts, own, strict=True)]
    hidden, keys = [], []
    read = Read([len(prompt) for prompt in prompts], torch.empty(0), {})
    for chunk in _chunks(sizes, tokens):
        groups = tuple((len(prompts[i]), tuple(map(len, own[i]))) for i in chunk)
        reading = _Reading(Stream(groups, device))
        pieces = [piece for i in chunk for piece in (prompts[i], *own[i])]
        ids = torch.tensor([token for piece in pieces for token in piece], device=device)
        states = forward(decoder, ids[None], reading.stream.positions, reading)[0]  # [1, N, H] -> [N, H]
        spans = reading.stream.spans
        starts = torch.tensor([[start] for start, _, _ in spans], device=device)
        # [p, 1] with [S] -> [p, S]; behind a shorter prompt stand its neighbour's keys, which nobody asks for.
        places = (starts + torch.arange(longest, device=device)).clamp(max=len(ids) - 1)
        hidden.append(states[torch.tensor([middle - 1 for _, middle, _ in spans], device=device)])
        keys.append({layer: _by_head(pair, places) for layer, pair in reading.kept.items()})
        for _, place, end in spans if completions else ():
            pairs = {
                layer: (k[place:end].transpose(0, 1), v[place:end].transpose(0, 1))
                for layer, (k, v) in reading.kept.items()
            }
            read.completions.append((states[end - 1], pairs))
    read.hidden = torch.cat(hidden)
    for layer in keys[0]:
        read.keys[layer] = torch.cat([part[layer][0] for part in keys]), torch.cat([part[layer][1] for part in keys])
    return read


def _by_head(pair: Pair, places: Tensor) -> Pair:
    """Keys and values [p, Hkv, S, D] at [p, S] places of a stream."""
    # [N, Hkv, D] -> [p, S, Hkv, D] -> [p, Hkv, S, D]
    key, value = (tensor[places].transpose(1, 2).contiguous() for tensor in pair)
    return key, value


def _chunks(sizes: Sequence[int], tokens: int) -> list[list[int]]:
    """The numbers of things of these sizes in their order, as many together as stay within a budget of tokens."""
    chunks: list[list[int]] = []
    room = 0
    for number, size in enumerate(sizes):
        if not chunks or size > room:
            chunks.append([])
            room = tokens
        chunks[-1].append(number)
        room -= size
    return chunks
