"""The processes of a run: which share of the work each does, and how all of them come to know the results.

What a rollout is worth is decided over all its groups, so every process gathers all completions and rewards, and from
there on computes the same. Nothing but the share of the forward and backward passes depends on the number of processes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Preempted(Exception):
    """The process was asked to end (SIGTERM) while it sampled; the weights are those of the last complete step."""


class PeerError(RuntimeError):
    """Another process of the run failed; says which and why."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What some work returned, or what it raised."""

    value: T | None
    error: Exception | None


@dataclass(frozen=True)
class Ranks:
    """This process and how many there are; without others everything here is free."""

    rank: int = 0
    size: int = 1
    lockstep: bool = False
    """Whether all have to make the same number of forward calls, since each holds a part of every weight only."""

    def share(self, count: int) -> range:
        """This process's numbers of ``count`` things: contiguous, sizes differ by at most one."""
        first, last = (count * rank // self.size for rank in (self.rank, self.rank + 1))
        return range(first, last)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank. Tensors must be on the CPU."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def attempt(self, work: Callable[[], T]) -> "Outcome[T]":
        """Do ``work``, keeping what it raises for `agree` where there are other processes to tell."""
        if self.size == 1:
            return Outcome(work(), None)
        try:
            return Outcome(work(), None)
        except Exception as error:
            return Outcome(None, error)

    def agree(self, outcome: "Outcome[T]") -> list[T]:
        """What every process has, by rank; if one has raised, all raise. Tensors must be on the CPU.

        Raises:
            Preempted: That is what was raised somewhere.
            PeerError: Another process failed.
        """
        error = outcome.error
        told = None if error is None else (isinstance(error, Preempted), f"{type(error).__name__}: {error}")
        gathered = self.gather((outcome.value, told))
        if error is not None:
            raise error
        for rank, (_, problem) in enumerate(gathered):
            if problem is not None:
                stopped, text = problem
                raise Preempted(text) if stopped else PeerError(f"process {rank} of {self.size}: {text}")
        values: list[Any] = [value for value, _ in gathered]
        return values

    def most(self, count: int) -> int:
        """The largest of the processes' counts, where they work in lockstep; else this one's."""
        return max(self.gather(count)) if self.lockstep else count

    def anyone(self, flag: bool) -> bool:
        """Whether ``flag`` holds in any process, where they work in lockstep; else in this one."""
        return any(self.gather(flag)) if self.lockstep else flag

    def add_up(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums [] over the processes, by name; of ``*_max`` the largest. All processes give the same names."""
        if self.size == 1 or not values:
            return dict(values)
        names = sorted(values)
        stacked = torch.stack([values[name].detach().double() for name in names])
        sums, largest = stacked.clone(), stacked.clone()
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return {
            name: (largest if name.endswith("_max") else sums)[number].to(values[name].dtype)
            for number, name in enumerate(names)
        }

    def spread(self, groups: Sequence[Sequence[int]], sizes: Sequence[float]) -> list[list[int]]:
        """Rows for each process, by rank: about equal work, and a group's rows together where there are enough groups.

        Args:
            groups: Numbers of the rows that belong together.
            sizes: Work of every row.
        """
        parts: list[Sequence[int]] = list(groups)
        if len(parts) < self.size:
            parts = [[row] for group in groups for row in group]
        found: list[list[int]] = [[] for _ in range(self.size)]
        loads = [0.0] * self.size
        for part in sorted(parts, key=lambda rows: -sum(sizes[row] for row in rows)):
            least = min(range(self.size), key=lambda rank: (loads[rank], rank))
            found[least] += part
            loads[least] += sum(sizes[row] for row in part)
        return [sorted(rows) for rows in found]


def lost_contact(error: BaseException) -> PeerError | None:
    """What to say instead of ``error`` if it means that another process is gone, whatever exchange showed that."""
    if not isinstance(error, dist.DistError) and not (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
        return None
    return PeerError(
        "lost contact with another process of the run: it was killed, ran out of memory, or did not answer within the "
        f"time limit ({error})"
    )


ALONE = Ranks()
"""A run of one process."""
