"""Few worker processes, so that tests start quickly."""

from collections.abc import Iterator
from contextlib import contextmanager

from grpo_lightning.reward.engine import pool


@contextmanager
def limited(number: int) -> Iterator[None]:
    """Inside, rewards have at most so many workers, started anew."""
    pool.close()
    before, pool.MOST_WORKERS = pool.MOST_WORKERS, number
    yield
    pool.close()
    pool.MOST_WORKERS = before
