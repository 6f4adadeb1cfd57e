"""What the sampler remembers of the tokens so far: keys and values, a prompt's once for its whole group."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from grpo_lightning.policy.prefix import Stream, forward
from grpo_lightning.policy.unrolled import Unrolled
from grpo_lightning.ranks import ALONE, Ranks

PREFILL_TOKENS = 16384
"""Most prompt tokens that go through the model together."""
COPIED = 4 << 20
"""Bytes of a layer's prompt keys and values: with more, prompts are attended to once per group; as soon as so few
completions are left that copies for each would be smaller, they are copied. Reading is saved against operations."""
_FIRST_ROOM = 64


class Memory(Protocol):
    """A model in the middle of its completions."""

    def start(self) -> Tensor:
        """Read the prompts: logits of every completion's first token, [B, V]."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token [b] to every completion that is remembered: logits of the next one, [b, V]."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Forget all completions but these, given in rising order."""
        ...


class PlainMemory:
    """The model's own cache: every completion holds its prompt. Works with any causal language model."""

    def __init__(self, model: Any, ids: Tensor, attention_mask: Tensor, group_size: int) -> None:
        self._model, self._ids, self._seen, self._group_size = model, ids, attention_mask.long(), group_size
        self._cache = DynamicCache(config=model.config)

    def start(self) -> Tensor:
        output = self._model(
            input_ids=self._ids,
            attention_mask=self._seen,
            position_ids=(self._seen.cumsum(-1) - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache.batch_repeat_interleave(self._group_size)
        self._seen = self._seen.repeat_interleave(self._group_size, 0)
        logits: Tensor = output.logits[:, -1].repeat_interleave(self._group_size, 0)
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        position = self._seen.sum(-1, keepdim=True)
        self._seen = torch.cat([self._seen, self._seen.new_ones(len(tokens), 1)], 1)
        logits: Tensor = self._model(
            input_ids=tokens.unsqueeze(-1),
            attention_mask=self._seen,
            position_ids=position,
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        return logits

    def keep(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._seen = self._seen[rows]


class _Reading:
    """A stream of prompts whose keys and values are kept, by layer: [N, Hkv, D]."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.kept[layer] = key[0].transpose(0, 1).to(value.dtype), value[0].transpose(0, 1)
        return self.stream.attend(layer, query, key, value, scale)


class SharedMemory:
    """Keys and values of every completion, in room that is made beforehand, and of long prompts once per group.

    Every step attends to both and joins the two by their log-sum-exp, see `prefix`. Short prompts are copied.
    """

    def __init__(
        self,
        decoder: Any,
        head: Callable[[Tensor], Tensor],
        prompts: Sequence[Sequence[int]],
        group_size: int,
        *,
        unrolled: Unrolled | None,
        ranks: Ranks = ALONE,
    ) -> None:
        device = decoder.device
        self._decoder, self._head, self._prompts, self._device = decoder, head, prompts, device
        self._unrolled, self._ranks = unrolled, ranks
        self._group_of = torch.arange(len(prompts), device=device).repeat_interleave(group_size)
        self._positions = torch.tensor([len(prompt) for prompt in prompts], device=device)[self._group_of]
        self._length = 0
        self._shared: dict[int, tuple[Tensor, ...]] = {}
        self._own: dict[int, tuple[Tensor, ...]] = {}
        self._bias: Tensor | None = None
        self._arrange()

    def start(self) -> Tensor:
        longest = max(map(len, self._prompts))
        last, kept = [], []
        chunks = _chunks(self._prompts, PREFILL_TOKENS)
        idle = self._ranks.most(len(chunks)) - len(chunks)
        for number, chunk in enumerate([chunks[0]] * idle + chunks):
            reading = _Reading(Stream(tuple((len(prompt), ()) for prompt in chunk), self._device))
            ids = torch.tensor([token for prompt in chunk for token in prompt], device=self._device)
            hidden = forward(self._decoder, ids[None], reading.stream.positions, reading)[0]
            if number < idle:
                continue  # only made because another process makes as many
            starts = torch.tensor([[start] for start, _, _ in reading.stream.spans], device=self._device)
            ends = torch.tensor([end - 1 for _, _, end in reading.stream.spans], device=self._device)
            places = (starts + torch.arange(longest, device=self._device)).clamp(max=len(ids) - 1)
            last.append(hidden[ends])
            kept.append(
                {
                    layer: tuple(t[places].transpose(1, 2).contiguous() for t in tensors)
                    for layer, tensors in reading.kept.items()
                }
            )
        for layer in kept[0]:
            keys, values = zip(*(part[layer] for part in kept), strict=True)
            self._shared[layer] = torch.cat(keys), torch.cat(values)
        lengths = torch.tensor([[len(prompt)] for prompt in self._prompts], device=self._device)
        beyond = torch.arange(longest, device=self._device) >= lengths
        if beyond.any():
            self._bias = torch.zeros(beyond.shape, device=self._device).masked_fill(beyond, -torch.inf)[:, None, None]
        self._maybe_copy()
        logits: Tensor = self._head(torch.cat(last))
        return logits[self._group_of]

    def step(self, tokens: Tensor) -> Tensor:
        if self._unrolled:
            hidden = self._unrolled(tokens, self._positions, self)
        else:
            hidden = forward(self._decoder, tokens.unsqueeze(-1), self._positions.unsqueeze(-1), self)[:, 0]
        self._positions = self._positions + 1
        self._length += 1
        logits: Tensor = self._head(hidden)
        return logits

    def keep(self, rows: Tensor) -> None:
        groups, self._group_of = self._group_of[rows].unique_consecutive(return_inverse=True)
        self._positions = self._positions[rows]
        for layer, tensors in self._own.items():
            self._own[layer] = tuple(self._with_room(t[rows], self._length) for t in tensors)
        if self._bias is not None:
            self._bias = self._bias[groups if self._shared else rows]
        if self._shared and len(groups) < len(next(iter(self._shared.values()))[0]):
            self._shared = {layer: tuple(t[groups] for t in tensors) for layer, tensors in self._shared.items()}
        self._maybe_copy()
        self._arrange()

    def _maybe_copy(self) -> None:
        """Put the prompts before every completion's own keys and values, if that is little."""
        if not self._shared:
            return
        prompt = next(iter(self._shared.values()))[0]
        longest, rows = prompt.shape[2], len(self._group_of)
        if 2 * rows * prompt[0].numel() * prompt.element_size() > COPIED:
            return
        for layer, tensors in self._shared.items():
            own = self._own.get(layer)
            copied = [tensor[self._group_of] for tensor in tensors]
            if own is not None:
                copied = [torch.cat([a, b[:, :, : self._length]], 2) for a, b in zip(copied, own, strict=True)]
            self._own[layer] = tuple(self._with_room(t, self._length + longest) for t in copied)
        self._length += longest
        if self._bias is not None:
            self._bias = self._bias[self._group_of]
        self._shared = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        rows, heads, _, width = key.shape
        query = query.to(value.dtype)  # autocast leaves rotated ones in float32
        keys, values = self._remember(layer, key, value)
        own = query.reshape(rows, heads, -1, width)
        if not self._shared:
            bias = self._bias
            if bias is not None:
                bias = torch.nn.functional.pad(bias, (0, keys.shape[2] - bias.shape[-1])).to(query.dtype)
            return _attend(own, keys, values, bias, scale)[0].reshape(rows, 1, -1, width)
        out, sums = _attend(own, keys, values, None, scale)
        prompt_keys, prompt_values = self._shared[layer]
        asked = own if self._slots is None else own.index_select(0, self._slots)
        groups = len(prompt_keys)
        asked = asked.view(groups, -1, *own.shape[1:]).transpose(1, 2).reshape(groups, heads, -1, width)
        bias = None if self._bias is None else self._bias.to(query.dtype)
        found, found_sums = _attend(asked, prompt_keys, prompt_values, bias, scale)
        found = found.view(groups, heads, -1, own.shape[2], width).transpose(1, 2).reshape(-1, *own.shape[1:])
        found_sums = found_sums.reshape(groups, heads, -1, own.shape[2]).transpose(1, 2).reshape(-1, *own.shape[1:3])
        if self._places is not None:
            found, found_sums = found.index_select(0, self._places), found_sums.index_select(0, self._places)
        share = (found_sums - sums).sigmoid_().unsqueeze(-1).to(out.dtype)  # e^found / (e^found + e^own)
        return torch.lerp(out, found, share).reshape(rows, 1, -1, width)

    def _remember(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, Hkv, 1, D]; returns all of them so far."""
        room = self._own.get(layer)
        if room is None or room[0].shape[2] == self._length:
            empty = (value[:, :, :0], value[:, :, :0])
            room = self._own[layer] = tuple(self._with_room(t, self._length) for t in room or empty)
        for buffer, new in zip(room, (key, value), strict=True):
            buffer[:, :, self._length] = new[:, :, 0]
        end = self._length + 1
        return room[0][:, :, :end], room[1][:, :, :end]

    @staticmethod
    def _with_room(past: Tensor, length: int) -> Tensor:
        """The steps so far in a buffer with room for more."""
        rows, heads, _, width = past.shape
        buffer = past.new_empty(rows, heads, length + max(_FIRST_ROOM, length), width)
        buffer[:, :, :length] = past[:, :, :length]
        return buffer

    def _arrange(self) -> None:
        """Where the rows of each group stand, padded to the largest group; None where all are as large."""
        counts = self._group_of.bincount()
        largest = int(counts.max())
        if len(counts) * largest == len(self._group_of):
            self._slots = self._places = None
            return
        starts = counts.cumsum(0) - counts
        members = torch.arange(largest, device=self._device)
        self._slots = (starts.unsqueeze(-1) + members.minimum(counts.unsqueeze(-1) - 1)).flatten()
        within = torch.arange(len(self._group_of), device=self._device) - starts[self._group_of]
        self._places = self._group_of * largest + within


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """[n, H, L, D] -> output [n, H, L, D] and log-sum-exp [n, H, L]."""
    if query.device.type == "cpu":
        if bias is not None:
            bias = bias.expand(-1, -1, query.shape[2], -1)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found: tuple[Tensor, Tensor] = flash(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
        return found
    scores = (query @ key.transpose(2, 3)).float() * scale
    if bias is not None:
        scores = scores + bias
    sums = scores.logsumexp(-1)
    return (scores - sums.unsqueeze(-1)).exp().to(value.dtype) @ value, sums


def _chunks(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[Sequence[int]]]:
    """Prompts in order, as many together as stay within a budget of tokens."""
    chunks: list[list[Sequence[int]]] = []
    room = 0
    for prompt in prompts:
        if not chunks or len(prompt) > room:
            chunks.append([])
            room = tokens
        chunks[-1].append(prompt)
        room -= len(prompt)
    return chunks
