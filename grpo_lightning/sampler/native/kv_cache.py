"""KV caches: a model in the middle of its completions, as `decode` drives it.

Shapes: P prompts, G completions per prompt, B = P * G of them, numbered by prompt; b of them are held now, in slots 0
to b - 1; S tokens of the longest prompt, T of the completions so far; V the size of the vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo_lightning.memory import GiB, Shape


class KVCache(ABC):
    """A model in the middle of some completions. All but ``step`` may wait for results and move tensors.

    Args:
        prompts: [P] the token ids of each prompt.
        group_size: Completions per prompt, G.
        longest: Tokens that a prompt and its completion may have together.
    """

    refills = False
    """Whether a completion that is over can be replaced while others go on, by ``fill``."""
    extends = False
    """Whether ``extend`` can be called."""
    is_static = False
    """Whether ``step`` makes the same operations, on tensors in the same places, as long as ``version`` is the same."""
    version = 0
    """Another number whenever ``step`` would use other tensors or shapes than it did."""
    rewinds = False
    """Whether ``rewind`` will be called; set before ``open``."""

    def __init__(self, prompts: Sequence[Sequence[int]], group_size: int, longest: int) -> None:
        self._prompts, self._group_size, self._longest = prompts, group_size, longest

    @abstractmethod
    def open(self, rows: Sequence[int]) -> Tensor:
        """Hold these completions [b] and no others; returns the logits [b, V] of their next tokens."""

    def fill(self, slots: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Hold completions [n] in the place of others; returns the logits [n, V] of their next tokens."""
        raise NotImplementedError(f"{type(self).__name__} holds its completions until all of them are over")

    def reserve(self, tokens: int) -> None:  # noqa: B027
        """Make room for so many more tokens of each; they are then appended by as many calls of ``step``."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Append a token [b] to every completion; returns the logits [b, V] of the next one."""

    def extend(self, slots: Sequence[int], rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Read all tokens [n] of the completions in some slots together; returns the logits [n, V] of the next ones."""
        raise NotImplementedError(f"{type(self).__name__} reads one token after another")

    @abstractmethod
    def rewind(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Forget what the completions [n] in some slots have behind their first ``tokens`` [n] tokens."""

    @abstractmethod
    def keep(self, slots: Sequence[int]) -> None:
        """Drop all completions but those in these slots, given in rising order, which become slots 0, 1, ..."""


class DynamicKVCache(KVCache):
    """The cache of transformers, in which every completion holds its prompt; it works with any causal language model.

    Args:
        model: A transformers causal language model.
        prompts: As in `KVCache`, like the next two.
        group_size: G
        longest: The most tokens.
        pad_id: The token id that stands before shorter prompts.
    """

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], group_size: int, *, longest: int, pad_id: int
    ) -> None:
        super().__init__(prompts, group_size, longest)
        self._model, self._pad_id = model, pad_id

    def open(self, rows: Sequence[int]) -> Tensor:
        groups = [row // self._group_size for row in rows]
        distinct = list(dict.fromkeys(groups))  # each prompt once
        texts = [self._prompts[prompt] for prompt in distinct]
        width, device = max(map(len, texts)), self._model.device
        ids = torch.tensor([[self._pad_id] * (width - len(text)) + list(text) for text in texts], device=device)
        lengths = torch.tensor([[len(text)] for text in texts], device=device)
        seen = (torch.arange(width, device=device) >= width - lengths).long()  # [P, S]
        self._cache = DynamicCache(config=self._model.config)
        if self.rewinds:  # what is forgotten may have pushed older tokens out of a sliding window, which then count
            self._cache.layers = [
                DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in self._cache.layers
            ]
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
        self._firsts = torch.tensor([len(self._prompts[group]) for group in groups], device=device)
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
        places, counts = (torch.tensor(values, device=self._seen.device) for values in (slots, tokens))
        seen, limit = self._seen[places], (self._firsts[places] + counts).unsqueeze(-1)
        self._seen[places] = rest = seen.where(seen.cumsum(-1) <= limit, 0)
        if not torch.equal(rest, seen):
            self._close_gaps()

    def _close_gaps(self) -> None:
        """Move all columns that count to the right: sliding windows reach back over columns, whether these count."""
        longest = int(self._seen.sum(-1).max())
        order = self._seen.argsort(dim=-1, stable=True)[:, -longest:]  # [b, S + T] -> [b, longest]
        self._seen = self._seen.gather(-1, order)
        for layer in self._cache.layers:
            if not getattr(layer, "is_initialized", True):
                continue  # it reads the keys of another layer
            if type(layer) is not DynamicLayer:
                raise ValueError(
                    f"policy: {type(self._model).__name__} keeps a {type(layer).__name__}, which cannot forget tokens: "
                    "with an environment use a model that keeps keys and values of every token"
                )
            for name in ("keys", "values"):
                held = getattr(layer, name)  # [b, Hkv, S + T, D]
                places = order[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3])
                setattr(layer, name, held.gather(2, places))

    def keep(self, slots: Sequence[int]) -> None:
        chosen = torch.tensor(slots, device=self._seen.device)
        self._cache.batch_select_indices(chosen)
        self._seen, self._firsts = self._seen[chosen], self._firsts[chosen]


