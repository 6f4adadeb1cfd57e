"""Completions that an earlier rollout has begun, and that this one goes on with."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lightning.batch.rows import Kept


@dataclass(frozen=True)
class Begun:
    """A completion that an earlier rollout has begun."""

    ids: Sequence[int]
    """[t] its tokens so far."""
    logprobs: Sequence[float]
    """[t] of the policies that drew them, in nats."""
    entropies: Sequence[float]
    """[t] in nats."""
    finished: bool = False
    """Whether it has ended of itself."""
    kept: Kept | None = None
    """[t] the sets that they were drawn from; None: the whole vocabulary."""

    def over(self, max_new_tokens: int) -> bool:
        """Whether nothing more is drawn of it."""
        return self.finished or len(self.ids) >= max_new_tokens
