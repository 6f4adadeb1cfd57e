"""Rows of prompts and completions, and the sets of tokens that truncated sampling draws from.

Everywhere: B rows of S prompt and T completion tokens; N tokens in any order, n of which are in a chunk; V the size of
the vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

OUTSIDE = -1e30
"""A logit whose exponential is 0, and whose product with that is 0, too; a finite stand-in for -inf."""


@dataclass(frozen=True)
class Kept:
    """The tokens of the vocabulary that ``top_p``, ``top_k`` and ``min_p`` have left for each completion token.

    A set takes 4 bytes for each of its tokens and 4 more.

    Example:
        Of two completions the first has two tokens, drawn from {5, 7} and {2}, the second one, drawn from the whole
        vocabulary: ``sizes`` is [[2, 1], [0, 0]], ``ids`` [5, 7, 2].

    Raises:
        ValueError: On construction, if the sizes do not add up to the number of ids.
    """

    sizes: Tensor
    """[B, T], or [N] of single tokens, int32: how many tokens a set has; 0 for the whole vocabulary, and where there is
    no token."""
    ids: Tensor
    """[sum of sizes] int32: the tokens of all sets one after another, row by row."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value.dtype != torch.int32:
                raise ValueError(f"{name}: expected int32, got {value.dtype}")
        if self.ids.dim() != 1 or int(self.sizes.sum()) != len(self.ids):
            raise ValueError(f"ids: expected [{int(self.sizes.sum())}], got {list(self.ids.shape)}")

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, rows: Tensor) -> "Kept":
        numbers = torch.arange(self.sizes.numel(), device=self.sizes.device).view(self.sizes.shape)[rows]
        return Kept(self.sizes[rows], self.of(numbers.flatten()).ids)  # [B', T] -> [B' * T]

    def of(self, numbers: Tensor) -> "Kept":
        """The sets [N] of the tokens that have these numbers [N] in a flattened [B, T]."""
        before = self.sizes.flatten()
        sizes = before[numbers]
        # From where a set is to where it goes: the same distance for all its tokens.
        distance = (before.cumsum(0) - before)[numbers] - (sizes.cumsum(0) - sizes)  # [N]
        places = distance.repeat_interleave(sizes)  # [N] -> [sum of sizes]
        return Kept(sizes, self.ids[places + torch.arange(len(places), device=places.device)])

    @property
    def flat(self) -> "Kept":
        """The same sets as [B * T] single tokens."""
        return Kept(self.sizes.flatten(), self.ids)

    def narrow(self, length: int) -> "Kept":
        """The sets [B, length] of every row's first tokens."""
        numbers = torch.arange(self.sizes.numel(), device=self.sizes.device).view(self.sizes.shape)[:, :length]
        return Kept(self.sizes[:, :length], self.of(numbers.flatten()).ids)  # [B, length] -> [B * length]

    def each(self, counts: Sequence[int]) -> "list[Kept]":
        """The sets [t] of the first tokens of every row, of which there are ``counts`` [B]; the others are empty."""
        ids = self.ids.split(self.sizes.sum(-1).tolist())
        return [Kept(self.sizes[row, :count], ids[row]) for row, count in enumerate(counts)]

    def lists(self) -> list[list[int]]:
        """The tokens of each set, of single tokens [N]; none for the whole vocabulary."""
        return [ids.tolist() for ids in self.ids.split(self.sizes.tolist())]

    def split(self, size: int) -> "list[Kept]":
        """Single tokens [N], ``size`` at a time."""
        sizes = self.sizes.split(size)
        counts = torch.stack([part.sum() for part in sizes]).tolist()  # one transfer for all
        return [Kept(part, ids) for part, ids in zip(sizes, self.ids.split(counts), strict=True)]

    @classmethod
    def everything(cls, mask: Tensor) -> "Kept":
        """The whole vocabulary for every token of a mask [B, T]."""
        return cls(torch.zeros(mask.shape, dtype=torch.int32, device=mask.device), mask.new_empty(0, dtype=torch.int32))

    @classmethod
    def concatenate(cls, parts: "Sequence[Kept]") -> "Kept":
        """All rows of all parts [B, T], as long as the longest; or all single tokens [N]."""
        length = max(part.sizes.shape[-1] for part in parts)
        sizes = [
            torch.nn.functional.pad(part.sizes, (0, length - part.sizes.shape[-1]))
            if part.sizes.dim() > 1
            else part.sizes
            for part in parts
        ]
        return cls(torch.cat(sizes), torch.cat([part.ids for part in parts]))

    def to(self, device: torch.device) -> "Kept":
        """The same on ``device``."""
        return Kept(self.sizes.to(device), self.ids.to(device))

    def state(self) -> dict[str, Tensor]:
        """Both tensors by name, for a checkpoint."""
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> "Kept":
        """What `state` described.

        Raises:
            ValueError: A set has fewer than no tokens, which kernels find too late.
        """
        if (state["sizes"] < 0).any():
            raise ValueError(f"sizes: expected numbers >= 0, got {int(state['sizes'].min())}")
        return cls(**state)

    def outside(self, size: int) -> Tensor:
        """[n, V] (bool) which of a vocabulary of ``size`` tokens cannot be drawn, for single tokens [n]."""
        outside = (self.sizes > 0).unsqueeze(-1).repeat(1, size)  # [n] -> [n, V]
        outside.view(-1)[self._places(size)] = False  # [n, V] -> [n * V]
        return outside

    def restrict_(self, logits: Tensor) -> Tensor:
        """Overwrite the logits [n, V] of single tokens [n] with -inf where they are outside of the sets."""
        flat, places = logits.view(-1), self._places(logits.shape[-1])  # [n, V] -> [n * V]
        inside = flat[places]
        logits.masked_fill_((self.sizes > 0).unsqueeze(-1), -torch.inf)
        flat[places] = inside
        return logits

    def _places(self, size: int) -> Tensor:
        """Where the tokens of single sets [n] are in a flattened [n, size]."""
        rows = torch.arange(len(self.sizes), device=self.sizes.device).repeat_interleave(
            self.sizes, output_size=len(self.ids)
        )
        return rows * size + self.ids


