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
from transformers.cache_utils import DynamicLayer

from grpo_lightning.memory import GiB, Shape


class KVCache(ABC):
    """A model in the middle of some completions. All but ``step`` may wait for results and move tensors.

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
        texts = [self._prompts[prompt] for prompt in distinct]
        width, device = max(map(len, texts)), self.device
        ids = torch.tensor([[self._pad_id] * (width - len(text)) + list(text) for text in texts], device=device)
        lengths = torch.tensor([[len(text)] for text in texts], device=device)
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
        texts = [self._prompts[row // self._group_size] for row in rows]
        ids = [list(text) + [self._pad_id] * (self._longest - len(text)) for text in texts]
        self._ids = torch.tensor(ids, device=self.device)
        self._firsts = torch.tensor([len(text) for text in texts], device=self.device)
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
