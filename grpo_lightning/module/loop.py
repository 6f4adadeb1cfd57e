"""What a step needs of its surroundings: a loop of one's own, or Lightning's Trainer."""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grpo_lightning.distributed import signals
from grpo_lightning.distributed.ranks import SINGLE_PROCESS, Ranks
from grpo_lightning.distributed.strategies import gathered, sum_gradients


class Loop:
    """Steps that a program makes one by one in this process, without a Trainer; `TrainerLoop` makes them with one.

    Args:
        module: Whose optimizer and schedule are made here.
        precision: bf16-mixed computes in bfloat16, anything else in the weights' own type.
    """

    ranks = SINGLE_PROCESS
    """The processes that divide the work among them."""
    optimizer: Any
    """The one optimizer of the run."""
    schedule: Any
    """The learning-rate scheduler, which makes one step per rollout."""

    def __init__(self, module: LightningModule, *, precision: Any = None) -> None:
        self._autocast = module.device.type if precision == "bf16-mixed" else None
        made: Any = module.configure_optimizers()
        self.optimizer, self.schedule = made["optimizer"], made["lr_scheduler"]

    def begin(self, *, epochs: int) -> None:
        """Get ready to train, for so many stretches between validations; the module is on its device."""

    def begin_steps(self) -> None:
        """From now on the process, when asked to end, does so in `check`."""

    def check(self) -> None:
        """Raise ``Preempted`` if the process was asked to end."""

    def end_steps(self) -> None:
        """From now on the process, when asked to end, does so at once."""

    def precision(self) -> AbstractContextManager[Any]:
        """Inside, arithmetic is that of a training step."""
        # Rounded weights must not be kept from one optimizer step to the next, within one training step.
        kind = self._autocast
        return torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=False) if kind else nullcontext()

    def sampling(self, policy: nn.Module) -> AbstractContextManager[None]:
        """Inside, every process has all weights of the policy."""
        return nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro-batch; processes exchange gradients after the ``last`` one."""
        loss.backward()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Publish scalars at a step."""

    def stop(self) -> None:
        """Make this step the last one."""


class TrainerLoop(Loop):
    """Steps under Lightning's Trainer, on any number of processes.

    Args:
        module: Trained by manual optimization.
        trainer: The module's, once it has chosen its strategy.
    """

    def __init__(self, module: LightningModule, trainer: Trainer) -> None:
        self._module = module
        self._trainer = trainer
        self._signals = signals.current()
        self.ranks = Ranks(trainer.global_rank, trainer.world_size)

    @property
    def optimizer(self) -> Any:
        return self._module.optimizers()

    @property
    def schedule(self) -> Any:
        return self._module.lr_schedulers()

    @property
    def is_logged(self) -> bool:
        """Whether loggers are told: a later validation in a training's directory adds nothing to what that logged."""
        directory = Path(self._trainer.default_root_dir)
        trained = all((directory / name).exists() for name in ("summary.json", "checkpoints/last.ckpt"))
        return self._trainer.state.fn == "fit" or not trained

    def begin(self, *, epochs: int) -> None:
        """Make the strategy add gradients up, and refuse a trainer that would end or round otherwise than asked.

        Raises:
            ValueError: The trainer's strategy, precision or limits do not fit.
        """
        sum_gradients(self._trainer.strategy)
        if self._trainer.precision == "16-mixed":
            raise ValueError(
                "trainer.precision=16-mixed: allowed are 32-true and bf16-mixed (gradients would be clipped before "
                "they are unscaled)"
            )
        if self._trainer.max_steps != -1:
            raise ValueError(
                f"trainer.max_steps={self._trainer.max_steps}: allowed is -1; it counts optimizer steps, of which a "
                "rollout may have several, and the module ends after its own number of steps"
            )
        limit = self._trainer.max_epochs
        if limit is not None and -1 < limit < epochs:
            raise ValueError(
                f"trainer.max_epochs={limit}: allowed is -1, or at least {epochs}: an epoch lasts from one validation "
                "to the next"
            )

    def begin_steps(self) -> None:
        self._signals.begin_steps(self._trainer.strategy.launcher)

    def check(self) -> None:
        self._signals.check()

    def end_steps(self) -> None:
        self._signals.end_steps()

    def precision(self) -> AbstractContextManager[Any]:
        return self._trainer.precision_plugin.train_step_context()

    def sampling(self, policy: nn.Module) -> AbstractContextManager[None]:
        return gathered(policy)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        wrapped: Any = self._trainer.strategy.model
        with nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync():
            self._module.manual_backward(loss)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write scalars to the trainer's loggers where `is_logged`; they are also its ``callback_metrics``."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*sync_dist=True")  # the values are the same in all processes
            self._module.log_dict(dict(metrics), logger=False, batch_size=1)
        if self.is_logged:
            for logger in self._trainer.loggers:
                logger.log_metrics(dict(metrics), step=step)

    def stop(self) -> None:
        self._trainer.should_stop = True
