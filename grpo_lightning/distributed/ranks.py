"""The processes of a run: which portion of the work each does, and how all of them come to know the results.

Advantages, token weights and metrics may depend on the whole rollout, so every process gathers all completions and
rewards, and from there on computes the same. Nothing but who does which forward and backward pass depends on the number
of processes.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_lightning.distributed.signals import Preempted

T = TypeVar("T")


class PeerError(RuntimeError):
    """Another process of the run failed; the message says which and why."""


@dataclass(frozen=True)
class Ranks:
    """This process and how many there are; in a run of one process nothing here costs anything."""

    rank: int = 0
    """The number of this process, from 0."""
    size: int = 1
    """The number of processes."""

    def portion(self, count: int) -> range:
        """Which of ``count`` things fall to this process: contiguous numbers; sizes differ by at most one."""
        first, last = (count * rank // self.size for rank in (self.rank, self.rank + 1))
        return range(first, last)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank. Tensors must be on the CPU."""
        # Before anything is asked of torch.distributed, which a single process has not initialized.
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def together(self, work: Callable[[], T], *, waiting: AbstractContextManager[None] | None = None) -> list[T]:
        """Do ``work`` in every process; if it raises in one of them, all raise.

        Args:
            work: What to do. It must not call the other processes, which may have raised already; tensors of its result
                must be on the CPU where there are several processes.
            waiting: A context that is entered while this process waits for the others.

        Returns:
            What ``work`` returned in every process, by rank.

        Raises:
            Preempted: A process was asked to end, this one or another.
            PeerError: Another process failed. What fails in this one is raised as it is.
        """
        if self.size == 1:
            return [work()]
        value: T | None = None
        error: Exception | Preempted | None = None
        # Raised only after the exchange: the others would wait for this process until the time limit.
        try:
            value = work()
        except (Exception, Preempted) as raised:
            error = raised
        asked = (error.number, error.between_steps) if isinstance(error, Preempted) else None
        problem = None if error is None else (asked, f"{type(error).__name__}: {error}")
        with waiting or nullcontext():
            gathered = self.gather((value, problem))
        if error is not None:
            raise error
        for rank, (_, peer_problem) in enumerate(gathered):
            if peer_problem is not None:
                asked, text = peer_problem
                if asked is not None:
                    raise Preempted(asked[0], between_steps=asked[1])
                raise PeerError(f"process {rank} of {self.size}: {text}")
        values: list[Any] = [value for value, _ in gathered]
        return values

    def add_up(self, values: Mapping[str, Tensor], *, largest: Collection[str] = ()) -> dict[str, Tensor]:
        """Sums of scalars over the processes, by name; of ``*_max`` and of the names in ``largest`` the largest value.

        All processes give the same names.
        """
        if self.size == 1 or not values:
            return dict(values)
        # Two exchanges for all names together: each takes about as long for one number as for a hundred.
        names = sorted(values)
        stacked = torch.stack([values[name].detach().double() for name in names])
        sums, tops = stacked.clone(), stacked.clone()
        dist.all_reduce(sums)
        dist.all_reduce(tops, dist.ReduceOp.MAX)
        return {
            name: (tops if name.endswith("_max") or name in largest else sums)[number].to(values[name].dtype)
            for number, name in enumerate(names)
        }

    def average(
        self, values: Mapping[str, float | Tensor], *, device: torch.device, largest: Collection[str] = ()
    ) -> dict[str, float]:
        """Means of scalars over the processes, by name, added up in float64; ``largest`` as in `add_up`."""
        # In float64, where the mean of equal values is that value, however many processes there are.
        place = device if self.size > 1 else "cpu"
        own = {name: torch.as_tensor(value, device=place, dtype=torch.float64) for name, value in values.items()}
        sums = self.add_up(own, largest=largest)
        is_largest = {name for name in own if name.endswith("_max") or name in largest}
        return {name: float(value) / (1 if name in is_largest else self.size) for name, value in sums.items()}

    def divide(self, groups: Sequence[Sequence[int]], sizes: Sequence[float]) -> list[list[int]]:
        """Rows for each process: about equal work, and a group's rows together where there are enough groups.

        Args:
            groups: The numbers of the rows that belong together.
            sizes: The work that every row makes, in any unit.

        Returns:
            The numbers of the rows of each process, by rank.
        """
        parts: list[Sequence[int]] = list(groups)
        if len(parts) < self.size:
            parts = [[row] for group in groups for row in group]
        rows_of: list[list[int]] = [[] for _ in range(self.size)]
        loads = [0.0] * self.size
        # From the largest to the smallest, each to the process that has least: a large one at the end could not be
        # evened out any more. The same in every process, so that nothing has to be exchanged.
        for part in sorted(parts, key=lambda rows: -sum(sizes[row] for row in rows)):
            least = min(range(self.size), key=lambda rank: (loads[rank], rank))
            rows_of[least] += part
            loads[least] += sum(sizes[row] for row in part)
        return [sorted(rows) for rows in rows_of]


def lost_contact(error: BaseException) -> PeerError | None:
    """What to raise instead of ``error`` if it means that another process is gone; else None."""
    # NCCL and torch's store raise DistError; gloo and a communicator that NCCL's watchdog has aborted raise a plain
    # RuntimeError, known by its text.
    if not isinstance(error, dist.DistError) and not (isinstance(error, RuntimeError) and _LOST.search(str(error))):
        return None
    return PeerError(
        "lost contact with another process of the run: it was killed, ran out of memory, or did not answer within the "
        f"time limit ({error})"
    )


_LOST = re.compile(
    r"/gloo/|\bTCPStore\b|NCCL communicator was aborted|Watchdog caught collective operation|"
    r"\bnccl(Remote|System)Error\b|ProcessGroupNCCL.*(timed? ?out|abort)",
    re.IGNORECASE | re.DOTALL,
)


ALONE = Ranks()
"""A run of one process."""
