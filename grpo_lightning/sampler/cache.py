"""What the sampler remembers of the tokens so far: keys and values, a prompt's once for its whole group.

Shapes: P prompts, G completions per prompt, B = P * G rows, b of them in the batch now, which have p prompts; S tokens
of the longest prompt, T of the completions so far; Hq query heads, Hkv key heads, R = Hq / Hkv query heads that read
one key head, D the size of a head; H that of a hidden state, V that of the vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from grpo_lightning.distributed.ranks import ALONE, Ranks
from grpo_lightning.sampler.flat_decoder import FlatDecoder
from grpo_lightning.sampler.prefill import read_prompts
from grpo_lightning.sampler.prompt_attention import Grouping, attend
from grpo_lightning.transformer.attention import forward

PREFILL_TOKENS = 16384
"""The most prompt tokens that go through the model together."""
COPIED = 4 << 20
"""Bytes of a layer's prompt keys and values: with more, prompts are attended to once per group; as soon as so few
completions are left that copies for each would be smaller, they are copied. Reading is saved against operations."""
_FIRST_ROOM = 64
"""Tokens that a completion's first buffer has room for."""


class Cache(Protocol):
    """A model in the middle of its completions."""

    def start(self) -> Tensor:
        """Read the prompts; returns the logits [B, V] of every completion's first token."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token [b] to every completion that is held; returns the logits [b, V] of the next one."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drop all completions but these, given by their numbers in the batch in rising order."""
        ...


