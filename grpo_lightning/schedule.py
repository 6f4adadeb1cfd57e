"""Learning-rate schedules: what the configured rate is multiplied by in each step, one step per rollout."""

import math


def constant(step: int, *, total_steps: int, warmup_steps: int) -> float:
    """A linear warm-up, then the configured rate itself.

    Args:
        step: Steps completed before this one.
        total_steps: The number of steps in the run.
        warmup_steps: The rate rises linearly over these; 0 for none.

    Returns:
        The multiplier of ``optimizer.lr``; in the last step of the warm-up it is 1.
    """
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def linear(step: int, *, total_steps: int, warmup_steps: int) -> float:
    """A linear warm-up, then linearly down to 0 after the last step.

    Args and returns are those of ``constant``.
    """
    return constant(step, total_steps=total_steps, warmup_steps=warmup_steps) * (
        1 - _elapsed(step, total_steps, warmup_steps)
    )


def cosine(step: int, *, total_steps: int, warmup_steps: int) -> float:
    """A linear warm-up, then half a cosine down to 0 after the last step.

    Args and returns are those of ``constant``.
    """
    rise = constant(step, total_steps=total_steps, warmup_steps=warmup_steps)
    return rise * (1 + math.cos(math.pi * _elapsed(step, total_steps, warmup_steps))) / 2


def _elapsed(step: int, total_steps: int, warmup_steps: int) -> float:
    """The fraction of the steps after the warm-up that are completed, in [0, 1]."""
    return min(1.0, max(0, step - warmup_steps) / max(1, total_steps - warmup_steps))
