"""What every trained module here shares: counting steps, logging, validation, optimizer steps that survive bad numbers.

A step is one batch of prompts, whatever the number of optimizer steps made from it; Lightning's ``global_step`` counts
the latter, so nothing here relies on it.
"""

import hashlib
import logging
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from grpo_lightning import trained_part
from grpo_lightning.batch import Prompts
from grpo_lightning.clock import Clock, peak_memory
from grpo_lightning.policy import Policy
from grpo_lightning.policy.sharding import gathered, is_sharded, shard
from grpo_lightning.ranks import ALONE, Preempted, Ranks
from grpo_lightning.strategy import add_up_gradients
from grpo_lightning.validation import Validation

log = logging.getLogger(__name__)

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Schedule = Callable[..., float]


class StepModule(LightningModule):
    """Trains a policy for ``steps`` steps by manual optimization and validates it.

    Args:
        policy: Trained.
        validation: Run before the first step, after every ``validation.every`` and after the last.
        optimizer: Called with the trainable parameters.
        schedule: (steps completed, total_steps=) -> multiplier of the learning rate.
        steps: Batches of prompts to train on.
        seed: Of all sampling and shuffling.
        gather_weights: Where weights are sharded, whether each process holds all of them while it samples; else all
            make every forward pass together, layer by layer, until the last completion ends.
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
        gather_weights: bool = True,
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
        self.gather_weights = gather_weights
        self.base = trained_part.fingerprint(policy)
        """Of the weights that are not trained, as below an adapter; checkpoints hold the others only."""
        self.strict_loading = self.base is None
        self.clock = Clock()
        self.ranks = ALONE
        self.asked_to_end = False
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
        if self.asked_to_end or self.trainer.received_sigterm:
            raise Preempted(f"SIGTERM during step {self.completed_steps + 1}")

    def setup(self, stage: str) -> None:
        super().setup(stage)
        sharded = isinstance(self.trainer.strategy, ModelParallelStrategy)
        lockstep = sharded and not self.gather_weights
        self.ranks = Ranks(self.global_rank, self.trainer.world_size, lockstep=lockstep)
        self.policy.ranks = self.ranks

    def configure_model(self) -> None:
        """Shard the policy, where the strategy shards."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ModelParallelStrategy) and not is_sharded(self.policy):
            for policy in self.policies():
                shard(policy, strategy.device_mesh["data_parallel"])

    def policies(self) -> list[Policy]:
        """All whose weights this module holds, trained or not."""
        return [self.policy]

    def _listen(self) -> None:
        """Take SIGTERM over from Lightning, whose handler starts a broadcast wherever this process happens to be."""
        if self.ranks.size > 1:
            signal.signal(signal.SIGTERM, self._ask_to_end)

    def on_validation_start(self) -> None:
        self._listen()

    def _ask_to_end(self, number: int, frame: Any) -> None:
        launcher: Any = self.trainer.strategy.launcher
        if launcher is not None and not self.asked_to_end:
            launcher.kill(number)  # the processes that this one started
        self.asked_to_end = True

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside, the policy may be sampled from."""
        if self.ranks.lockstep:
            yield
            return
        with gathered(self.policy):
            yield

    def backward_of_part(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro-batch; processes exchange gradients after the ``last`` one."""
        wrapped: Any = self.trainer.strategy.model
        with nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync():
            self.manual_backward(loss)

    def report(self, values: Mapping[str, float | Tensor]) -> None:
        """Write scalars to the loggers at the number of completed steps, averaged over ranks (``*_max``: the largest).

        They are also Lightning's ``callback_metrics``. What is not finite is left out, such as a mean over nothing.
        """
        device = self.device if self.ranks.size > 1 else "cpu"  # in float64 the mean of equal values is that value
        own = {name: torch.as_tensor(value, device=device, dtype=torch.float64) for name, value in values.items()}
        largest = {name: own[name] for name in own if name.endswith("_max") or name == "perf/peak_memory_gb"}
        sums = self.ranks.add_up({name: value for name, value in own.items() if name not in largest})
        reduced = {name: float(value) / self.ranks.size for name, value in sums.items()}
        tops = self.ranks.add_up({f"{name}_max": value for name, value in largest.items()})
        reduced |= {name.removesuffix("_max"): float(value) for name, value in tops.items()}
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
        total: Any = nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
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
            num_tokens: Sampled in it.
            work: Least floating-point operations that it takes, as ``Policy.work`` counts them.
        """
        seconds = self.clock.read()
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else peak_memory()
        limit = work / self.ranks.size / (seconds["step"] * self.peak) if self.peak else 0.0
        return (
            {f"time/{phase}": value for phase, value in seconds.items()}
            | ({"perf/gemm_fraction": limit} if limit else {})
            | {
                "perf/tokens_per_second": num_tokens / seconds["step"],
                "perf/peak_memory_gb": peak / 1e9,
            }
        )

    def on_fit_start(self) -> None:
        add_up_gradients(self.trainer.strategy)

    def on_train_start(self) -> None:
        self._listen()
        with self.trainer.precision_plugin.train_step_context():  # as training steps are run
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
        with self.sampling():
            judged = self.validation.step(
                self.policy,
                prompts,
                completed_steps=self.completed_steps,
                seed=self.seed_of("validation"),
                clock=self.clock,
                poll=self.poll,
                ranks=self.ranks,
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
        if self.base is not None:
            checkpoint["base"] = self.base
            trained = trained_part.names(self.policy)
            checkpoint["state_dict"] = {n: value for n, value in checkpoint["state_dict"].items() if n in trained}
        checkpoint["step"] = {
            "completed": self.completed_steps,
            "processes": self.ranks.size,
            "sharded": is_sharded(self.policy),
            "validated_at": self.validated_at,
            "skipped": [self.skipped, self.skipped_in_a_row],
            "metrics": dict(self.metrics),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over what a checkpoint says of the run.

        Raises:
            ValueError: It holds an adapter of another base, or of other shape than this policy's.
        """
        trained_part.check(self.policy, self.base, checkpoint)
        state = checkpoint["step"]
        self.completed_steps, self.validated_at = state["completed"], state["validated_at"]
        self.skipped, self.skipped_in_a_row = state["skipped"]
        self.metrics = dict(state["metrics"])
