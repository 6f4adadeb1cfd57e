"""What every trained module here shares: counting steps, logging, validation, optimizer steps that survive bad numbers.

A step is one batch of prompts, whatever the number of optimizer steps made from it; Lightning's ``global_step`` counts
the latter, so nothing here relies on it.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn

from grpo_lightning.batch import Prompts
from grpo_lightning.clock import Clock, peak_memory
from grpo_lightning.policy import Policy
from grpo_lightning.validation import Validation

log = logging.getLogger(__name__)

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Schedule = Callable[..., float]


class Preempted(Exception):
    """The process was asked to end (SIGTERM) while it sampled; the weights are those of the last complete step."""


class StepModule(LightningModule):
    """Trains a policy for ``steps`` steps by manual optimization and validates it.

    Args:
        policy: Trained.
        validation: Run before the first step, after every ``validation.every`` and after the last.
        optimizer: Called with the trainable parameters.
        schedule: (steps completed, total_steps=) -> multiplier of the learning rate.
        steps: Batches of prompts to train on.
        seed: Of all sampling and shuffling.
        max_grad_norm: Clip threshold of the gradient's L2 norm.
        max_skipped: Optimizer steps in a row that may be skipped because their gradient is not finite.
    """

    def __init__(
        self,
        policy: Policy,
        validation: Validation,
        optimizer: OptimizerFactory,
        schedule: Schedule,
        *,
        steps: int,
        seed: int,
        max_grad_norm: float,
        max_skipped: int,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = policy
        self.validation = validation
        self.optimizer = optimizer
        self.schedule = schedule
        self.steps = steps
        self.seed = seed
        self.max_grad_norm = max_grad_norm
        self.max_skipped = max_skipped
        self.clock = Clock()
        self.peak = 0.0
        self.completed_steps = 0
        self.validated_at = -1
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.metrics: dict[str, float] = {}
        self.config: dict[str, Any] = {}
        """The run's settings as plain values, for checkpoints and logs; nothing here reads it."""

    def seed_of(self, *what: object) -> int:
        """A seed for one purpose, such as ("rollout", 7); the same in every run with the same ``seed``."""
        key = repr((self.seed, *what)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())

    def poll(self) -> None:
        """Raise ``Preempted`` if the process was asked to end; called between generated tokens."""
        if self.trainer.received_sigterm:
            raise Preempted(f"SIGTERM during step {self.completed_steps + 1}")

    def report(self, values: Mapping[str, float | Tensor]) -> None:
        """Write scalars to the loggers at the number of completed steps, averaged over ranks (``*_max``: the largest).

        They are also Lightning's ``callback_metrics``. What is not finite is left out, such as a mean over nothing.
        """
        reduced = {
            name: float(
                self.trainer.strategy.reduce(
                    torch.as_tensor(value, device=self.device, dtype=torch.float32),
                    reduce_op="max" if name.endswith("_max") else "mean",
                )
            )
            for name, value in sorted(values.items())
        }
        finite = {name: value for name, value in reduced.items() if math.isfinite(value)}
        self.metrics = {name: value for name, value in self.metrics.items() if name not in reduced} | finite
        self.log_dict(finite, logger=False, batch_size=1)
        if self.trainer.state.fn == "fit":
            for logger in self.loggers:
                logger.log_metrics(finite, step=self.completed_steps)

    def apply_gradients(self) -> float:
        """Clip and step, then drop the gradients; a step whose gradient is not finite is skipped.

        Returns:
            The gradient's norm before clipping.

        Raises:
            FloatingPointError: More than ``max_skipped`` steps in a row were skipped.
        """
        optimizer: Any = self.optimizers()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = float(nn.utils.clip_grad_norm_(parameters, self.max_grad_norm))
        if norm < float("inf"):
            optimizer.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            log.warning("step %d: gradient norm %s, optimizer step skipped", self.completed_steps + 1, norm)
        optimizer.zero_grad()
        if self.skipped_in_a_row > self.max_skipped:
            raise FloatingPointError(
                f"step {self.completed_steps + 1}: {self.skipped_in_a_row} optimizer steps in a row had a gradient "
                f"that is not finite (module.max_skipped={self.max_skipped}): lower optimizer.lr or check the rewards"
            )
        return norm

    def complete_step(self, values: Mapping[str, float | Tensor]) -> None:
        """Count the step, report its metrics, and move the schedule on."""
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        rate = optimizer.param_groups[0]["lr"]
        self.completed_steps += 1
        self.report({**values, "optim/lr": rate, "optim/skipped": float(self.skipped)})
        schedule.step()
        if self.completed_steps >= self.steps:
            self.trainer.should_stop = True

    def performance(self, num_tokens: int, work: float = 0.0) -> dict[str, float]:
        """Seconds of the step's phases, its speed and memory.

        Args:
            num_tokens: Sampled in it on this device.
            work: Least floating-point operations that it takes, as ``Policy.work`` counts them.
        """
        seconds = self.clock.read()
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else peak_memory()
        limit = {"perf/gemm_fraction": work / (seconds["step"] * self.peak)} if work and self.peak else {}
        return (
            {f"time/{phase}": value for phase, value in seconds.items()}
            | limit
            | {
                "perf/tokens_per_second": num_tokens * self.trainer.world_size / seconds["step"],
                "perf/peak_memory_gb": peak / 1e9,
            }
        )

    def on_train_start(self) -> None:
        self.peak = self.policy.peak()

    @property
    def _validation_due(self) -> bool:
        """False where a resumed run starts between two validations, or right after one that it already has."""
        if self.trainer.state.fn != "fit":
            return True
        done = self.completed_steps
        return self.validated_at != done and (done in (0, self.steps) or done % self.validation.every == 0)

    def validation_step(self, prompts: Prompts, batch_idx: int) -> dict[str, Any] | None:
        if not self._validation_due:
            return None
        judged = self.validation.step(
            self.policy,
            prompts,
            completed_steps=self.completed_steps,
            seed=self.seed_of("validation", batch_idx, self.global_rank),
            clock=self.clock,
            poll=self.poll,
        )
        return {"judged": judged}

    def on_validation_epoch_end(self) -> None:
        if not self._validation_due:
            return
        self.validated_at = self.completed_steps
        self.report(self.validation.compute())

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer([p for p in self.policy.parameters() if p.requires_grad])
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.schedule(step, total_steps=self.steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Lightning's own progress would restore a position within an epoch of another length.
        checkpoint.pop("loops", None)
        checkpoint["step"] = {
            "completed": self.completed_steps,
            "validated_at": self.validated_at,
            "skipped": [self.skipped, self.skipped_in_a_row],
            "metrics": dict(self.metrics),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["step"]
        self.completed_steps, self.validated_at = state["completed"], state["validated_at"]
        self.skipped, self.skipped_in_a_row = state["skipped"]
        self.metrics = dict(state["metrics"])


def add_up(known: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add ``more`` to the sums in ``known``, by name; of ``*_max`` keep the larger."""
    for name, value in more.items():
        before = known.get(name)
        if before is None:
            known[name] = value
        else:
            known[name] = torch.maximum(before, value) if name.endswith("_max") else before + value


def mean_of_updates(updates: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Every metric averaged over the optimizer steps of a rollout; of ``*_max`` the largest."""
    stacked = {name: torch.stack([update[name].cpu() for update in updates]) for name in updates[0]}
    return {name: values.max() if name.endswith("_max") else values.mean() for name, values in stacked.items()}