class PlainCache:
    """The model's own cache, in which every completion holds its prompt; it works with any causal language model.

    Args:
        model: A transformers causal language model.
        ids: [P, S] the prompts, padded on the left.
        attention_mask: [P, S] True on real tokens.
        group_size: Completions per prompt, G.
    """

    def __init__(self, model: Any, ids: Tensor, attention_mask: Tensor, group_size: int) -> None:
        self._model, self._ids, self._seen, self._group_size = model, ids, attention_mask.long(), group_size
        self._cache = DynamicCache(config=model.config)

    def start(self) -> Tensor:
        # Padding before the first real token would have the position -1; it is masked, so any position will do.
        output = self._model(
            input_ids=self._ids,
            attention_mask=self._seen,
            position_ids=(self._seen.cumsum(-1) - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache.batch_repeat_interleave(self._group_size)
        self._seen = self._seen.repeat_interleave(self._group_size, 0)  # [P, S] -> [B, S]
        logits: Tensor = output.logits[:, -1].repeat_interleave(self._group_size, 0)  # [P, V] -> [B, V]
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        position = self._seen.sum(-1, keepdim=True)  # [b, 1]
        self._seen = torch.cat([self._seen, self._seen.new_ones(len(tokens), 1)], 1)  # [b, S + T] -> [b, S + T + 1]
        logits: Tensor = self._model(
            input_ids=tokens.unsqueeze(-1),  # [b] -> [b, 1]
            attention_mask=self._seen,
            position_ids=position,
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        return logits

    def keep(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._seen = self._seen[rows]


class RecomputedCache:
    """No cache at all: every step computes all tokens so far again; it works with anything that gives logits.

    Args:
        logits: Token ids [b, S + T] -> logits [b, S + T, V] of a causal model.
        prompts: [P] the token ids of each prompt.
        group_size: Completions per prompt, G.
        pad_id: The token id that stands behind shorter rows.
        device: The device of the model.
    """

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        prompts: Sequence[Sequence[int]],
        group_size: int,
        *,
        pad_id: int,
        device: torch.device,
    ) -> None:
        self._logits, self._pad_id = logits, pad_id
        width = max(map(len, prompts))
        ids = torch.tensor([[*prompt, *[pad_id] * (width - len(prompt))] for prompt in prompts], device=device)
        self._ids = ids.repeat_interleave(group_size, 0)  # [P, S] -> [B, S]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._lengths = lengths.repeat_interleave(group_size)

    def start(self) -> Tensor:
        logits = self._logits(self._ids)  # [b, S + T, V]
        # Rows end at different places, since they are padded on the right: [b, S + T, V] -> [b, V].
        return logits[torch.arange(len(logits), device=logits.device), self._lengths - 1]

    def step(self, tokens: Tensor) -> Tensor:
        # Shorter rows have padding left to write to.
        if int(self._lengths.max()) == self._ids.shape[1]:
            self._ids = torch.nn.functional.pad(self._ids, (0, 1), value=self._pad_id)
        self._ids[torch.arange(len(tokens), device=tokens.device), self._lengths] = tokens
        self._lengths = self._lengths + 1
        return self.start()

    def keep(self, rows: Tensor) -> None:
        self._ids, self._lengths = self._ids[rows], self._lengths[rows]


class SharedPromptCache:
    """Keys and values of every completion, in room that is made beforehand, and of long prompts once per group.

    Every step attends to both and joins the two by their log-sum-exp, see `transformer.attention_cpu`. Short prompts
    are copied for every completion.

    Args:
        decoder: The model without its head.
        head: Hidden states [n, H] -> logits [n, V].
        prompts: [P] the token ids of each prompt.
        group_size: Completions per prompt, G.
        flat: A copy of the decoder for single tokens; None lets the decoder itself take them.
        ranks: The processes that may have to make every forward pass together.
    """

    def __init__(
        self,
        decoder: Any,
        head: Callable[[Tensor], Tensor],
        prompts: Sequence[Sequence[int]],
        group_size: int,
        *,
        flat: FlatDecoder | None,
        ranks: Ranks = ALONE,
    ) -> None:
        device = decoder.device
        self._decoder, self._head, self._prompts, self._device = decoder, head, prompts, device
        self._flat, self._ranks = flat, ranks
        self._group_of = torch.arange(len(prompts), device=device).repeat_interleave(group_size)
        self._positions = torch.tensor([len(prompt) for prompt in prompts], device=device)[self._group_of]
        self._length = 0
        """Tokens in the buffers of ``_own``: those of the completions, T, and S more once the prompts are copied."""
        self._shared: dict[int, tuple[Tensor, ...]] = {}
        """Layer -> keys and values [p, Hkv, S, D] of the prompts; empty once they are copied."""
        self._own: dict[int, tuple[Tensor, ...]] = {}
        """Layer -> keys and values [b, Hkv, room, D] of every completion."""
        self._bias: Tensor | None = None
        """-inf where a prompt is padded, else 0: [p, 1, 1, S], or [b, 1, 1, S] once the prompts are copied."""
        self._grouping = Grouping(self._group_of)

    def start(self) -> Tensor:
        last, self._shared, self._bias = read_prompts(
            self._decoder, self._prompts, tokens=PREFILL_TOKENS, ranks=self._ranks
        )
        self._maybe_copy()
        # The head is applied once per prompt: a group's first tokens are all drawn from the same distribution.
        logits: Tensor = self._head(last)
        return logits[self._group_of]  # [P, V] -> [B, V]

    def step(self, tokens: Tensor) -> Tensor:
        if self._flat:
            hidden = self._flat(tokens, self._positions, self)
        else:
            # [b] -> [b, 1] -> hidden [b, 1, H] -> [b, H]
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
        # Selecting copies all keys and values, so it waits until a prompt has lost its last completion.
        if self._shared and len(groups) < len(next(iter(self._shared.values()))[0]):
            self._shared = {layer: tuple(t[groups] for t in tensors) for layer, tensors in self._shared.items()}
        self._maybe_copy()
        self._grouping = Grouping(self._group_of)

    def _maybe_copy(self) -> None:
        """Put the prompts before every completion's own keys and values, if that is little."""
        if not self._shared:
            return
        prompt = next(iter(self._shared.values()))[0]
        longest, rows = prompt.shape[2], len(self._group_of)
        # Attending once per group takes a second call of the kernel and a dozen small operations in every layer, which
        # cost more than reading a short prompt again for each of its completions.
        if 2 * rows * prompt[0].numel() * prompt.element_size() > COPIED:
            return
        for layer, tensors in self._shared.items():
            own = self._own.get(layer)
            copied = [tensor[self._group_of] for tensor in tensors]  # [p, Hkv, S, D] -> [b, Hkv, S, D]
            if own is not None:
                # [b, Hkv, S, D] and [b, Hkv, T, D] -> [b, Hkv, S + T, D]
                copied = [torch.cat([a, b[:, :, : self._length]], 2) for a, b in zip(copied, own, strict=True)]
            self._own[layer] = tuple(self._with_room(t, self._length + longest) for t in copied)
        self._length += longest
        if self._bias is not None:
            self._bias = self._bias[self._group_of]  # [p, 1, 1, S] -> [b, 1, 1, S]
        self._shared = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        rows, heads, _, width = key.shape
        # Under autocast the rotation leaves queries and keys in float32.
        query = query.to(value.dtype)
        keys, values = self._append(layer, key, value)
        by_key_head = query.reshape(rows, heads, -1, width)  # [b, Hq, 1, D] -> [b, Hkv, R, D]
        if not self._shared:
            bias = self._bias
            # Only the prompts are padded: [b, 1, 1, S] -> [b, 1, 1, S + T].
            if bias is not None:
                bias = torch.nn.functional.pad(bias, (0, keys.shape[2] - bias.shape[-1])).to(query.dtype)
            # [b, Hkv, R, D] -> [b, 1, Hq, D]
            return attend(by_key_head, keys, values, bias, scale)[0].reshape(rows, 1, -1, width)
        output, sums = attend(by_key_head, keys, values, None, scale)
        bias = None if self._bias is None else self._bias.to(query.dtype)
        prompt_keys, prompt_values = self._shared[layer]
        from_prompt, prompt_sums = self._grouping.attend(by_key_head, prompt_keys, prompt_values, bias, scale)
        # e^prompt / (e^prompt + e^own) of the log-sum-exps, [b, Hkv, R] -> [b, Hkv, R, 1]; sigmoid never overflows.
        fraction = (prompt_sums - sums).sigmoid_().unsqueeze(-1).to(output.dtype)
        return torch.lerp(output, from_prompt, fraction).reshape(rows, 1, -1, width)  # [b, Hkv, R, D] -> [b, 1, Hq, D]

    def _append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [b, Hkv, 1, D]; returns all of them so far, [b, Hkv, T, D]."""
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
        """The first ``length`` keys or values in a buffer with room for more, [b, Hkv, room, D]."""
        # At least doubled: with a token more at each step, every step would copy all steps before it.
        rows, heads, _, width = past.shape
        buffer = past.new_empty(rows, heads, length + max(_FIRST_ROOM, length), width)
        buffer[:, :, :length] = past[:, :, :length]
        return buffer
