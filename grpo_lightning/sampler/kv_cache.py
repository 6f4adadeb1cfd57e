"""KV caches of unfinished completions, which `decode` extends token by token.

In `SharedPromptCache` the completions of a group share the keys and values of their prompt. Between two calls of
anything but ``step`` every tensor that a step reads or writes keeps its shape and its place in memory, and no operation
of it depends on a value: many steps can be queued on a GPU, or recorded and replayed.

Shapes: P prompts, G completions per prompt, B = P * G of them, numbered by prompt; b of them are held now, in slots 0
to b - 1; p prompts that they belong to, m completions of the largest group; S tokens of the longest prompt, T of the
completions so far; N tokens of a stream of prompts; C tokens that a step looks at; Hq query heads, Hkv key heads, R =
Hq / Hkv query heads that read one key head, D the size of a head; H that of a hidden state, V that of the vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from grpo_lightning.memory import COPIED, GiB, Shape
from grpo_lightning.sampler.fused_decode import FusedDecodeStep
from grpo_lightning.transformer import lm_head
from grpo_lightning.transformer.attention import Stream, forward, shared_prefix


class KVCache(ABC):
    """KV cache of a model and its unfinished completions. All but ``step`` may wait for results and move tensors.

    Args:
        prompts: [P] the token ids of each prompt.
        group_size: Completions per prompt, G.
        longest: Tokens that a prompt and its completion may have together.
        device: The device of the model.
    """

    is_static = False
    """Whether ``step`` makes the same operations, on tensors in the same places, as long as ``version`` is the same."""
    version = 0
    """Another number whenever ``step`` would use other tensors or shapes than it did."""

    def __init__(self, prompts: Sequence[Sequence[int]], group_size: int, longest: int, device: torch.device) -> None:
        self._prompts, self._group_size, self._longest, self.device = prompts, group_size, longest, device

    @abstractmethod
    def open(self, rows: Sequence[int]) -> Tensor:
        """Hold these completions [b] and no others; returns the logits [b, V] of their first tokens."""

    def reserve(self, tokens: int) -> None:  # noqa: B027
        """Make room for so many more tokens of each; they are then appended by as many calls of ``step``."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Append a token [b] to every completion; returns the logits [b, V] of the next one."""

    @abstractmethod
    def rewind(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Forget what the completions [n] in some slots have behind their first ``tokens`` [n] tokens."""

    @abstractmethod
    def keep(self, slots: Sequence[int]) -> None:
        """Drop all completions but those in these slots, given in rising order, which become slots 0, 1, ..."""


def can_rewind(model: Any) -> bool:
    """Whether `DynamicKVCache` can forget tokens of a transformers model.

    A sliding window would still reach back over them, and a recurrent state would still hold them.
    """
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


class DynamicKVCache(KVCache):
    """The cache of transformers, in which every completion holds its prompt; it works with any causal language model.

    Args:
        model: A transformers causal language model.
        pad_id: The token id that stands before shorter prompts; other arguments as in `KVCache`.
    """

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], group_size: int, *, longest: int, pad_id: int
    ) -> None:
        super().__init__(prompts, group_size, longest, model.device)
        self._model, self._pad_id = model, pad_id

    def open(self, rows: Sequence[int]) -> Tensor:
        groups = [row // self._group_size for row in rows]
        distinct = list(dict.fromkeys(groups))  # each prompt once
        prompts = [self._prompts[prompt] for prompt in distinct]
        width, device = max(map(len, prompts)), self.device
        ids = torch.tensor([[self._pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
        seen = (torch.arange(width, device=device) >= width - lengths).long()  # [P, S]
        self._cache = DynamicCache(config=self._model.config)
        # Padding before the first real token would have the position -1; it is masked, so any position will do.
        output = self._model(
            input_ids=ids,
            attention_mask=seen,
            position_ids=(seen.cumsum(-1) - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        of_row = torch.tensor([distinct.index(group) for group in groups], device=device)
        self._cache.batch_select_indices(of_row)
        self._seen = seen[of_row]  # [P, S] -> [b, S]
        self._firsts = lengths[of_row]  # [P, 1] -> [b, 1]
        logits: Tensor = output.logits[:, -1][of_row]  # [P, V] -> [b, V]
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        # Completions that have ended go on like the others, but not beyond what the model has positions for.
        position = self._seen.sum(-1, keepdim=True).clamp(max=self._longest - 1)  # [b, 1]
        self._seen = torch.cat([self._seen, self._seen.new_ones(len(tokens), 1)], 1)  # [b, S + T] -> [b, S + T + 1]
        logits: Tensor = self._model(
            input_ids=tokens.unsqueeze(-1),  # [b] -> [b, 1]
            attention_mask=self._seen,
            position_ids=position,
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        return logits

    def rewind(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        places, counts = (torch.tensor(values, device=self.device) for values in (slots, tokens))
        seen, limit = self._seen[places], self._firsts[places] + counts.unsqueeze(-1)
        self._seen[places] = seen.where(seen.cumsum(-1) <= limit, 0)  # a gap, which the mask leaves out

    def keep(self, slots: Sequence[int]) -> None:
        chosen = torch.tensor(slots, device=self.device)
        self._cache.batch_select_indices(chosen)
        self._seen, self._firsts = self._seen[chosen], self._firsts[chosen]


class NoKVCache(KVCache):
    """No cache at all: every step computes all tokens so far again; it works with anything that gives logits.

    Args:
        logits: Token ids [b, S + T] -> logits [b, S + T, V] of a causal model.
        pad_id: The token id that stands behind shorter rows; other arguments as in `KVCache`.
    """

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        prompts: Sequence[Sequence[int]],
        group_size: int,
        *,
        longest: int,
        pad_id: int,
        device: torch.device,
    ) -> None:
        super().__init__(prompts, group_size, longest, device)
        self._logits, self._pad_id = logits, pad_id

    def open(self, rows: Sequence[int]) -> Tensor:
        prompts = [self._prompts[row // self._group_size] for row in rows]
        ids = [list(prompt) + [self._pad_id] * (self._longest - len(prompt)) for prompt in prompts]
        self._ids = torch.tensor(ids, device=self.device)
        self._firsts = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self._lengths = self._firsts.clone()
        return self._next()

    def step(self, tokens: Tensor) -> Tensor:
        self._ids[torch.arange(len(tokens), device=tokens.device), self._lengths] = tokens
        # Completions that have ended go on like the others, but not for ever.
        self._lengths = (self._lengths + 1).clamp(max=self._longest - 1)
        return self._next()

    def rewind(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        places, counts = (torch.tensor(values, device=self.device) for values in (slots, tokens))
        self._lengths[places] = self._firsts[places] + counts

    def keep(self, slots: Sequence[int]) -> None:
        chosen = torch.tensor(slots, device=self.device)
        self._ids, self._lengths, self._firsts = self._ids[chosen], self._lengths[chosen], self._firsts[chosen]

    def _next(self) -> Tensor:
        logits = self._logits(self._ids[:, : int(self._lengths.max())])  # [b, S + T, V]
        # Rows end at different places, since they are padded on the right: [b, S + T, V] -> [b, V].
        return logits[torch.arange(len(logits), device=logits.device), self._lengths - 1]


def rows_within(gib: float, shape: Shape, *, number_bytes: int, longest: int) -> int:
    """How many completions can be held at a time, each with room for its prompt and all its tokens.

    Args:
        gib: The budget in GiB.
        shape: The model's sizes.
        number_bytes: The bytes of a number among keys and values.
        longest: The most tokens of a prompt and its completion.

    Raises:
        ValueError: Not even one fits.
    """
    row = 2 * number_bytes * shape.keys * shape.layers * longest / GiB
    if gib < row:
        raise ValueError(
            f"rollout.kv_cache_gib={gib} must be at least {math.ceil(row * 1e4) / 1e4:.4f}: a prompt and its "
            f"completion have up to {longest} tokens"
        )
    return int(gib / row)


Pair = tuple[Tensor, Tensor]
"""Keys and values, or an attention's output and the log-sum-exp of its scores."""

PREFILL_TOKENS = 16384
"""The most prompt tokens that go through the model together."""
FIRST_ROOM, FIRST_ROOM_GPU = 64, 256
"""Tokens that a completion has room for at first, at least; more on a GPU, where every size has to be recorded."""
_WIDTH, _WIDTH_GPU = 32, 256
"""Rows of different lengths look at the next multiple of so many tokens, at least."""
_ALIGNED = 8
"""Numbers of 16 bits in 16 bytes, at multiples of which the kernels for GPUs want rows to begin."""
_MAX_HEAD_SIZE = 256
"""The size of a head that FlashAttention takes at most."""


class SharedPromptCache(KVCache):
    """KV cache that holds each prompt once for its group; needs a decoder whose attention can be replaced.

    Every step attends to a completion's own tokens and to its prompt and joins the two by their log-sum-exp, see
    `transformer.attention`. Short prompts are copied before every completion's own tokens.

    Args:
        decoder: The model without its head.
        head: Hidden states [n, H] -> logits [n, V]; the next three arguments are as in `KVCache`.
        fused: A copy of the decoder for single tokens; None lets the decoder itself take them.
        is_static: Whether the decoder makes the same operations whatever the tokens are.
    """

    def __init__(
        self,
        decoder: Any,
        head: Callable[[Tensor], Tensor],
        prompts: Sequence[Sequence[int]],
        group_size: int,
        *,
        longest: int,
        fused: FusedDecodeStep | None,
        is_static: bool,
    ) -> None:
        super().__init__(prompts, group_size, longest, decoder.device)
        self._decoder, self._head, self._fused = decoder, head, fused
        self._on_cpu = self.device.type == "cpu"
        self._compiles = lm_head.should_compile(decoder.get_input_embeddings().weight)
        self._store = lm_head.compile_function(store) if self._compiles else store
        self._merge = lm_head.compile_function(merge_attention) if self._compiles else merge_attention
        self.version, self.is_static = 0, is_static
        self._shared: dict[int, Pair] = {}
        """Layer -> keys and values [p, Hkv, S, D] that the completions attend to; empty where each has a copy."""
        self._own: dict[int, Pair] = {}
        """Layer -> keys and values [b, Hkv, room, D] of every completion, behind its prompt where that is copied."""
        self._group_of: list[int] = []  # [b] the number of each completion's prompt among the p
        self._held: list[int] = []
        """[b] how many tokens each slot of ``_own`` holds: `_lengths`, as this side of the device knows them."""
        self._starts: list[int] = []  # [b] where in its slot of ``_own`` a completion's own tokens begin
        self._lengths = self._before = torch.empty(0)
        """[b] tokens of a completion in ``_own``, and those before them that are not."""
        self._prompt_lengths: list[int] = []  # [p]
        self._grouping: Grouping | None = None
        self._bias: Tensor | None = None
        """[p, 1, 1, S] what is added to the attention scores of the prompts, if anything."""
        self._width = 0  # C
        self._even: int | None = None
        """How many tokens every slot holds, where on a CPU that is the same for all: no mask is needed."""
        self._mask: Tensor | KeyCounts | None = None
        """Which keys are looked at, as `attend` takes it, in the step that is being made."""

    def open(self, rows: Sequence[int]) -> Tensor:
        groups = [row // self._group_size for row in rows]
        distinct = sorted(set(groups))
        self._group_of = [distinct.index(group) for group in groups]
        prompts = [self._prompts[group] for group in distinct]
        hidden, self._shared = prefill(self._decoder, prompts, tokens=PREFILL_TOKENS)
        self._prompt_lengths = [len(prompt) for prompt in prompts]
        of_row = torch.tensor(self._group_of, device=self.device)
        # Room for no token: [p, Hkv, S, D] -> [b, Hkv, 0, D]
        self._own = {layer: (k[of_row, :, :0], v[of_row, :, :0]) for layer, (k, v) in self._shared.items()}
        self._held, self._starts = [0] * len(rows), [0] * len(rows)
        self._before = torch.tensor(self._prompt_lengths, device=self.device)[of_row]
        self._lengths = torch.zeros_like(self._before)
        self._share_or_copy()
        self.version += 1
        # The head is applied once per prompt: a group's first tokens are all sampled from the same distribution.
        logits: Tensor = self._head(hidden)[of_row]
        return logits

    def reserve(self, tokens: int) -> None:
        limit = self._capacity()
        wanted = min(max(self._held) + tokens, limit)
        if (old := self._room) < wanted:
            for layer, (key, value) in self._own.items():
                self._own[layer] = with_room(key, old, wanted, limit), with_room(value, old, wanted, limit)
            self.version += 1
        is_even = self._on_cpu and tokens == 1 and len(set(self._held)) == 1
        self._even = self._held[0] if is_even else None
        # A GPU repeats what was recorded for one width, so it gets fewer of them; one that counts keys needs none.
        unit = _WIDTH if self._on_cpu else max(_WIDTH_GPU, self._room // 4)
        unit = self._room if counts_keys(self._own) else unit
        width = wanted if is_even else min(-(-wanted // unit) * unit, self._room)
        if width != self._width:
            self._width = width
            self.version += 1
        self._held = [min(held + tokens, limit - 1) for held in self._held]

    def rewind(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        for slot, count in zip(slots, tokens, strict=True):
            self._held[slot] = self._starts[slot] + count
        self._lengths.copy_(torch.tensor(self._held))  # in its place, where a recorded step finds it

    def keep(self, slots: Sequence[int]) -> None:
        chosen = torch.tensor(slots, device=self.device)
        self._held, self._group_of, self._starts = (
            [values[slot] for slot in slots] for values in (self._held, self._group_of, self._starts)
        )
        self._lengths, self._before = self._lengths[chosen], self._before[chosen]
        # They move to the front of the room that there is: no more of it is made, none is given back until it grows.
        count, tokens = len(slots), max(self._held)
        for layer, pair in self._own.items():
            for tensor in pair:
                tensor[:count, :, :tokens] = tensor[chosen, :, :tokens]
            self._own[layer] = pair[0][:count], pair[1][:count]
        if self._shared:
            active = sorted(set(self._group_of))
            # Selecting copies all keys and values, so it waits until a prompt has lost its last completion.
            if len(active) < len(self._prompt_lengths):
                rest = torch.tensor(active, device=self.device)
                self._shared = {layer: (key[rest], value[rest]) for layer, (key, value) in self._shared.items()}
                self._prompt_lengths = [self._prompt_lengths[prompt] for prompt in active]
                self._group_of = [active.index(group) for group in self._group_of]
            self._share_or_copy()
        self.version += 1

    def _share_or_copy(self) -> None:
        """Give every completion a copy of its prompt, where so few are held that this takes little memory."""
        prompt = next(iter(self._shared.values()))[0]  # [p, Hkv, S, D]
        # Attending once per group takes a second call of the kernel and a dozen small operations in every layer, which
        # cost more than reading a short prompt again for each of its completions.
        size = 2 * len(self._group_of) * prompt[0].numel() * prompt.element_size()
        if size <= COPIED["cpu" if self._on_cpu else "cuda"]:
            self._copy_prompts()
            return
        self._grouping = Grouping(self._group_of, len(prompt), device=self.device)
        lengths = torch.tensor(self._prompt_lengths, device=self.device).unsqueeze(-1)
        padding = torch.arange(prompt.shape[2], device=self.device) >= lengths  # [p, S]
        is_padded = min(self._prompt_lengths) < prompt.shape[2]
        self._bias = exclusion_bias(padding, prompt.dtype) if is_padded else None

    def _copy_prompts(self) -> None:
        """Put its prompt before every completion's own keys and values, without a gap."""
        groups, tokens = torch.tensor(self._group_of, device=self.device), max(self._held)
        # [b, tokens] -> [b, 1, tokens, 1]
        places = (self._before.unsqueeze(-1) + torch.arange(tokens, device=self.device))[:, None, :, None]
        for layer, shared in self._shared.items():
            pair = []
            for prompt, own in zip(shared, self._own[layer], strict=True):
                size = prompt.shape[2]
                # [p, Hkv, S, D] -> [b, Hkv, S, D]
                buffer = with_room(prompt[groups], size, size + tokens, self._longest)
                pair.append(buffer.scatter_(2, places.expand(-1, own.shape[1], -1, own.shape[3]), own[:, :, :tokens]))
            self._own[layer] = pair[0], pair[1]
        self._shared, self._grouping = {}, None
        self._starts = self._before.tolist()
        self._held = [held + first for held, first in zip(self._held, self._starts, strict=True)]
        self._lengths, self._before = self._lengths + self._before, torch.zeros_like(self._before)

    def _capacity(self) -> int:
        """The most tokens that a slot ever has to hold."""
        return self._longest - (max(map(len, self._prompts)) if self._shared else 0)

    @property
    def _room(self) -> int:
        """The tokens that every slot has room for."""
        return next(iter(self._own.values()))[0].shape[2]

    # A step: nothing below looks at a value or takes memory that a later step would not find again.

    def step(self, tokens: Tensor) -> Tensor:
        if self._even is None:
            self._mask = self._visible_keys()
        positions = self._before + self._lengths
        if self._fused:
            with lm_head.compile_options() if self._compiles else nullcontext():
                hidden = self._fused(tokens, positions, self)
        else:
            # [b] -> [b, 1] -> hidden [b, 1, H] -> [b, H]
            hidden = forward(self._decoder, tokens.unsqueeze(-1), positions.unsqueeze(-1), self)[:, 0]
        # Completions that have ended go on like the others until they are dropped, but not for ever.
        self._lengths.add_(1).clamp_(max=self._capacity() - 1)
        logits: Tensor = self._head(hidden)
        return logits

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """As `transformer.attention.Attention`."""
        rows, heads, _, width = key.shape
        # Under autocast the rotation leaves queries and keys in float32.
        query, key = query.to(value.dtype), key.to(value.dtype)
        keys, values = self._own[layer]
        if self._even is not None:
            keys[:, :, self._even], values[:, :, self._even] = key[:, :, 0], value[:, :, 0]
        else:
            self._store(keys, values, key, value, self._lengths)
        keys, values = keys[:, :, : self._width], values[:, :, : self._width]
        by_key_head = query.reshape(rows, heads, -1, width)  # [b, Hq, 1, D] -> [b, Hkv, R, D]
        output, sums = attend(by_key_head, keys, values, None if self._even is not None else self._mask, scale)
        if self._grouping is not None:
            from_prompt, prompt_sums = self._grouping.attend(by_key_head, *self._shared[layer], self._bias, scale)
            output = self._merge(output, sums, from_prompt, prompt_sums)
        return output.reshape(rows, 1, -1, width)  # [b, Hkv, R, D] -> [b, 1, Hq, D]

    def _visible_keys(self) -> "Tensor | KeyCounts":
        """Which of its keys every completion looks at, as `attend` takes it."""
        lengths, keys = self._lengths, next(iter(self._own.values()))[0]
        if counts_keys(self._own):
            numbers = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
            return KeyCounts(lengths.int() + 1, numbers, numbers * (keys.stride(0) // keys.shape[-1]))
        hidden = torch.arange(self._width, device=lengths.device) > lengths.unsqueeze(-1)  # [b, C]
        return exclusion_bias(hidden, keys.dtype)


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


class _Recording:
    """A stream of prompts whose keys and values [N, Hkv, D] are recorded by layer."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.layers: dict[int, Pair] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # [1, Hkv, N, D] -> [N, Hkv, D]
        self.layers[layer] = key[0].transpose(0, 1).to(value.dtype), value[0].transpose(0, 1)
        return self.stream.attend(layer, query, key, value, scale)


def prefill(decoder: Any, prompts: Sequence[Sequence[int]], *, tokens: int) -> tuple[Tensor, dict[int, Pair]]:
    """Read prompts before the first token of their completions is sampled, as streams without padding.

    Args:
        decoder: The model without its head.
        prompts: [P] the token ids of each prompt.
        tokens: The most tokens in one forward pass; a prompt that is longer goes alone.

    Returns:
        Hidden states [P, H] of the prompts' last tokens; and layer -> keys and values [P, Hkv, S, D], which mean
        nothing behind a shorter prompt.
    """
    device, longest = decoder.device, max(map(len, prompts))
    chunks: list[list[Sequence[int]]] = []
    room = 0
    for prompt in prompts:
        if not chunks or len(prompt) > room:
            chunks.append([])
            room = tokens
        chunks[-1].append(prompt)
        room -= len(prompt)
    hidden, layers = [], []
    for chunk in chunks:
        prefix = shared_prefix(decoder, chunk)
        recording = _Recording(Stream(tuple((len(prompt) - prefix, ()) for prompt in chunk), device, prefix))
        rest = [token for prompt in chunk for token in prompt[prefix:]]
        ids = torch.tensor([*chunk[0][:prefix], *rest], device=device)
        states = forward(decoder, ids[None], recording.stream.positions, recording)[0]  # [1, N, H] -> [N, H]
        starts = torch.tensor([[start] for start, _, _ in recording.stream.spans], device=device)
        # [p, 1] with [S] -> [p, S]; behind a shorter prompt stand its neighbour's keys, which nobody asks for.
        steps = torch.arange(longest, device=device)
        places = (starts - prefix + steps).clamp(max=len(ids) - 1).where(steps >= prefix, steps)
        hidden.append(states[torch.tensor([end - 1 for _, end, _ in recording.stream.spans], device=device)])
        # [N, Hkv, D] -> [p, S, Hkv, D] -> [p, Hkv, S, D]
        layers.append(
            {n: [t[places].transpose(1, 2).contiguous() for t in pair] for n, pair in recording.layers.items()}
        )
    pairs = {n: zip(*(part[n] for part in layers), strict=True) for n in layers[0]}  # all keys, then all values
    return torch.cat(hidden), {n: (torch.cat(keys), torch.cat(values)) for n, (keys, values) in pairs.items()}


class Grouping:
    """Which rows belong to one prompt, and where they stand once every group is padded to the largest one.

    Args:
        group_of: [b] the number of each row's prompt, from 0 to p - 1; every prompt has a row.
        groups: Prompts, p.
        device: Where the rows are.
    """

    def __init__(self, group_of: Sequence[int], groups: int, *, device: torch.device) -> None:
        rows_of: list[list[int]] = [[] for _ in range(groups)]
        places = []
        largest = max(map(group_of.count, range(groups)))
        for row, group in enumerate(group_of):
            places.append(group * largest + len(rows_of[group]))
            rows_of[group].append(row)
        # A smaller group repeats a row of its own.
        slots = [row for rows in rows_of for row in rows + rows[-1:] * (largest - len(rows))]
        self._slots: Tensor | None = None
        """[p * m] the row in every place; None where every row is in the place of its number."""
        self._places: Tensor | None = None  # [b] the place of every row
        if slots != list(range(len(group_of))):
            self._slots, self._places = (torch.tensor(numbers, device=device) for numbers in (slots, places))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Pair:
        """Attention of every row's query [b, Hkv, R, D] to its prompt's keys and values [p, Hkv, S, D], read once.

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

    tokens: Tensor  # [b]
    queries: Tensor  # [b + 1] where the query of each row begins
    firsts: Tensor  # [b + 1] where the keys of each row begin, in rows of D numbers


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | KeyCounts | None, scale: float) -> Pair:
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
        if bias is not None:
            bias = bias.expand(-1, -1, query.shape[2], -1)  # [n, 1, 1, S] -> [n, 1, L, S]
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        results: Pair = flash(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
        return results
    if _is_aligned(query):
        if bias is not None:
            bias = bias.expand(-1, query.shape[1], query.shape[2], -1)  # [n, 1, 1, S] -> [n, Hkv, L, S]
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        output, sums, *_ = efficient(query, key, value, bias, True, scale=scale)
        return output, sums[..., : query.shape[2]]  # which has room for a multiple of 32 queries
    return attend_written_out(query, key, value, bias, scale)


def _attend_counted(query: Tensor, key: Tensor, value: Tensor, counts: KeyCounts, scale: float) -> Pair:
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


def attend_written_out(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Pair:
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


def counts_keys(layers: Mapping[int, Pair]) -> bool:
    """Whether the kernel for keys and values of all layers is told how many of them a row looks at.

    That is FlashAttention, which NVIDIA's GPUs from Ampere on have. It needs all layers to lie in memory alike.
    """
    keys = next(iter(layers.values()))[0]
    if not _is_aligned(keys) or keys.shape[-1] > _MAX_HEAD_SIZE or torch.version.hip is not None:
        return False
    is_there = torch.backends.cuda.is_flash_attention_available()
    if not is_there or torch.cuda.get_device_capability(keys.device) < (8, 0):
        return False
    return len({(tensor.shape, tensor.stride()) for pair in layers.values() for tensor in pair}) == 1


def _is_aligned(tensor: Tensor) -> bool:
    """Whether torch's attention kernels for GPUs take it."""
    return tensor.device.type == "cuda" and tensor.element_size() == 2 and tensor.shape[-1] % _ALIGNED == 0
