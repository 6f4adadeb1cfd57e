"""Groups whose completions are not all over when a rollout ends, kept for the next one."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.batch import Prompts, Sampled, Scored
from grpo_lightning.sampler.own.slots import Begun


@dataclass(frozen=True)
class Unfinished:
    """Groups that a rollout has begun and not trained on, the oldest first; some of them may be over."""

    prompts: Prompts
    """[N] with all their columns: rewards have not seen them yet."""
    sampled: Sampled
    """[N * G] every completion as far as it is."""

    @property
    def group_size(self) -> int:
        """Completions per prompt, G."""
        return len(self.sampled) // len(self.prompts)

    @property
    def lengths(self) -> Tensor:
        """[N, G] tokens of every completion, on the CPU."""
        return self.sampled.mask.sum(-1).view(-1, self.group_size).cpu()

    def groups(self, chosen: Sequence[int]) -> "Unfinished":
        """Some groups, no wider than the longest completion among them."""
        size = self.group_size
        rows = torch.tensor([group * size + member for group in chosen for member in range(size)], dtype=torch.long)
        return Unfinished(self.prompts[chosen], _narrow(self.sampled[rows.to(self.sampled.mask.device)]))

    def over(self, max_new_tokens: int) -> list[bool]:
        """[N] whether nothing more is drawn of a group."""
        finished = torch.tensor(self.sampled.finished).view(-1, self.group_size)
        are_over: list[bool] = (finished | (self.lengths >= max_new_tokens)).all(-1).tolist()
        return are_over

    def begun(self) -> dict[int, Begun]:
        """Row -> what there is of it."""
        sampled, length = self.sampled, self.sampled.mask.shape[1]
        values = [part.tolist() for part in (sampled.ids[:, -length:], sampled.logprobs, sampled.entropy)]
        counts = self.lengths.flatten().tolist()
        kept = [None] * len(counts) if sampled.kept is None else sampled.kept.to(torch.device("cpu")).each(counts)
        return {
            row: Begun(ids[:count], logprobs[:count], entropies[:count], sampled.finished[row], kept[row])
            for row, (count, ids, logprobs, entropies) in enumerate(zip(counts, *values, strict=True))
        }

    def cut(self, max_new_tokens: int) -> "Unfinished":
        """The same with no completion longer than the limit, which may have been another when they were begun."""
        if not (self.lengths > max_new_tokens).any():
            return self
        too_long = (self.lengths > max_new_tokens).flatten().tolist()
        finished = [is_over and not long for is_over, long in zip(self.sampled.finished, too_long, strict=True)]
        return replace(self, sampled=replace(_narrow(self.sampled, max_new_tokens), finished=tuple(finished)))

    @classmethod
    def concatenate(cls, parts: Sequence["Unfinished"]) -> "Unfinished":
        """All groups of all parts, whose prompts have the same columns."""
        prompts = functools.reduce(joined, [part.prompts for part in parts])
        return cls(prompts, Sampled.concatenate([part.sampled for part in parts]))

    def to(self, device: torch.device) -> "Unfinished":
        """The same on ``device``."""
        return replace(self, sampled=self.sampled.to(device))

    def state(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint."""
        return {
            "prompts": list(self.prompts.texts),
            "columns": {name: list(values) for name, values in self.prompts.columns.items()},
            "sampled": self.sampled.state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Unfinished":
        """What `state` described."""
        columns = {name: tuple(values) for name, values in state["columns"].items()}
        return cls(Prompts(tuple(state["prompts"]), columns), Sampled.from_state(state["sampled"]))


Carried = Scored | Unfinished
"""Groups that one rollout leaves to the next."""


def restored(state: Mapping[str, Any]) -> Carried:
    """The groups that ``state()`` of either kind described."""
    return Scored.from_state(state) if "rewards" in state else Unfinished.from_state(state)


def joined(one: Prompts, other: Prompts) -> Prompts:
    """The prompts of both, which have the same columns."""
    columns = {name: (*values, *other.columns[name]) for name, values in one.columns.items()}
    return Prompts((*one.texts, *other.texts), columns)


def _narrow(sampled: Sampled, most: int | None = None) -> Sampled:
    """The same completions without columns [T] in which none has a token, or behind the ``most``-th."""
    length = int(sampled.mask.sum(-1).max())
    surplus = sampled.mask.shape[1] - min(length, most or length)
    if surplus <= 0:
        return sampled
    cut: dict[str, Any] = {
        name: value[:, :-surplus] for name, value in vars(sampled).items() if isinstance(value, Tensor)
    }
    if sampled.kept is not None:
        cut["kept"] = sampled.kept.narrow(sampled.mask.shape[1] - surplus)
    return replace(sampled, **cut)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The groups that a rollout trains on, and what it leaves to the next one."""

    scored: Scored
    """P groups."""
    judged: Scored
    """All groups that were sampled and scored for it."""
    left_over: Carried | None
    """For the next rollout."""
    metrics: Mapping[str, Tensor]
    """Of the choice, and the failures of rewards."""
    num_tokens: int
    """Sampled for it, whether or not they are trained on."""
    flops: float
    """Least floating-point operations of sampling, see ``Policy.flops``."""
    is_fresh: bool
    """Whether all of ``scored`` was sampled by the policy as it is now."""