@dataclass(frozen=True)
class Rows:
    """Prompts and completions as token ids; indexing selects rows.

    Raises:
        ValueError: On construction, if a field's shape contradicts ``mask``.
    """

    ids: Tensor
    """[B, S + T] prompt, then completion."""
    attention_mask: Tensor
    """[B, S + T] True on real tokens."""
    mask: Tensor
    """[B, T] True on completion tokens, the first end-of-sequence included."""
    kept: Kept | None = field(default=None, kw_only=True)
    """[B, T] the sets that the tokens were drawn from; None: the whole vocabulary."""

    def __post_init__(self) -> None:
        if self.mask.dtype != torch.bool or self.mask.dim() != 2:
            raise ValueError(f"mask: expected bool [B, T], got {self.mask.dtype} {tuple(self.mask.shape)}")
        rows, length = self.mask.shape
        width = max(self.ids.shape[-1], length + 1)
        for name, value in vars(self).items():
            found = value.sizes if isinstance(value, Kept) else value
            if isinstance(found, Tensor):
                expected = rows, width if name in ("ids", "attention_mask") else length
                if tuple(found.shape) != expected:
                    raise ValueError(f"{name}: expected {expected}, got {tuple(found.shape)}")
            elif found is not None and len(found) != rows:
                raise ValueError(f"{name}: expected {rows} rows, got {len(found)}")

    def __len__(self) -> int:
        return len(self.mask)

    def __getitem__(self, rows: Tensor) -> Self:
        chosen: list[int] = rows.tolist()
        picked: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor | Kept):
                picked[name] = value[rows]
            elif value is not None:
                picked[name] = tuple(value[row] for row in chosen)
        return replace(self, **picked)

    @property
    def untruncated(self) -> Self:
        """The same rows as if they were drawn from the whole vocabulary, which is how a reference scores them."""
        return replace(self, kept=None)

    def to(self, device: torch.device) -> Self:
        """The same on ``device``."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor | Kept)
        }
        return replace(self, **moved)
