"""Types that travel between the parts: prompts, sampled completions, scored groups, rollouts.

Everywhere: P prompts, G completions of each, B = P * G rows with a prompt's rows adjacent, S prompt tokens padded on
the left, T completion tokens padded on the right. V is the size of the vocabulary; N single tokens in any order, n of
which are in a chunk. Log-probabilities are in nats, float32.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, Self

import torch
from torch import Tensor

Message = dict[str, str]
"""A chat message: a dict with the keys "role" and "content"."""
Prompt = str | list[Message] | list[int]
"""Plain text, chat messages, or token ids as the model reads them."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn.

    The logits are divided by the temperature first. Then ``top_k``, ``top_p`` and ``min_p`` leave a set of tokens, at
    most `sampler.token_sampling.MAX_SUPPORT` of them, over which the probabilities add up to 1.

    Example:
        ``Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=512)`` draws from the policy itself.
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
    kv_cache_gib: float | None = None
    """GiB that keys and values may take; completions beyond wait for others to end. None: all are drawn at once. It
    changes no completion, but for rounding."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", tuple(self.stop))  # a list, where settings hold it

    @property
    def truncated(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class Prompts:
    """A batch as the dataloader yields it, before the tokenizer.

    Example:
        ``Prompts(("2 + 3 =", "7 - 4 ="), {"answer": ("5", "3")})``
    """

    texts: tuple[Prompt, ...]
    """[P] what the policy is asked."""
    columns: Mapping[str, tuple[Any, ...]]
    """Name -> [P] whatever else the data set holds; rewards receive it by name."""
    origins: tuple[str, ...] = ()
    """[P] where each comes from, such as a file and a line, for messages; empty if unknown."""

    def __post_init__(self) -> None:
        for name, values in self.columns.items():
            if len(values) != len(self.texts):
                raise ValueError(f"column {name!r}: expected {len(self.texts)} values, got {len(values)}")

    @classmethod
    def collate(cls, rows: Sequence[tuple[Prompt, Mapping[str, Any]]], origins: Sequence[str] = ()) -> "Prompts":
        """A batch from (prompt, columns) pairs that all have the same columns, and from where each comes from."""
        names = rows[0][1] if rows else ()
        columns = {name: tuple(columns[name] for _, columns in rows) for name in names}
        return cls(tuple(prompt for prompt, _ in rows), columns, tuple(origins))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, chosen: Sequence[int]) -> "Prompts":
        columns = {name: tuple(values[i] for i in chosen) for name, values in self.columns.items()}
        origins = tuple(self.origins[i] for i in chosen) if self.origins else ()
        return Prompts(tuple(self.texts[i] for i in chosen), columns, origins)

    def to(self, *_: object, **__: object) -> "Prompts":
        """Return itself: Lightning calls ``to`` on every batch, and this one holds no tensors."""
        return self


def by_source(prompts: Prompts) -> dict[str, list[int]]:
    """The prompts of each source of a mixture, by the column ``data_source``, which other data sets may have, too."""
    found: dict[str, list[int]] = {}
    for index, source in enumerate(prompts.columns.get("data_source", ())):
        found.setdefault(str(source), []).append(index)
    return found


OUTSIDE = -1e30
"""A logit whose exponential is 0, and whose product with that is 0, too; a finite stand-in for -inf."""


@dataclass(frozen=True)
class SamplingSupport:
    """The tokens of the vocabulary that ``top_p``, ``top_k`` and ``min_p`` have left for each completion token.

    A set takes 4 bytes for each of its tokens and 4 more.

    Example:
        Two completions: the first has two tokens, sampled from {5, 7} and {2}; the second has one, sampled from the
        whole vocabulary. ``sizes`` is [[2, 1], [0, 0]], ``ids`` is [5, 7, 2].
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

    def __getitem__(self, rows: Tensor) -> "SamplingSupport":
        return self.select(self._numbers[rows])

    @property
    def _numbers(self) -> Tensor:
        return torch.arange(self.sizes.numel(), device=self.sizes.device).view(self.sizes.shape)

    def select(self, numbers: Tensor) -> "SamplingSupport":
        """Select tokens by their numbers, of any shape, in a flattened [B, T]."""
        before = self.sizes.flatten()
        sizes = before[flat := numbers.flatten()]
        # From where a set is to where it goes: the same distance for all its tokens.
        distance = (before.cumsum(0) - before)[flat] - (sizes.cumsum(0) - sizes)  # [N]
        places = distance.repeat_interleave(sizes)  # [N] -> [sum of sizes]
        ids = self.ids[places + torch.arange(len(places), device=places.device)]
        return SamplingSupport(sizes.view(numbers.shape), ids)

    def scatter(self, numbers: Tensor, shape: Sequence[int]) -> "SamplingSupport":
        """Put these n tokens at ``numbers`` [n] of a flattened [B, T] = ``shape``; the others get empty sets."""
        sizes = self.sizes.new_zeros(*shape)
        sizes.view(-1)[numbers] = self.sizes  # [B, T] -> [B * T]
        return SamplingSupport(sizes, self.select(numbers.argsort()).ids)

    @property
    def flat(self) -> "SamplingSupport":
        """The same sets as [B * T] single tokens."""
        return SamplingSupport(self.sizes.flatten(), self.ids)

    def narrow(self, length: int) -> "SamplingSupport":
        """The first ``length`` tokens of every row, [B, length]."""
        return self.select(self._numbers[:, :length])

    def lists(self) -> list[list[int]]:
        """The tokens of each set, row by row; none for the whole vocabulary."""
        return [ids.tolist() for ids in self.ids.split(self.sizes.flatten().tolist())]

    def split(self, size: int) -> "list[SamplingSupport]":
        """Single tokens [N], ``size`` at a time."""
        sizes = self.sizes.split(size)
        counts = torch.stack([part.sum() for part in sizes]).tolist()  # one transfer for all
        return [SamplingSupport(part, ids) for part, ids in zip(sizes, self.ids.split(counts), strict=True)]

    @classmethod
    def full_vocabulary(cls, mask: Tensor) -> "SamplingSupport":
        """The whole vocabulary for every token of a mask [B, T]."""
        return cls(torch.zeros(mask.shape, dtype=torch.int32, device=mask.device), mask.new_empty(0, dtype=torch.int32))

    @classmethod
    def concatenate(cls, parts: "Sequence[SamplingSupport]") -> "SamplingSupport":
        """All rows of all parts [B, T], as long as the longest; or all single tokens [N]."""
        sizes = [part.sizes for part in parts]
        if sizes[0].dim() > 1:
            length = max(one.shape[-1] for one in sizes)
            sizes = [torch.nn.functional.pad(one, (0, length - one.shape[-1])) for one in sizes]
        return cls(torch.cat(sizes), torch.cat([part.ids for part in parts]))

    def to(self, device: torch.device) -> "SamplingSupport":
        """The same on ``device``."""
        return SamplingSupport(self.sizes.to(device), self.ids.to(device))

    def outside(self, size: int) -> Tensor:
        """[n, V] (bool) which of a vocabulary of ``size`` tokens cannot be drawn, for single tokens [n]."""
        outside = (self.sizes > 0).unsqueeze(-1).repeat(1, size)  # [n] -> [n, V]
        rows = torch.arange(len(self.sizes), device=self.sizes.device)
        rows = rows.repeat_interleave(self.sizes, output_size=len(self.ids))
        outside.view(-1)[rows * size + self.ids] = False  # [n, V] -> [n * V]
        return outside


