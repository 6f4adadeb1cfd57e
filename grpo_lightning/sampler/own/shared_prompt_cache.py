"""A decoder in the middle of its completions, with keys and values of long prompts once per group.

Between two calls of anything but ``step`` every tensor that a step reads or writes keeps its shape and its place in
memory, and no operation of it depends on a value: many steps can be queued on a GPU, or recorded and replayed.

Shapes: P prompts, G completions per prompt, B = P * G of them; b of them are held now, in slots; p prompts that they
belong to; S tokens of the longest prompt; C tokens that a step looks at; Hq query heads, Hkv key heads, R = Hq / Hkv
query heads that read one key head, D the size of a head; H that of a hidden state, V that of the vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.memory import COPIED
from grpo_lightning.sampler.own.buffers import Buffers, Pair, store
from grpo_lightning.sampler.own.flat_decoder import FlatDecoder
from grpo_lightning.sampler.own.prefill import Read, read_prompts
from grpo_lightning.sampler.own.prompt_attention import Grouping, Held, attend, excluding, joined, seen
from grpo_lightning.transformer import compiled
from grpo_lightning.transformer.attention import forward

PREFILL_TOKENS = 16384
"""The most prompt tokens that go through the model together."""
_WIDTH, _WIDTH_GPU = 32, 256
"""Rows of different lengths look at the next multiple of so many tokens, at least."""


class SharedPromptCache:
    """A decoder whose attention can be replaced, in the middle of its completions.

    Every step attends to a completion's own tokens and to its prompt and joins the two by their log-sum-exp, see
    `transformer.attention_cpu`. Short prompts are copied before every completion's own tokens.

    Args:
        decoder: The model without its head.
        head: Hidden states [n, H] -> logits [n, V].
        prompts: [P] the token ids of each prompt.
        group_size: Completions per prompt, G.
        longest: Tokens that a prompt and its completion may have together.
        flat: A copy of the decoder for single tokens; None lets the decoder itself take them.
        windows: How many tokens back each layer's attention reaches, by layer; empty where all reach all the way.
        is_static: Whether the decoder makes the same operations whatever the tokens are.
    """

    refills, rewinds = True, False

    def __init__(
        self,
        decoder: Any,
        head: Callable[[Tensor], Tensor],
        prompts: Sequence[Sequence[int]],
        group_size: int,
        *,
        longest: int,
        flat: FlatDecoder | None,
        windows: Mapping[int, int],
        is_static: bool,
    ) -> None:
        self._decoder, self._head, self._prompts, self._group_size = decoder, head, prompts, group_size
        self._longest, self._flat, self._windows = longest, flat, windows
        self._reads = partial(read_prompts, decoder, tokens=PREFILL_TOKENS)
        self._device: torch.device = decoder.device
        self._on_cpu = self._device.type == "cpu"
        self._compiles = compiled.pays(decoder.get_input_embeddings().weight)
        self._store = compiled.compiled(store) if self._compiles else store
        self._joined = compiled.compiled(joined) if self._compiles else joined
        self.version, self.is_static, self.extends = 0, is_static, not windows
        self._to_come = len(prompts) * group_size
        """Completions that have not been held yet."""
        self._read: Read | None = None
        self._shared: dict[int, Pair] = {}
        """Layer -> keys and values [p, Hkv, S, D] that the completions attend to; empty where each has a copy."""
        self._own = Buffers({}, 0)
        """Keys and values of every completion, behind its prompt where that is copied."""
        self._group_of: list[int] = []
        """[b] the number of each completion's prompt."""
        self._held: list[int] = []
        """[b] how many tokens each slot of ``_own`` holds: `_lengths`, as this side of the device knows them."""
        self._firsts: list[int] = []
        """[b] where in its slot of ``_own`` a completion's own tokens begin."""
        self._lengths = torch.empty(0)
        self._before = torch.empty(0)
        """[b] tokens of a completion that are not in its ``_own``."""
        self._refilled = False
        """Whether completions take the places of others."""
        self._grouping: Grouping | None = None
        self._span = slice(0, 0)
        """The prompts among which those of the completions lie."""
        self._beyond: Tensor | None = None
        """[P, S] where a prompt is padded; None where none is."""
        self._bias: Tensor | None = None
        """[p, 1, 1, S] what is added to the attention scores of the prompts in `_span`, if anything."""
        self._width = 0
        """C"""
        self._even: int | None = None
        """How many tokens every slot holds, where on a CPU that is the same for all: no mask is needed."""
        self._masks: dict[int | None, Tensor | Held] = {}
        """Window -> which keys are looked at, as `attend` takes it, in the step that is being made."""

    def open(self, rows: Sequence[int]) -> Tensor:
        if self._read is None:
            self._read = self._reads(self._prompts)
        size = len(rows)
        self._refilled = self._to_come > size
        self._group_of, self._held, self._firsts = ([0] * size for _ in range(3))
        self._lengths, self._before = torch.zeros(2, size, dtype=torch.long, device=self._device)
        self._shared = {} if self._windows or self._copies(self._read.keys, size) else dict(self._read.keys)
        self._own = Buffers(self._read.keys, size)
        lengths = torch.tensor(self._read.lengths, device=self._device).unsqueeze(-1)
        beyond = torch.arange(max(self._read.lengths), device=self._device) >= lengths  # [P, S]
        self._beyond = beyond if len(set(self._read.lengths)) > 1 else None
        return self._fill(self._read, range(size), rows)

    def fill(self, slots: Sequence[int], rows: Sequence[int]) -> Tensor:
        if self._read is None:
            raise RuntimeError("nothing is held yet")
        return self._fill(self._read, slots, rows)

    def _fill(self, read: Read, slots: Sequence[int], rows: Sequence[int]) -> Tensor:
        self._to_come -= len(rows)
        groups = [row // self._group_size for row in rows]
        # Where a completion's own tokens begin.
        firsts = [0 if self._shared else read.lengths[group] for group in groups]
        for slot, group, first in zip(slots, groups, firsts, strict=True):
            self._group_of[slot] = group
            self._firsts[slot] = self._held[slot] = first
        self._grow(max(*self._held, 0 if self._shared else max(read.lengths)))
        places, prompts = (torch.tensor(numbers, device=self._device) for numbers in (list(slots), groups))
        if not self._shared:
            for layer, pair in read.keys.items():
                for buffer, prompt in zip(self._own[layer], pair, strict=True):
                    buffer[places, :, : prompt.shape[2]] = prompt[prompts]  # [P, Hkv, S, D] -> [n, Hkv, S, D]
        self._note(slots)
        lengths = torch.tensor(read.lengths, device=self._device)
        self._before[places] = lengths[prompts] if self._shared else torch.zeros_like(prompts)
        # The head is applied once per prompt: a group's first tokens are all drawn from the same distribution.
        hidden, chosen = read.last(groups)
        logits: Tensor = self._head(hidden)[chosen]
        if not self._to_come:
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
        room = self._own.room
        # A GPU repeats what was recorded for one width, so it gets fewer of them; one that counts keys needs none.
        unit = _WIDTH if self._on_cpu else max(_WIDTH_GPU, room // 4)
        unit = room if self._own.counts_keys() and not self._windows else unit
        width = wanted if is_even else min(-(-wanted // unit) * unit, room)
        if width != self._width:
            self._width = width
            self.version += 1
        self._held = [min(held + tokens, limit - 1) for held in self._held]

    def extend(self, slots: Sequence[int], rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        prompts = [self._prompts[row // self._group_size] for row in rows]
        read = self._reads(prompts, completions=tokens)
        for slot, own in zip(slots, tokens, strict=True):
            self._held[slot] = self._firsts[slot] + len(own)
        self._grow(max(self._held))
        for slot, (_, pairs) in zip(slots, read.completions, strict=True):
            self._own.write(slot, self._firsts[slot], pairs)
        self._note(slots)
        logits: Tensor = self._head(torch.stack([hidden for hidden, _ in read.completions]))
        return logits

    def rewind(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        for slot, kept in zip(slots, tokens, strict=True):
            self._held[slot] = self._firsts[slot] + kept
        self._note(slots)

    def _note(self, slots: Sequence[int]) -> None:
        """Tell the device how many tokens some slots hold."""
        places, held = (torch.tensor(v, device=self._device) for v in (list(slots), [self._held[s] for s in slots]))
        self._lengths[places] = held

    def keep(self, slots: Sequence[int]) -> None:
        chosen = torch.tensor(slots, device=self._device)
        self._held, self._group_of, self._firsts = (
            [values[slot] for slot in slots] for values in (self._held, self._group_of, self._firsts)
        )
        self._lengths, self._before = self._lengths[chosen], self._before[chosen]
        self._own.keep(chosen, max(self._held))
        if self._shared:
            active = sorted(set(self._group_of))
            # Selecting copies all keys and values, so it waits until a prompt has lost its last completion.
            if len(active) < len(next(iter(self._shared.values()))[0]):
                rest = torch.tensor(active, device=self._device)
                self._shared = {layer: (key[rest], value[rest]) for layer, (key, value) in self._shared.items()}
                self._beyond = None if self._beyond is None else self._beyond[rest]
                self._group_of = [active.index(group) for group in self._group_of]
            self._refilled = False
            if self._copies(self._shared, len(slots)):
                self._copy()
            else:
                self._regroup()
        self.version += 1

    def _copies(self, shared: Mapping[int, Pair], rows: int) -> bool:
        """Whether every completion is to have its prompt for itself, if so many are held."""
        prompt = next(iter(shared.values()))[0]
        # Attending once per group takes a second call of the kernel and a dozen small operations in every layer, which
        # cost more than reading a short prompt again for each of its completions.
        return 2 * rows * prompt[0].numel() * prompt.element_size() <= COPIED["cuda" if prompt.is_cuda else "cpu"]

    def _copy(self) -> None:
        """Put the prompts before every completion's own keys and values."""
        groups = torch.tensor(self._group_of, device=self._device)
        self._own.prepend(self._shared, groups, self._before, max(self._held), self._longest)
        self._shared, self._grouping = {}, None
        before = self._before.tolist()
        self._held = [held + first for held, first in zip(self._held, before, strict=True)]
        self._firsts = before
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
        self._bias = None if self._beyond is None else excluding(self._beyond[self._span], self._own.dtype)

    def _capacity(self) -> int:
        """The most tokens that a slot ever has to hold."""
        return self._longest - (max(map(len, self._prompts)) if self._shared else 0)

    def _grow(self, tokens: int) -> None:
        """Make room for so many tokens in every slot."""
        self.version += self._own.grow(tokens, self._capacity())

    # A step: nothing below looks at a value or takes memory that a later step would not find again.

    def step(self, tokens: Tensor) -> Tensor:
        if self._even is None:
            self._masks = {
                window: seen(self._lengths, self._own.keys, self._width, window, self._own.counts_keys())
                for window in {None, *self._windows.values()}
            }
        positions = self._before + self._lengths
        if self._flat:
            with compiled.compiling() if self._compiles else nullcontext():
                hidden = self._flat(tokens, positions, self)
        else:
            # [b] -> [b, 1] -> hidden [b, 1, H] -> [b, H]
            hidden = forward(self._decoder, tokens.unsqueeze(-1), positions.unsqueeze(-1), self)[:, 0]
        # Completions that have ended go on like the others until they are dropped, but not for ever.
        self._lengths.add_(1).clamp_(max=self._capacity() - 1)
        logits: Tensor = self._head(hidden)
        return logits

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        rows, heads, _, width = key.shape
        # Under autocast the rotation leaves queries and keys in float32.
        query, key = query.to(value.dtype), key.to(value.dtype)
        keys, values = self._own[layer]
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
            output = self._joined(output, sums, from_prompt, prompt_sums)
        return output.reshape(rows, 1, -1, width)  # [b, Hkv, R, D] -> [b, 1, Hq, D]
