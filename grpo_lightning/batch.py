"""What travels between the parts: prompts in, samples, one tensor-only rollout out.

Everywhere: P prompts, G completions of each, B = P * G rows with a prompt's rows adjacent, S prompt tokens padded on
the left, T completion tokens padded on the right. Log-probabilities are in nats, float32.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

Prompt = str | list[dict[str, str]]
"""Plain text, or chat messages: dicts with the keys "role" and "content"."""


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    Log-probabilities are always those of logits / temperature: with ``top_p``, ``top_k`` or ``min_p`` switched on,
    another distribution is sampled than the one that is scored and trained.
    """

    temperature: float
    """Divides the logits; 0 takes the likeliest token (for validation only: nothing can be learned from it)."""
    top_p: float
    """Keep the likeliest tokens whose probabilities add up to this; 1 keeps all."""
    top_k: int
    """Keep this many of the likeliest tokens; 0 keeps all."""
    min_p: float
    """Keep tokens at least this likely, relative to the likeliest; 0 keeps all."""
    max_new_tokens: int
    """Longest completion, in tokens."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these, besides the model's own end tokens."""

    @property
    def truncated(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class Prompts:
    """A batch as the dataloader yields it: text only, so its workers need no tokenizer.

    Raises:
        ValueError: On construction, if a column has another length than ``texts``.
    """

    texts: tuple[Prompt, ...]
    """[P] what the policy is asked."""
    columns: Mapping[str, tuple[Any, ...]]
    """Name -> [P] whatever else the data set holds; rewards receive it by name."""

    def __post_init__(self) -> None:
        for name, values in self.columns.items():
            if len(values) != len(self.texts):
                raise ValueError(f"column {name!r}: expected {len(self.texts)} values, got {len(values)}")

    @classmethod
    def collate(cls, rows: Sequence[tuple[Prompt, Mapping[str, Any]]]) -> "Prompts":
        """A batch from (prompt, columns) pairs that all have the same columns."""
        texts = tuple(prompt for prompt, _ in rows)
        return cls(texts, {name: tuple(columns[name] for _, columns in rows) for name in (rows[0][1] if rows else ())})

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, chosen: Sequence[int]) -> "Prompts":
        columns = {name: tuple(values[i] for i in chosen) for name, values in self.columns.items()}
        return Prompts(tuple(self.texts[i] for i in chosen), columns)

    def to(self, *_: object, **__: object) -> "Prompts":
        """Itself: Lightning moves every batch to the device, and refuses a frozen one that cannot move itself."""
        return self


@dataclass(frozen=True)
class _Rows:
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

    def __post_init__(self) -> None:
        if self.mask.dtype != torch.bool or self.mask.dim() != 2:
            raise ValueError(f"mask: expected bool [B, T], got {self.mask.dtype} {tuple(self.mask.shape)}")
        rows, length = self.mask.shape
        width = max(self.ids.shape[-1], length + 1)
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Tensor):
                if len(value) != rows:
                    raise ValueError(f"{field.name}: expected {rows} rows, got {len(value)}")
            elif tuple(value.shape) != (
                expected := (rows, width if field.name in ("ids", "attention_mask") else length)
            ):
                raise ValueError(f"{field.name}: expected {expected}, got {tuple(value.shape)}")

    def __len__(self) -> int:
        return len(self.mask)

    def __getitem__(self, rows: Tensor) -> Self:
        chosen: list[int] = rows.tolist()
        picked: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            picked[field.name] = value[rows] if isinstance(value, Tensor) else tuple(value[row] for row in chosen)
        return replace(self, **picked)


