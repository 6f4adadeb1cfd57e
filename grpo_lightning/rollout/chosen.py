"""What a rollout trains on."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from grpo_lightning.batch import Scored
from grpo_lightning.rollout.unfinished import Carried


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
