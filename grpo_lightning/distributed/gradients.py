"""How the gradients of several processes become one: added up, not averaged."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from grpo_lightning.distributed.strategies import FullyShardedStrategy


def check_strategy(strategy: Strategy) -> None:
    """Refuse a strategy whose gradients cannot be added up, and which may read checkpoints in ways of its own.

    Raises:
        ValueError: It is one.
    """
    is_known = isinstance(strategy, SingleDeviceStrategy | FullyShardedStrategy | DDPStrategy)
    if not is_known or (isinstance(strategy, DDPStrategy) and strategy._ddp_comm_hook is not None):
        hook = " with a ddp_comm_hook" if is_known else ""
        raise ValueError(
            f"trainer.strategy={type(strategy).__name__}{hook}: allowed are a single device, DDP without a "
            "ddp_comm_hook (trainer=ddp, or strategy='ddp' of a Trainer of your own) and "
            f"{FullyShardedStrategy.__module__}.FullyShardedStrategy (trainer=fsdp), whose gradients can be added up"
        )


def add_up_gradients(strategy: Strategy) -> None:
    """Make a strategy add gradients up over its processes instead of averaging them.

    The token weights of the loss are those of the whole optimizer step, so the gradients of all processes are the
    parts of one sum. Called once the strategy has wrapped the module.

    Raises:
        ValueError: As `check_strategy`.
    """
    check_strategy(strategy)
    if not isinstance(strategy, DDPStrategy):
        return
    # Multiplying the loss by the number of processes would do the same but for rounding.
    wrapped: Any = strategy.model
    wrapped.register_comm_hook(None, _add_up)


def _add_up(
    state: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])
