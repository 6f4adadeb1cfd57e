"""More groups in flight than are trained on: sampling stops early, and what is not over goes on in the next rollout.

Long completions keep the others waiting. With some more groups in flight a rollout ends as soon as enough of them are
over; the others stay as far as they are (APRIL, arXiv:2509.18521). Short groups therefore come first, and a long one is
trained on in a later step, under the log-probabilities of the policies that sampled its tokens.

Everywhere: P prompts to train on, N >= P groups in flight, G completions of each.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_lightning.batch import Prompts, Sampling
from grpo_lightning.policy import Policy
from grpo_lightning.rollout.judge import Judge
from grpo_lightning.rollout.step_context import StepContext
from grpo_lightning.rollout.unfinished import Carried, Chosen, Unfinished, joined

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_ROUNDING = 1e-9


@dataclass(frozen=True)
class OverSample:
    """Samples ``ratio`` times as many groups as are trained on, and stops as soon as enough of them are over.

    Args:
        judge: Scores the groups that are trained on.
        ratio: N / P, > 1.

    Raises:
        ValueError: On construction, if the judge has an environment: an episode that has begun is not carried over.
    """

    judge: Judge
    ratio: float

    def __post_init__(self) -> None:
        if self.judge.environment is not None:
            raise ValueError(f"rollout.over_sample={self.ratio}: allowed with an environment is 1")

    def choose(
        self,
        policy: Policy,
        prompts: Prompts,
        carried: Carried | None,
        *,
        group_size: int,
        sampling: Sampling,
        context: StepContext,
    ) -> Chosen:
        """Go on with what is carried, begin new groups beside it, and take the oldest that are over.

        Every process does so for its own portion, with groups of all ages in each, and gets to know all. It stops by
        itself: which groups are over in time depends on how many processes there are.

        Args:
            policy: Samples.
            prompts: [N] of which the first are begun, as many as there is room for beside the carried ones.
            carried: What the last rollout left; left out if it has other columns or another number of completions.
            group_size: Completions per prompt, G.
            sampling: How tokens are drawn.
            context: The step's seed and what watches over it.

        Raises:
            ValueError: A column holds what a checkpoint cannot.
        """
        _check_columns(prompts)
        ranks = context.ranks
        before = _fitting(carried, prompts, group_size, sampling.max_new_tokens)
        old = len(before.prompts) if before else 0
        # N is P * ratio, rounded up: N / ratio is P and less than one more, but for rounding.
        wanted = max(1, math.floor(len(prompts) / self.ratio + _ROUNDING))
        # Every process begins a group, though more may have been left than are now to be in flight.
        asked = prompts[range(max(len(prompts) - old, ranks.size))]
        if before:
            asked = joined(before.prompts, asked)
        # Group i falls to process i mod size, so that each has as many of the old ones.
        own_of = [range(rank, len(asked), ranks.size) for rank in range(ranks.size)]
        drawn_before = torch.zeros(len(asked), group_size, dtype=torch.long)
        if before:
            drawn_before[:old] = before.lengths

        def sample() -> _Portion:
            return _sample(policy, asked, before, own_of[ranks.rank], wanted, group_size, sampling, context)

        # In lockstep all forward calls are common ones: an error between them could not be told to the others.
        early = sample() if ranks.lockstep else None
        parts = ranks.together(lambda: early or sample(), waiting=context.clock("wait"))
        together = Unfinished.concatenate([part.found for part in parts]).to(parts[ranks.rank].device)
        place = {group: number for number, group in enumerate(group for own in own_of for group in own)}
        over = sorted(own[number] for own, part in zip(own_of, parts, strict=True) for number in part.done)
        chosen = together.groups([place[group] for group in over])
        rest = [place[group] for group in range(len(asked)) if group not in over]
        scored, told = self.judge.score_sampled(policy, chosen.prompts, chosen.sampled, context=context)
        num_carried = drawn_before[over].sum()
        return Chosen(
            scored=scored,
            judged=scored,
            left_over=together.groups(rest) if rest else None,
            metrics={name: torch.tensor(value) for name, value in told.items()}
            | {"completion/carried_fraction": num_carried / chosen.lengths.sum()},
            num_tokens=int(together.lengths.sum() - drawn_before.sum()),
            flops=sum(part.flops for part in parts),
            is_fresh=not num_carried,
        )


@dataclass(frozen=True)
class _Portion:
    """What one process has sampled."""

    found: Unfinished
    done: list[int]
    """Numbers of the groups in ``found`` to train on."""
    flops: float
    device: torch.device
    """Where it was sampled."""


def _sample(
    policy: Policy,
    asked: Prompts,
    before: Unfinished | None,
    own: range,
    wanted: int,
    group_size: int,
    sampling: Sampling,
    context: StepContext,
) -> _Portion:
    """Sample what falls to this process, ``own`` among the groups that are asked."""
    ranks, limit = context.ranks, sampling.max_new_tokens
    known = before.begun() if before else {}
    begun = {
        number * group_size + member: known[row]
        for number, group in enumerate(own)
        for member in range(group_size)
        if (row := group * group_size + member) in known
    }
    share = len(range(ranks.rank, wanted, ranks.size))

    def enough(over: Sequence[bool]) -> bool:
        rows = range(0, len(over), group_size)
        return sum(all(over[row : row + group_size]) for row in rows) >= share

    with context.clock("rollout"):
        sampled = policy.sample(
            asked[own].texts,
            group_size=group_size,
            sampling=sampling,
            seed=context.seed,
            # A number that no prompt of another process has.
            first_prompt=ranks.rank * (len(asked) // ranks.size + 1),
            poll=context.poll,
            ranks=ranks,
            begun=begun,
            enough=enough,
        )
    drawn = [row for row in range(len(sampled)) if row not in begun or not begun[row].over(limit)]
    flops = policy.flops(sampled[torch.tensor(drawn, device=sampled.mask.device)])
    found = Unfinished(asked[own], sampled)
    done = [number for number, over in enumerate(found.over(limit)) if over][:share]
    return _Portion(found.to(_CPU) if ranks.size > 1 else found, done, flops, sampled.mask.device)


def _fitting(carried: Carried | None, prompts: Prompts, group_size: int, max_new_tokens: int) -> Unfinished | None:
    """What is carried, if it can be gone on with."""
    if carried is None:
        return None
    if (
        not isinstance(carried, Unfinished)
        or carried.group_size != group_size
        or carried.prompts.columns.keys() != prompts.columns.keys()
    ):
        log.warning("%d groups of the last rollout have another size or other columns: left out", len(carried.prompts))
        return None
    return carried.cut(max_new_tokens)


def _check_columns(prompts: Prompts) -> None:
    for name, values in prompts.columns.items():
        if wrong := [value for value in values if not _is_plain(value)]:
            raise ValueError(
                f"rollout.over_sample: column {name!r} of the data has {wrong[0]!r:.80}: allowed are texts, numbers, "
                "true, false, null, and lists and objects of these, since checkpoints hold the groups that are carried "
                "over"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_is_plain, (*value, *value.values())))
    return type(value) in (str, int, float, bool, type(None))