class NoKVCache(KVCache):
    """No cache at all: every step computes all tokens so far again; it works with anything that gives logits.

    Args:
        logits: Token ids [b, S + T] -> logits [b, S + T, V] of a causal model.
        prompts: As in `KVCache`, like the next two.
        group_size: G
        longest: The most tokens.
        pad_id: The token id that stands behind shorter rows.
        device: The device of the model.
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
        super().__init__(prompts, group_size, longest)
        self._logits, self._pad_id, self._device = logits, pad_id, device

    def open(self, rows: Sequence[int]) -> Tensor:
        texts = [self._prompts[row // self._group_size] for row in rows]
        width = max(map(len, texts))
        ids = [list(text) + [self._pad_id] * (width - len(text)) for text in texts]
        self._ids = torch.tensor(ids, device=self._device)
        self._firsts = torch.tensor([len(text) for text in texts], device=self._device)
        self._lengths = self._firsts.clone()
        return self._next()

    def reserve(self, tokens: int) -> None:
        """Widen the rows."""
        missing = min(int(self._lengths.max()) + tokens, self._longest) - self._ids.shape[1]
        if missing > 0:
            self._ids = torch.nn.functional.pad(self._ids, (0, missing), value=self._pad_id)

    def step(self, tokens: Tensor) -> Tensor:
        self._ids[torch.arange(len(tokens), device=tokens.device), self._lengths] = tokens
        # Completions that have ended go on like the others, but not for ever.
        self._lengths = (self._lengths + 1).clamp(max=self._longest - 1)
        return self._next()

    def rewind(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        places, counts = (torch.tensor(values, device=self._device) for values in (slots, tokens))
        self._lengths[places] = self._firsts[places] + counts

    def keep(self, slots: Sequence[int]) -> None:
        chosen = torch.tensor(slots, device=self._device)
        self._ids, self._lengths, self._firsts = self._ids[chosen], self._lengths[chosen], self._firsts[chosen]

    def _next(self) -> Tensor:
        logits = self._logits(self._ids)  # [b, S + T, V]
        # Rows end at different places, since they are padded on the right: [b, S + T, V] -> [b, V].
        return logits[torch.arange(len(logits), device=logits.device), self._lengths - 1]


def rows_within(
    gib: float,
    shape: Shape,
    *,
    number_bytes: int,
    prompts: int,
    prompt_tokens: int,
    completion_tokens: int,
    shares_prompts: bool,
    copies_below: int = 0,
) -> int:
    """How many completions can be held at a time, each with room for all its tokens.

    Args:
        gib: The budget in GiB.
        shape: The model's sizes.
        number_bytes: The bytes of a number among keys and values.
        prompts: How many prompts there are.
        prompt_tokens: The length of the longest.
        completion_tokens: The most tokens of a completion.
        shares_prompts: Whether prompts are held once, for all their completions.
        copies_below: As long as the copies of a layer's prompts take no more bytes than this, completions have some.

    Raises:
        ValueError: Not even one fits.
    """
    token = 2 * number_bytes * shape.keys * shape.layers
    whole = token * (prompt_tokens + completion_tokens)
    budget = gib * GiB
    held = token * prompts * prompt_tokens if shares_prompts else 0
    rows = int((budget - held) // (token * completion_tokens if shares_prompts else whole))
    if shares_prompts and rows * token * prompt_tokens / shape.layers <= copies_below:
        rows = int((budget - held) // whole)
    if rows < 1:
        least = math.ceil((held + whole) / GiB * 1e4) / 1e4
        raise ValueError(
            f"rollout.kv_cache_gib={gib} must be at least {least:.4f}: {prompts} prompts of up to {prompt_tokens} "
            f"tokens and one completion of {completion_tokens} need as much"
        )
    return rows