@dataclass(frozen=True)
class Rows:
    """Prompts and completions as token ids; indexing selects rows. Shapes are checked on construction."""

    ids: Tensor
    """[B, S + T] prompt, then completion."""
    attention_mask: Tensor
    """[B, S + T] True on real tokens."""
    mask: Tensor
    """[B, T] True on completion tokens, the first end-of-sequence included."""
    support: SamplingSupport | None = field(default=None, kw_only=True)
    """[B, T] the sets that the tokens were drawn from; None: the whole vocabulary."""

    def __post_init__(self) -> None:
        if self.mask.dtype != torch.bool or self.mask.dim() != 2:
            raise ValueError(f"mask: expected bool [B, T], got {self.mask.dtype} {tuple(self.mask.shape)}")
        rows, length = self.mask.shape
        width = max(self.ids.shape[-1], length + 1)
        for name, value in vars(self).items():
            found = value.sizes if isinstance(value, SamplingSupport) else value
            if isinstance(found, Tensor):
                expected = rows, width if name in ("ids", "attention_mask") else length
                if tuple(found.shape) != expected:
                    raise ValueError(f"{name}: expected {expected}, got {tuple(found.shape)}")
            elif found is not None and len(found) != rows:
                raise ValueError(f"{name}: expected {rows} rows, got {len(found)}")

    def __len__(self) -> int:
        return len(self.mask)

    def __getitem__(self, rows: Tensor) -> Self:
        picked: dict[str, Any] = {}
        for name, value in vars(self).items():
            if value is not None:
                is_tensor = isinstance(value, Tensor | SamplingSupport)
                picked[name] = value[rows] if is_tensor else tuple(value[row] for row in rows.tolist())
        return replace(self, **picked)

    @property
    def without_support(self) -> Self:
        """The same rows as if they were drawn from the whole vocabulary, which is how a reference scores them."""
        return replace(self, support=None)

    def to(self, device: torch.device) -> Self:
        """The same on ``device``."""
        moved: dict[str, Any] = {
            n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor | SamplingSupport)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class Sampled(Rows):
    """Completions of some prompts, as token ids and as text.

    Example:
        One prompt of the ids 5 6, two completions 7 2 and 8 9 2 with 2 the end of sequence and 0 the padding: ``ids``
        is [[5, 6, 7, 2, 0], [5, 6, 8, 9, 2]], ``mask`` [[1, 1, 0], [1, 1, 1]], ``attention_mask`` its like with two
        ones before it, and ``finished`` (True, True).
    """

    logprobs: Tensor
    """[B, T] log-probability with which each token was drawn, out of its set; 0 where masked."""
    entropy: Tensor
    """[B, T] of the distribution that each token was drawn from, in nats; 0 where masked."""
    texts: tuple[str, ...]
    """[B] the completions decoded without special tokens: for rewards and logs, never tokenized again."""
    finished: tuple[bool, ...]
    """[B] False where the completion was cut at the length limit."""
    turns: tuple[tuple[str, ...], ...] | None = field(default=None, kw_only=True)
    """[B] what the model has said in each turn of an episode, of which ``texts`` has the last; None without one."""
    replies: tuple[tuple[str, ...], ...] | None = field(default=None, kw_only=True)
    """[B] what it was told between them: one less."""

    @classmethod
    def concatenate(cls, parts: Sequence["Sampled"]) -> "Sampled":
        """The rows of all parts, padded to the widest prompt and the longest completion."""
        if len(parts) == 1:
            return parts[0]
        length = max(part.mask.shape[1] for part in parts)
        width = max(part.ids.shape[1] - part.mask.shape[1] for part in parts)
        joined: dict[str, Any] = {}
        for name in ("ids", "attention_mask", "mask", "logprobs", "entropy"):
            padded = []
            for part in parts:
                value: Tensor = getattr(part, name)
                left = width - (value.shape[1] - part.mask.shape[1]) if name in ("ids", "attention_mask") else 0
                padded.append(torch.nn.functional.pad(value, (left, length - part.mask.shape[1])))
            joined[name] = torch.cat(padded)
        for name in ("texts", "finished", "turns", "replies"):
            values = [getattr(part, name) for part in parts]
            joined[name] = None if None in values else tuple(chain.from_iterable(values))
        supports = [part.support for part in parts]
        if any(support is not None for support in supports):
            joined["support"] = SamplingSupport.concatenate(
                [part.support or SamplingSupport.full_vocabulary(part.mask) for part in parts]
            )
        return cls(**joined)


