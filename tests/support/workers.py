"""Few worker processes, so that tests start quickly."""

from collections.abc import Iterator
from contextlib import contextmanager

from grpo_lightning.reward import workers


@contextmanager
def limited(number: int) -> Iterator[None]:
    """Inside, rewards have at most so many workers, started anew."""
    workers.close_pool()
    before, workers.MAX_WORKERS = workers.MAX_WORKERS, number
    yield
    workers.close_pool()
    workers.MAX_WORKERS = before
