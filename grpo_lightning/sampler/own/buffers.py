"""Keys and values of the completions that are held, in room that is made beforehand.

Shapes: b completions; Hkv key heads, D the size of a head.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_lightning.sampler.own.prompt_attention import counts_keys

Pair = tuple[Tensor, Tensor]
"""Keys and values."""

FIRST_ROOM = 64
"""Tokens that a completion has room for at first, at least."""
FIRST_ROOM_GPU = 256
"""The same on a GPU, where every size has to be recorded."""


class Buffers:
    """By layer keys and values [b, Hkv, room, D].

    Args:
        like: Layer -> keys and values [..., Hkv, any, D].
        rows: How many completions there are, b.
    """

    def __init__(self, like: Mapping[int, Pair], rows: int) -> None:
        self._layers = {layer: (_empty(key, rows), _empty(value, rows)) for layer, (key, value) in like.items()}

    def __getitem__(self, layer: int) -> Pair:
        return self._layers[layer]

    @property
    def room(self) -> int:
        """The tokens that there is room for."""
        return self.keys.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of all keys and values."""
        return self.keys.dtype

    @property
    def keys(self) -> Tensor:
        """The keys of any layer."""
        return next(iter(self._layers.values()))[0]

    def counts_keys(self) -> bool:
        """Whether the kernel for them is told how many keys a row looks at, which has to hold for all layers alike."""
        if not counts_keys(self.keys):
            return False
        return len({(one.shape, one.stride()) for pair in self._layers.values() for one in pair}) == 1

    def grow(self, tokens: int, capacity: int) -> bool:
        """Make room for so many tokens, with some more up to the capacity; returns whether there was too little."""
        if (old := self.room) >= tokens:
            return False
        for layer, (key, value) in self._layers.items():
            self._layers[layer] = with_room(key, old, tokens, capacity), with_room(value, old, tokens, capacity)
        return True

    def write(self, row: int, first: int, pairs: Mapping[int, Pair]) -> None:
        """Put keys and values [Hkv, n, D] of a completion into its places from ``first`` on, by layer."""
        for layer, pair in pairs.items():
            for buffer, values in zip(self._layers[layer], pair, strict=True):
                buffer[row, :, first : first + values.shape[1]] = values

    def keep(self, rows: Tensor, tokens: int) -> None:
        """Drop all completions but these, in rising order, of which ``tokens`` tokens are worth keeping."""
        # They move to the front of the room that there is: no more of it is made, none is given back until it grows.
        count = len(rows)
        for layer, pair in self._layers.items():
            for tensor in pair:
                tensor[:count, :, :tokens] = tensor[rows, :, :tokens]
            self._layers[layer] = pair[0][:count], pair[1][:count]

    def prepend(
        self, prompts: Mapping[int, Pair], group_of: Tensor, lengths: Tensor, tokens: int, capacity: int
    ) -> None:
        """Put its prompt before each completion, without a gap.

        Args:
            prompts: Layer -> keys and values [p, Hkv, S, D].
            group_of: [b] the prompt of each completion.
            lengths: [b] the tokens of that prompt, at most S.
            tokens: How many tokens of the completions are worth keeping.
            capacity: As in `grow`.
        """
        # [b, tokens] -> [b, 1, tokens, 1]
        places = (lengths.unsqueeze(-1) + torch.arange(tokens, device=lengths.device))[:, None, :, None]
        for layer, shared in prompts.items():
            pair = []
            for prompt, own in zip(shared, self._layers[layer], strict=True):
                size = prompt.shape[2]
                # [p, Hkv, S, D] -> [b, Hkv, S, D]
                buffer = with_room(prompt[group_of], size, size + tokens, capacity)
                pair.append(buffer.scatter_(2, places.expand(-1, own.shape[1], -1, own.shape[3]), own[:, :, :tokens]))
            self._layers[layer] = pair[0], pair[1]


def with_room(past: Tensor, length: int, tokens: int, capacity: int) -> Tensor:
    """The first ``length`` keys or values in a buffer with room for ``tokens`` at least, [b, Hkv, room, D]."""
    # Doubled: with a token more at each step, every step would copy all steps before it.
    first = FIRST_ROOM if past.device.type == "cpu" else FIRST_ROOM_GPU
    room = min(max(2 * length, length + first, tokens), capacity)
    rows, heads, _, width = past.shape
    buffer = past.new_empty(rows, heads, room, width)
    buffer[:, :, :length] = past[:, :, :length]
    # What a mask excludes must not be NaN.
    buffer[:, :, length:] = 0.0
    return buffer


def store(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> None:
    """Put the newest key and value [b, Hkv, 1, D] of every row into its place in [b, Hkv, room, D]."""
    rows = torch.arange(len(lengths), device=lengths.device)
    keys[rows, :, lengths] = key[:, :, 0]
    values[rows, :, lengths] = value[:, :, 0]


def _empty(like: Tensor, rows: int) -> Tensor:
    return like.new_zeros(rows, like.shape[-3], 0, like.shape[-1])
