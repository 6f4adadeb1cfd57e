"""The processes of a run: which rows each of them computes, and how results are exchanged.

Advantages, token weights and metrics may depend on the whole rollout, so every process gathers all completions and
rewards and computes the same from there on. The number of processes decides only who does which forward and backward
pass.
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
    """Another process of the run failed; the message says which and why, ``inputs`` is that of a `RewardError`."""

    inputs: Any = None


@dataclass(frozen=True)
class Ranks:
    """This process and the number of processes; with one process nothing here communicates."""

    rank: int = 0
    """The number of this process, from 0."""
    size: int = 1
    """The number of processes."""

    def shard_range(self, count: int) -> range:
        """This process's part of ``count`` items: contiguous numbers, sizes that differ by at most one."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank; tensors must be on the CPU."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def all_or_raise(self, work: Callable[[], T], *, waiting: AbstractContextManager[None] | None = None) -> list[T]:
        """Call ``work`` in every process; if it raises in one of them, all raise.

        Args:
            work: Must not communicate, since other processes may have raised; tensors of its result must be on the CPU.
            waiting: A context that is entered while this process waits for the others.

        Returns:
            What ``work`` returned in every process, by rank.

        Raises:
            Preempted: A process was asked to end, this one or another.
            PeerError: Another process failed. An error of this process is raised as it is.
        """
        if self.size == 1:
            return [work()]
        value: T | None = None
        error: Exception | Preempted | None = None
        try:
            value = work()
        except (Exception, Preempted) as raised:  # raised after the exchange, for which the others wait
            error = raised
        signal = (error.number, error.between_steps) if isinstance(error, Preempted) else None
        inputs = getattr(error, "inputs", None)
        problem = None if error is None else (signal, f"{type(error).__name__}: {error}", inputs)
        with waiting or nullcontext():
            gathered = self.gather((value, problem))
        if error is not None:
            raise error
        for rank, (_, peer_problem) in enumerate(gathered):
            if peer_problem is not None:
                signal, text, inputs = peer_problem
                if signal is not None:
                    raise Preempted(signal[0], between_steps=signal[1])
                peer_error = PeerError(f"process {rank} of {self.size}: {text}")
                peer_error.inputs = inputs
                raise peer_error
        values: list[Any] = [value for value, _ in gathered]
        return values

    def sum(self, values: Mapping[str, Tensor], *, largest: Collection[str] = ()) -> dict[str, Tensor]:
        """Sums of scalars over the processes, by name; the maximum for ``*_max`` and the names in ``largest``.

        All processes give the same names.
        """
        if self.size == 1 or not values:
            return dict(values)
        # Two exchanges for all names: one takes about as long for a hundred numbers as for one.
        names = sorted(values)
        sums = torch.stack([values[name].detach().double() for name in names])
        maxima = sums.clone()
        dist.all_reduce(sums)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        return {
            name: (maxima if _is_maximum(name, largest) else sums)[number].to(values[name].dtype)
            for number, name in enumerate(names)
        }

    def mean(
        self, values: Mapping[str, float | Tensor], *, device: torch.device, largest: Collection[str] = ()
    ) -> dict[str, float]:
        """Means of scalars over the processes, by name; ``largest`` as in `sum`."""
        # In float64 the mean of equal values is that value, whatever the number of processes.
        place = device if self.size > 1 else "cpu"
        doubles = {name: torch.as_tensor(value, device=place, dtype=torch.float64) for name, value in values.items()}
        sums = self.sum(doubles, largest=largest)
        return {name: float(v) / (1 if _is_maximum(name, largest) else self.size) for name, v in sums.items()}

    def balance(self, groups: Sequence[Sequence[int]], sizes: Sequence[float]) -> list[list[int]]:
        """Assign rows to processes with about equal work; groups stay whole where there are enough of them.

        Args:
            groups: The numbers of the rows that belong together.
            sizes: The work of every row, in any unit.

        Returns:
            The numbers of the rows of each process, by rank.
        """
        parts: list[Sequence[int]] = list(groups)
        if len(parts) < self.size:
            parts = [[row] for group in groups for row in group]
        rows_of: list[list[int]] = [[] for _ in range(self.size)]
        loads = [0.0] * self.size
        # The largest first, each to the process with the least work; every process computes the same assignment.
        for part in sorted(parts, key=lambda rows: -sum(sizes[row] for row in rows)):
            least = min(range(self.size), key=lambda rank: (loads[rank], rank))
            rows_of[least] += part
            loads[least] += sum(sizes[row] for row in part)
        return [sorted(rows) for rows in rows_of]


SINGLE_PROCESS = Ranks()
"""A run of one process."""


def lost_contact(error: BaseException) -> PeerError | None:
    """The `PeerError` to raise instead of ``error`` if that means that another process is gone; else None."""
    # NCCL and torch's store raise DistError; gloo and aborted NCCL communicators raise a plain RuntimeError.
    if not isinstance(error, dist.DistError) and not (isinstance(error, RuntimeError) and _LOST.search(str(error))):
        return None
    return PeerError(
        "lost contact with another process of the run: it was killed, ran out of memory, or did not answer within the "
        f"time limit ({str(error).partition(chr(10))[0]})"
    )


_LOST = re.compile(
    r"/gloo/|\bTCPStore\b|NCCL communicator was aborted|Watchdog caught collective operation|"
    r"\bnccl(Remote|System)Error\b|ProcessGroupNCCL.*(timed? ?out|abort)",
    re.IGNORECASE | re.DOTALL,
)


def _is_maximum(name: str, largest: Collection[str]) -> bool:
    return name.endswith("_max") or name in largest