@dataclass(frozen=True)
class Scored:
    """Samples and their rewards. B = P * G rows, a prompt's rows adjacent; K rewards.

    Example:
        The two completions of the example in `Sampled` under the rewards right (weight 1) and short (weight 0.5):
        ``rewards`` is {"right": [1, 0], "short": [1, 0], "total": [1.5, 0]}, ``right`` [True, False].
    """

    prompts: Prompts
    sampled: Sampled
    rewards: Mapping[str, Tensor]
    """Name -> [B] score as the function gave it, NaN where it does not apply; "total" is the weighted sum."""
    right: Tensor
    """[B] (bool) whether the outcome reward reaches its threshold."""
    scores: Tensor
    """[B, K] as they enter the total: clipped, before their weights."""
    steps: Tensor
    """[B, T] weighted scores at the token where each step ends, NaN elsewhere; a whole completion is one step."""

    @property
    def group_size(self) -> int:
        """Completions per prompt, G."""
        return len(self.right) // len(self.prompts)

    def rows(self, chosen: Tensor) -> "Scored":
        """Some rows [B'], as many of every prompt."""
        sampled = self.sampled[chosen.to(self.sampled.mask.device)]
        rewards = {name: values[chosen] for name, values in self.rewards.items()}
        others = {name: getattr(self, name)[chosen] for name in ("right", "scores", "steps")}
        return replace(self, sampled=sampled, rewards=rewards, **others)

    def groups(self, chosen: Sequence[int]) -> "Scored":
        """Some prompts with all their rows."""
        size = self.group_size
        rows = torch.tensor([group * size + member for group in chosen for member in range(size)], dtype=torch.long)
        return replace(self.rows(rows), prompts=self.prompts[chosen])

    @classmethod
    def concatenate(cls, parts: Sequence["Scored"]) -> "Scored":
        """All groups of all parts. Columns stay behind unless all parts come from the same data."""
        if len(parts) == 1:
            return parts[0]
        names = set.intersection(*(set(part.prompts.columns) for part in parts))
        length = max(part.steps.shape[1] for part in parts)
        pad = torch.nn.functional.pad
        return cls(
            prompts=Prompts(
                tuple(text for part in parts for text in part.prompts.texts),
                {name: tuple(chain.from_iterable(part.prompts.columns[name] for part in parts)) for name in names},
                tuple(chain.from_iterable(p.prompts.origins for p in parts))
                if all(p.prompts.origins for p in parts)
                else (),
            ),
            sampled=Sampled.concatenate([part.sampled for part in parts]),
            rewards={name: torch.cat([part.rewards[name] for part in parts]) for name in parts[0].rewards},
            right=torch.cat([part.right for part in parts]),
            scores=torch.cat([part.scores for part in parts]),
            steps=torch.cat([pad(p.steps, (0, length - p.steps.shape[1]), value=torch.nan) for p in parts]),
        )

    def to(self, device: torch.device) -> "Scored":
        """The same with the samples on ``device``; rewards stay on the CPU."""
        return replace(self, sampled=self.sampled.to(device))

    def state(self) -> dict[str, Any]:
        """Everything but the columns, as tensors and plain values, for a checkpoint."""
        return asdict(replace(self, prompts=Prompts(self.prompts.texts, {}, self.prompts.origins)))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Scored":
        """Restore what `state` returned."""
        support = state["sampled"]["support"]
        sampled = Sampled(**{**state["sampled"], "support": support and SamplingSupport(**support)})
        return cls(**{**state, "prompts": Prompts(**state["prompts"]), "sampled": sampled})


