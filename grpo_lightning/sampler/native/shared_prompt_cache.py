"""The KV cache in which a group shares its prompt: keys and values of long prompts are held once per group.

Between two calls of anything but ``step`` every tensor that a step reads or writes keeps its shape and its place in
memory, and no operation of it depends on a value: many steps can be queued on a GPU, or recorded and replayed.

Shapes: P prompts, G completions per prompt, B = P * G of them; b of them are held now, in slots; p prompts that they
belong to; S tokens of the longest prompt; N tokens of a stream of prompts; C tokens that a step looks at; Hq query
heads, Hkv key heads, R = Hq / Hkv query heads that read one key head, D the size of a head; H that of a hidden state, V
that of the vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.memory import COPIED
from grpo_lightning.sampler.native.attention import (
    Grouping,
    KeyCounts,
    attend,
    counts_keys,
    exclusion_bias,
    merge_attention,
    visible_keys,
)
from grpo_lightning.sampler.native.fused_decode import FusedDecodeStep
from grpo_lightning.sampler.native.kv_cache import KVCache
from grpo_lightning.transformer import lm_head
from grpo_lightning.transformer.attention import Stream, forward

Pair = tuple[Tensor, Tensor]
"""Keys and values."""

PREFILL_TOKENS = 16384
"""The most prompt tokens that go through the model together."""
FIRST_ROOM, FIRST_ROOM_GPU = 64, 256
"""Tokens that a completion has room for at first, at least; more on a GPU, where every size has to be recorded."""
_WIDTH, _WIDTH_GPU = 32, 256
"""Rows of different lengths look at the next multiple of so many tokens, at least."""


class SharedPromptCache(KVCache):
    """A decoder whose attention can be replaced, in the middle of its completions.

    Every step attends to a completion's own tokens and to its prompt and joins the two by their log-sum-exp, see
    `transformer.attention_cpu`. Short prompts are copied before every completion's own tokens.

    Args:
        decoder: The model without its head.
        head: Hidden states [n, H] -> logits [n, V].
        prompts: As in `KVCache`, like the next two.
        group_size: G
        longest: The most tokens.
        fused: A copy of the decoder for single tokens; None lets the decoder itself take them.
        windows: How many tokens back each layer's attention reaches, by layer; empty where all reach all the way.
        is_static: Whether the decoder makes the same operations whatever the tokens are.
    """

    refills = True

    def __init__(
        self,
        decoder: Any,
        head: Callable[[Tensor], Tensor],
        prompts: Sequence[Sequence[int]],
        group_size: int,
        *,
        longest: int,
        fused: FusedDecodeStep | None,
        windows: Mapping[int, int],
        is_static: bool,
    ) -> None:
        super().__init__(prompts, group_size, longest)
        self._decoder, self._head, self._fused, self._windows = decoder, head, fused, windows
        self._device: torch.device = decoder.device
        self._on_cpu = self._device.type == "cpu"
        self._compiles = lm_head.worth_compiling(decoder.get_input_embeddings().weight)
        self._store = lm_head.compiled(store) if self._compiles else store
        self._merge = lm_head.compiled(merge_attention) if self._compiles else merge_attention
        self.version, self.is_static, self.extends = 0, is_static, not windows
        self._num_waiting = len(prompts) * group_size
        """Completions that have not been held yet."""
        self._prefilled: Prefilled | None = None
        self._shared: dict[int, Pair] = {}
        """Layer -> keys and values [p, Hkv, S, D] that the completions attend to; empty where each has a copy."""
        self._buffers = Buffers({}, 0)
        """Keys and values of every completion, behind its prompt where that is copied."""
        self._group_of: list[int] = []
        """[b] the number of each completion's prompt."""
        self._held: list[int] = []
        """[b] how many tokens each slot of ``_buffers`` holds: `_lengths`, as this side of the device knows them."""
        self._starts: list[int] = []
        """[b] where in its slot of ``_buffers`` a completion's own tokens begin."""
        self._lengths = torch.empty(0)
        self._before = torch.empty(0)
        """[b] tokens of a completion that are not in its ``_buffers``."""
        self._refilled = False
        """Whether completions take the places of others."""
        self._grouping: Grouping | None = None
        self._span = slice(0, 0)
        """The prompts among which those of the completions lie."""
        self._padding: Tensor | None = None
        """[P, S] where a prompt is padded; None where none is."""
        self._bias: Tensor | None = None
        """[p, 1, 1, S] what is added to the attention scores of the prompts in `_span`, if anything."""
        self._width = 0
        """C"""
        self._even: int | None = None
        """How many tokens every slot holds, where on a CPU that is the same for all: no mask is needed."""
        self._masks: dict[int | None, Tensor | KeyCounts] = {}
        """Window -> which keys are looked at, as `attend` takes it, in the step that is being made."""

    def open(self, rows: Sequence[int]) -> Tensor:
        if self._prefilled is None:
            self._prefilled = prefill(self._decoder, self._prompts, tokens=PREFILL_TOKENS)
        read, size = self._prefilled, len(rows)
        self._refilled = self._num_waiting > size
        self._group_of, self._held, self._starts = ([0] * size for _ in range(3))
        self._lengths, self._before = torch.zeros(2, size, dtype=torch.long, device=self._device)
        self._shared = {} if self._windows or self._copies(read.keys, size) else dict(read.keys)
        self._buffers = Buffers(read.keys, size)
        lengths = torch.tensor(read.lengths, device=self._device).unsqueeze(-1)
        padding = torch.arange(max(read.lengths), device=self._device) >= lengths  # [P, S]
        self._padding = padding if len(set(read.lengths)) > 1 else None
        return self.fill(range(size), rows)

    def fill(self, slots: Sequence[int], rows: Sequence[int]) -> Tensor:
        if self._prefilled is None:
            raise RuntimeError("nothing is held yet")
        read = self._prefilled
        self._num_waiting -= len(rows)
        groups = [row // self._group_size for row in rows]
        # Where a completion's own tokens begin.
        starts = [0 if self._shared else read.lengths[group] for group in groups]
        for slot, group, first in zip(slots, groups, starts, strict=True):
            self._group_of[slot] = group
            self._starts[slot] = self._held[slot] = first
        self._grow(max(*self._held, 0 if self._shared else max(read.lengths)))
        places, prompts = (torch.tensor(numbers, device=self._device) for numbers in (list(slots), groups))
        if not self._shared:
            for layer, pair in read.keys.items():
                for buffer, prompt in zip(self._buffers[layer], pair, strict=True):
                    buffer[places, :, : prompt.shape[2]] = prompt[prompts]  # [P, Hkv, S, D] -> [n, Hkv, S, D]
        self._copy_lengths(slots)
        lengths = torch.tensor(read.lengths, device=self._device)
        self._before[places] = lengths[prompts] if self._shared else torch.zeros_like(prompts)
        # The head is applied once per prompt: a group's first tokens are all sampled from the same distribution.
        number = {group: i for i, group in enumerate(sorted(set(groups), key=str))}  # another order rounds otherwise
        hidden = torch.stack([read.hidden[group] for group in number])
        chosen = torch.tensor([number[group] for group in groups], device=self._device)
        logits: Tensor = self._head(hidden)[chosen]
        if not self._num_waiting:
            read.keys = {}
        if self._shared:
            self._regroup()
        return logits

    def reserve(self, tokens: int) -> None:
        limit = self._capacity()
        wanted = min(max(self._held) + tokens, limit)
        self._grow(wanted)
        is_even = self._on_cpu and tokens == 1 and not self._windows and len(set(self._held)) == 1
        self._even = self._held[0] if is_even else None
        room = self._buffers.room
        # A GPU repeats what was recorded for one width, so it gets fewer of them; one that counts keys needs none.
        unit = _WIDTH if self._on_cpu else max(_WIDTH_GPU, room // 4)
        unit = room if self._buffers.counts_keys() and not self._windows else unit
        width = wanted if is_even else min(-(-wanted // unit) * unit, room)
        if width != self._width:
            self._width = width
            self.version += 1
        self._held = [min(held + tokens, limit - 1) for held in self._held]

    def extend(self, slots: Sequence[int], rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        prompts = [self._prompts[row // self._group_size] for row in rows]
        read = prefill(self._decoder, prompts, completions=tokens, tokens=PREFILL_TOKENS)
        for slot, own in zip(slots, tokens, strict=True):
            self._held[slot] = self._starts[slot] + len(own)
        self._grow(max(self._held))
        for slot, (_, pairs) in zip(slots, read.completions, strict=True):
            for layer, pair in pairs.items():
                for buffer, values in zip(self._buffers[layer], pair, strict=True):
                    buffer[slot, :, self._starts[slot] : self._held[slot]] = values
        self._copy_lengths(slots)
        logits: Tensor = self._head(torch.stack([hidden for hidden, _ in read.completions]))
        return logits

    def rewind(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        for slot, count in zip(slots, tokens, strict=True):
            self._held[slot] = self._starts[slot] + count
        self._copy_lengths(slots)

    def keep(self, slots: Sequence[int]) -> None:
        chosen = torch.tensor(slots, device=self._device)
        self._held, self._group_of, self._starts = (
            [values[slot] for slot in slots] for values in (self._held, self._group_of, self._starts)
        )
        self._lengths, self._before = self._lengths[chosen], self._before[chosen]
        self._buffers.keep(chosen, max(self._held))
        if self._shared:
            active = sorted(set(self._group_of))
            # Selecting copies all keys and values, so it waits until a prompt has lost its last completion.
            if len(active) < len(next(iter(self._shared.values()))[0]):
                rest = torch.tensor(active, device=self._device)
                self._shared = {layer: (key[rest], value[rest]) for layer, (key, value) in self._shared.items()}
                self._padding = None if self._padding is None else self._padding[rest]
                self._group_of = [active.index(group) for group in self._group_of]
            self._refilled = False
            if self._copies(self._shared, len(slots)):
                self._copy_prompts()
            else:
                self._regroup()
        self.version += 1

    def _copy_lengths(self, slots: Sequence[int]) -> None:
        """Copy to the device how many tokens some slots hold."""
        places, held = (torch.tensor(v, device=self._device) for v in (list(slots), [self._held[s] for s in slots]))
        self._lengths[places] = held

    def _copies(self, shared: Mapping[int, Pair], rows: int) -> bool:
        """Whether every completion is to have its prompt for itself, if so many are held."""
        prompt = next(iter(shared.values()))[0]
        # Attending once per group takes a second call of the kernel and a dozen small operations in every layer, which
        # cost more than reading a short prompt again for each of its completions.
        return 2 * rows * prompt[0].numel() * prompt.element_size() <= COPIED["cuda" if prompt.is_cuda else "cpu"]

    def _copy_prompts(self) -> None:
        """Put the prompts before every completion's own keys and values."""
        groups = torch.tensor(self._group_of, device=self._device)
        self._buffers.prepend(self._shared, groups, self._before, max(self._held), self._longest)
        self._shared, self._grouping = {}, None
        self._starts = self._before.tolist()
        self._held = [held + first for held, first in zip(self._held, self._starts, strict=True)]
        self._lengths, self._before = self._lengths + self._before, torch.zeros_like(self._before)

    def _regroup(self) -> None:
        """Look again at which completions share a prompt."""
        count = len(next(iter(self._shared.values()))[0])
        # On a CPU only the prompts from the first to the last that are needed; a GPU repeats the same operations.
        first, end = (min(self._group_of), max(self._group_of) + 1) if self._on_cpu else (0, count)
        fixed = self._refilled and not self._on_cpu
        members = min(self._group_size, len(self._group_of)) if fixed else None
        grouping = Grouping(
            [group - first for group in self._group_of], end - first, members=members, device=self._device
        )
        if fixed and self._grouping is not None and self._grouping.become(grouping):
            return
        self._span, self._grouping = slice(first, end), grouping
        self.version += 1
        # Only prompts of different lengths need a mask.
        self._bias = (
            None if self._padding is None else exclusion_bias(self._padding[self._span], self._buffers.keys.dtype)
        )

    def _capacity(self) -> int:
        """The most tokens that a slot ever has to hold."""
        return self._longest - (max(map(len, self._prompts)) if self._shared else 0)

    def _grow(self, tokens: int) -> None:
        """Make room for so many tokens in every slot."""
        self.version += self._buffers.grow(tokens, self._capacity())

    # A step: nothing below looks at a value or takes memory that a later step would not find again.

    def step(self, tokens: Tensor) -> Tensor:
        if self._even is None:
            self._masks = {
                window: visible_keys(
                    self._lengths, self._buffers.keys, self._width, window, self._buffers.counts_keys()
                )
                for window in {None, *self._windows.values()}
            }
        positions = self._before + self._lengths
        if self._fused:
            with lm_head.compiling() if self._compiles else nullcontext():
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
        keys, values = self._buffers[layer]
        if self._even is not None:
            keys[:, :, self._even], values[:, :, self._even] = key[:, :, 0], value[:, :, 0]
            mask = None
        else:
            self._store(keys, values, key, value, self._lengths)
            mask = self._masks[self._windows.get(layer)]
        keys, values = keys[:, :, : self._width], values[:, :, : self._width]
        by_key_head = query.reshape(rows, heads, -1, width)  # [b, Hq, 1, D] -> [b, Hkv, R, D]
        output, sums = attend(by_key_head, keys, values, mask, scale)
        if self._shared and self._grouping is not None:
            prompt_keys, prompt_values = (t[self._span] for t in self._shared[layer])
            from_prompt, prompt_sums = self._grouping.attend(by_key_head, prompt_keys, prompt_values, self._bias, scale)
            output = self._merge(output, sums, from_prompt, prompt_sums)
        return output.reshape(rows, 1, -1, width)  # [b, Hkv, R, D] -> [b, 1, Hq, D]


class Buffers:
    """By layer keys and values [b, Hkv, room, D], in room that is made beforehand.

    Args:
        like: Layer -> keys and values [..., Hkv, any, D].
        rows: How many completions there are, b.
    """

    def __init__(self, like: Mapping[int, Pair], rows: int) -> None:
        def empty(tensor: Tensor) -> Tensor:
            return tensor.new_zeros(rows, tensor.shape[-3], 0, tensor.shape[-1])

        self._layers = {layer: (empty(key), empty(value)) for layer, (key, value) in like.items()}

    def __getitem__(self, layer: int) -> Pair:
        return self._layers[layer]

    @property
    def keys(self) -> Tensor:
        """The keys of any layer."""
        return next(iter(self._layers.values()))[0]

    @property
    def room(self) -> int:
        """The tokens that there is room for."""
        return self.keys.shape[2]

    def counts_keys(self) -> bool:
        """Whether the kernel for them is told how many keys a row looks at, which has to hold for all layers alike."""
        if not counts_keys(self.keys):
            return False
        return len({(tensor.shape, tensor.stride()) for pair in self._layers.values() for tensor in pair}) == 1

    def grow(self, tokens: int, capacity: int) -> bool:
        """Make room for so many tokens, with some more up to the capacity; returns whether there was too little."""
        if (old := self.room) >= tokens:
            return False
        for layer, (key, value) in self._layers.items():
            self._layers[layer] = with_room(key, old, tokens, capacity), with_room(value, old, tokens, capacity)
        return True

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


@dataclass
class Prefilled:
    """What a decoder has computed of some prompts, and of a completion of each."""

    lengths: list[int]
    """[P] tokens of every prompt."""
    hidden: Tensor
    """[P, H] at every prompt's last token."""
    keys: dict[int, Pair]
    """Layer -> keys and values [P, Hkv, S, D]; behind a shorter prompt they mean nothing."""
    completions: list[tuple[Tensor, dict[int, Pair]]] = field(default_factory=list)
    """[P] the last hidden state [H] of each completion, and layer -> its keys and values [Hkv, n, D]."""


class _Recording:
    """A stream of prompts whose keys and values [N, Hkv, D] are recorded by layer."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.layers: dict[int, Pair] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # [1, Hkv, N, D] -> [N, Hkv, D]
        self.layers[layer] = key[0].transpose(0, 1).to(value.dtype), value[0].transpose(0, 1)
        return self.stream.attend(layer, query, key, value, scale)


def prefill(
    decoder: Any, prompts: Sequence[Sequence[int]], *, completions: Sequence[Sequence[int]] = (), tokens: int
) -> Prefilled:
    """Read prompts before the first token of their completions is sampled, as streams without padding.

    Args:
        decoder: The model without its head.
        prompts: [P] the token ids of each prompt.
        completions: [P] the token ids of the completion to read behind each prompt; empty: prompts only.
        tokens: The most tokens in one forward pass; a prompt that is longer goes alone.
    """
    device, longest = decoder.device, max(map(len, prompts))
    own = [[ids] for ids in completions] or [[] for _ in prompts]
    sizes = [len(prompt) + sum(map(len, rows)) for prompt, rows in zip(prompts, own, strict=True)]
    hidden, keys, read_completions = [], [], []
    for chunk in _chunks(sizes, tokens):
        groups = tuple((len(prompts[i]), tuple(map(len, own[i]))) for i in chunk)
        recording = _Recording(Stream(groups, device))
        pieces = [piece for i in chunk for piece in (prompts[i], *own[i])]
        ids = torch.tensor([token for piece in pieces for token in piece], device=device)
        states = forward(decoder, ids[None], recording.stream.positions, recording)[0]  # [1, N, H] -> [N, H]
        spans = recording.stream.spans
        starts = torch.tensor([[start] for start, _, _ in spans], device=device)
        # [p, 1] with [S] -> [p, S]; behind a shorter prompt stand its neighbour's keys, which nobody asks for.
        places = (starts + torch.arange(longest, device=device)).clamp(max=len(ids) - 1)
        hidden.append(states[torch.tensor([middle - 1 for _, middle, _ in spans], device=device)])
        # [N, Hkv, D] -> [p, S, Hkv, D] -> [p, Hkv, S, D]
        keys.append({n: [t[places].transpose(1, 2).contiguous() for t in pair] for n, pair in recording.layers.items()})
        for _, place, end in spans if completions else ():
            pairs = {
                layer: (k[place:end].transpose(0, 1), v[place:end].transpose(0, 1))
                for layer, (k, v) in recording.layers.items()
            }
            read_completions.append((states[end - 1], pairs))
    layers = {n: (torch.cat([part[n][0] for part in keys]), torch.cat([part[n][1] for part in keys])) for n in keys[0]}
    return Prefilled([len(prompt) for prompt in prompts], torch.cat(hidden), layers, read_completions)


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