@dataclass(frozen=True)
class Sampled(_Rows):
    """Completions of some prompts, as token ids and as text."""

    logprobs: Tensor
    """[B, T] log-probability of each token when it was drawn, under logits / temperature; 0 where masked."""
    entropy: Tensor
    """[B, T] of the distribution that each token was drawn from, in nats; 0 where masked."""
    texts: tuple[str, ...]
    """[B] the completions decoded without special tokens: for rewards and logs, never tokenized again."""
    finished: tuple[bool, ...]
    """[B] False where the completion was cut at the length limit."""

    @classmethod
    def concatenate(cls, parts: Sequence["Sampled"]) -> "Sampled":
        """The rows of all parts, padded to the widest prompt and the longest completion."""
        if len(parts) == 1:
            return parts[0]
        length = max(part.mask.shape[1] for part in parts)
        width = max(part.ids.shape[1] - part.mask.shape[1] for part in parts)

        def joined(name: str) -> Tensor:
            padded = []
            for part in parts:
                value: Tensor = getattr(part, name)
                right = length - part.mask.shape[1]
                left = width - (value.shape[1] - part.mask.shape[1]) if name in ("ids", "attention_mask") else 0
                padded.append(torch.nn.functional.pad(value, (left, right)))
            return torch.cat(padded)

        tensors = {name: joined(name) for name in ("ids", "attention_mask", "mask", "logprobs", "entropy")}
        return cls(
            **tensors,
            texts=tuple(text for part in parts for text in part.texts),
            finished=tuple(finished for part in parts for finished in part.finished),
        )


@dataclass(frozen=True)
class Rollout(_Rows):
    """Everything an update reads and nothing else."""

    old_logprobs: Tensor
    """[B, T] under the policy that sampled."""
    ref_logprobs: Tensor
    """[B, T] under the reference; zeros where none is used."""
    advantages: Tensor
    """[B, T] an outcome advantage is the same along a row."""

    def minibatches(self, *, size: int, epochs: int, generator: torch.Generator) -> Iterator["Rollout"]:
        """Shuffled minibatches of ``size`` rows, ``epochs`` passes over all rows.

        A whole-rollout minibatch keeps its order. A pass's last minibatch may be smaller.
        """
        for _ in range(epochs):
            if size >= len(self):
                yield self
                continue
            order = torch.randperm(len(self), generator=generator).to(self.mask.device)
            for rows in order.split(size):
                yield self[rows]


def same_prompts(rows: _Rows) -> list[list[int]]:
    """Numbers of the rows that have the same prompt, in order of their first appearance."""
    start = rows.ids.shape[1] - rows.mask.shape[1]
    real = rows.attention_mask[:, :start]
    ids = rows.ids[:, :start].masked_fill(~real, -1).cpu().numpy()
    found: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(ids):
        found.setdefault(prompt.tobytes(), []).append(row)
    return list(found.values())


def microbatches(rows: _Rows, tokens: int, *, shared: bool) -> list[Tensor]:
    """Rows that go through the model together: as many as fit a budget of tokens.

    Without sharing rows are taken from the longest to the shortest, so that little of a micro-batch is padding and the
    largest one comes first; with it groups are, and a group stays together unless it is larger than the budget. A row
    longer than the budget goes alone.

    Args:
        rows: B prompts and completions.
        tokens: Most positions in one forward pass.
        shared: Whether rows with the same prompt share its tokens and nothing is padded.

    Returns:
        Disjoint index tensors that together cover all B rows.
    """
    completion = rows.mask.sum(-1).tolist()
    prompt = (rows.attention_mask.sum(-1) - rows.mask.sum(-1)).tolist()
    batches: list[list[int]] = []
    if shared:
        used = 0
        groups = sorted(same_prompts(rows), key=lambda group: -prompt[group[0]] - sum(completion[row] for row in group))
        for group in groups:
            own = prompt[group[0]]
            whole = own + sum(completion[row] for row in group)
            if not batches or used + whole > tokens:
                batches.append([])
                used = 0
            used += own
            for row in group:
                if batches[-1] and used + completion[row] > tokens:
                    batches.append([])
                    used = own
                batches[-1].append(row)
                used += completion[row]
        return [torch.tensor(batch, device=rows.mask.device) for batch in batches]
    order = sorted(range(len(rows)), key=lambda row: (prompt[row] + completion[row], row), reverse=True)
    widest_prompt = widest_completion = 0
    for row in order:
        longest = max(widest_prompt, prompt[row]), max(widest_completion, completion[row])
        if batches and (len(batches[-1]) + 1) * sum(longest) <= tokens:
            batches[-1].append(row)
            widest_prompt, widest_completion = longest
        else:
            batches.append([row])
            widest_prompt, widest_completion = prompt[row], completion[row]
    return [torch.tensor(batch, device=rows.mask.device) for batch in batches]