@dataclass(frozen=True)
class Rollout(Rows):
    """Everything an update reads and nothing else.

    Example:
        The two completions of the example in `Sampled`, of which the first was right: ``advantages`` is
        [[0.7, 0.7, 0], [-0.7, -0.7, -0.7]], ``old_logprobs`` the sampler's ``logprobs``.
    """

    old_logprobs: Tensor
    """[B, T] under the policy that sampled."""
    ref_logprobs: Tensor
    """[B, T] under the reference; zeros where none is used."""
    advantages: Tensor
    """[B, T] an outcome advantage is the same along a row."""

    @property
    def completion_advantages(self) -> Tensor:
        """[B] mean over each row's tokens."""
        return self.advantages.sum(-1) / self.mask.sum(-1).clamp(min=1)

    def on_policy(self, logprobs: Tensor) -> "Rollout":
        """The same with the policy's own log-probabilities [B, T] as the old ones: the ratio is exactly 1."""
        return replace(self, old_logprobs=logprobs.detach())

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


class Clock:
    """Adds up seconds by phase; phases do not nest.

    On a CUDA device work is only queued: where a phase begins or ends, the device is synchronized, so that queued work
    counts towards the phase that has queued it.
    """

    def __init__(self) -> None:
        self.phase = "starting"
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count what runs inside towards ``phase``."""
        self.phase, started = phase, _now()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + _now() - started

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count seconds of one phase, which has ended, towards another one."""
        self._seconds[source] = self._seconds.get(source, 0.0) - seconds
        self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    def restart(self) -> None:
        """Reset all phases, and measure the step from now on."""
        self._seconds, self._started = {}, _now()

    def read(self) -> dict[str, float]:
        """The seconds of every phase since ``restart``, and as "step" all the time since then."""
        return self._seconds | {"step": _now() - self._started}


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def spans(mask: Tensor) -> list[list[tuple[int, int]]]:
    """(first token, end) of every turn of every row, for a mask [B, T] of the model's own tokens.

    Example:
        Of [1, 1, 0, 0, 1, 0] the turns are (0, 2) and (4, 5).
    """
    found: list[list[tuple[int, int]]] = []
    for row in mask.tolist():
        borders = [place for place, (one, other) in enumerate(pairwise([False, *row, False])) if one != other]
        found.append(list(zip(borders[::2], borders[1::2], strict=True)))
    return found
