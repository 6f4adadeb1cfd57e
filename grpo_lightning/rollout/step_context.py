"""What a step lends to the parts that sample in it."""

from dataclasses import dataclass, field

from grpo_lightning.clock import Clock
from grpo_lightning.distributed.ranks import SINGLE_PROCESS, Ranks
from grpo_lightning.sampler.base import Poll, Sampler
from grpo_lightning.sampler.native.sampler import NativeSampler


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The seed of a step's samples and what watches over it.

    Example:
        ``StepContext(seed=7)`` is all that a rollout in a script of one's own needs.
    """

    seed: int
    """Decides everything that is sampled, in [0, 2^64)."""
    step: int = 0
    """Steps completed before."""
    clock: Clock = field(default_factory=Clock)
    """Adds up the seconds of the phases rollout, reward, wait and score."""
    poll: Poll | None = None
    """Called between generated tokens; may raise to abandon the sampling."""
    ranks: Ranks = SINGLE_PROCESS
    """The processes that divide the work among them."""
    sampler: Sampler = field(default_factory=NativeSampler)
    """Generates the completions."""
