"""Base of the LightningModules: counting steps, metrics, validation, optimizer, checkpoints; supervised fine-tuning.

A step is one batch of prompts, whatever the number of optimizer steps made from it; Lightning's ``global_step`` counts
the latter, so nothing here relies on it.
"""

import hashlib
import logging
import math
import resource
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grpo_lightning.checkpoint.resume import base_fingerprint, check_adapter, trained_names
from grpo_lightning.distributed import signals
from grpo_lightning.distributed.ranks import SINGLE_PROCESS, Ranks
from grpo_lightning.distributed.strategies import (
    check_strategy,
    gather_weights,
    is_sharded,
    shard,
    sum_gradients,
    trainer_shards,
)
from grpo_lightning.module.update import GradientStep, trained_weights
from grpo_lightning.policy import Policy
from grpo_lightning.rollout.scoring import StepContext
from grpo_lightning.sampler import Sampler
from grpo_lightning.sampler.native import NativeSampler
from grpo_lightning.sampler.token_sampling import NonFiniteLogits
from grpo_lightning.types import Clock, Prompt, Prompts
from grpo_lightning.validation import Validation

log = logging.getLogger(__name__)

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LRSchedule = Callable[..., float]


class Loop:
    """The loop around the steps: Lightning's Trainer, or a program's own loop in this process.

    Args:
        module: Trained by manual optimization.
        trainer: The module's, once it has chosen its strategy; None: optimizer and schedule are made here.
        precision: Without a trainer: bf16-mixed computes in bfloat16, anything else in the weights' own type.
    """

    def __init__(self, module: LightningModule, trainer: Trainer | None = None, *, precision: Any = None) -> None:
        self._module = module
        self._trainer = trainer
        self._signals = signals.current_signals()
        self.ranks = SINGLE_PROCESS if trainer is None else Ranks(trainer.global_rank, trainer.world_size)
        """The processes that divide the work among them."""
        self._autocast = module.device.type if precision == "bf16-mixed" else None
        self._made: Any = module.configure_optimizers() if trainer is None else {}

    @property
    def optimizer(self) -> Any:
        """The one optimizer of the run."""
        return self._made["optimizer"] if self._trainer is None else self._module.optimizers()

    @property
    def schedule(self) -> Any:
        """The learning-rate scheduler, which makes one step per rollout."""
        return self._made["lr_scheduler"] if self._trainer is None else self._module.lr_schedulers()

    @property
    def is_logged(self) -> bool:
        """Whether metrics go to the loggers; not from a validation in the directory of an earlier training."""
        if self._trainer is None:
            return False
        directory = Path(self._trainer.default_root_dir)
        trained = all((directory / name).exists() for name in ("summary.json", "checkpoints/last.ckpt"))
        return self._trainer.state.fn == "fit" or not trained

    def begin(self, *, epochs: int) -> None:
        """Make the strategy add gradients up, and refuse a trainer that would end or round otherwise than asked."""
        if (trainer := self._trainer) is None:
            return
        sum_gradients(trainer.strategy)
        if trainer.precision == "16-mixed":
            raise ValueError(
                "trainer.precision=16-mixed: allowed are 32-true and bf16-mixed (gradients would be clipped before "
                "they are unscaled)"
            )
        if trainer.max_steps != -1:
            raise ValueError(
                f"trainer.max_steps={trainer.max_steps}: allowed is -1; it counts optimizer steps, of which a rollout "
                "may have several, and the module ends after its own number of steps"
            )
        if trainer.max_epochs is not None and -1 < trainer.max_epochs < epochs:
            raise ValueError(
                f"trainer.max_epochs={trainer.max_epochs}: allowed is -1, or at least {epochs}: an epoch lasts from "
                "one validation to the next"
            )

    def on_steps_start(self) -> None:
        """From now on the process, when asked to end, does so in `check`."""
        if self._trainer is not None:
            self._signals.on_steps_start(self._trainer.strategy.launcher)

    def check(self) -> None:
        """Raise ``Preempted`` if the process was asked to end; called between generated tokens."""
        if self._trainer is not None:
            self._signals.check()

    def end_steps(self) -> None:
        """End the steps: from now on a signal ends the process at once."""
        if self._trainer is not None:
            self._signals.end_steps()

    def precision(self) -> AbstractContextManager[Any]:
        """Context with the precision of a training step."""
        if self._trainer is not None:
            return self._trainer.precision_plugin.train_step_context()
        # Rounded weights must not be kept from one optimizer step to the next, within one training step.
        kind = self._autocast
        return torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=False) if kind else nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro-batch; processes exchange gradients after the ``last`` one."""
        if self._trainer is None:
            loss.backward()
            return
        wrapped: Any = self._trainer.strategy.model
        with nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync():
            self._module.manual_backward(loss)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write scalars to the trainer's loggers where `is_logged`; they are also its ``callback_metrics``."""
        if self._trainer is None:
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*sync_dist=True")  # the values are the same in all processes
            self._module.log_dict(dict(metrics), logger=False, batch_size=1)
        if self.is_logged:
            for logger in self._trainer.loggers:
                logger.log_metrics(dict(metrics), step=step)

    def stop(self) -> None:
        """Make this step the last one."""
        if self._trainer is not None:
            self._trainer.should_stop = True


@dataclass
class MetricHistory:
    """One metric over the whole run, however often the run was interrupted and resumed."""

    first: float
    first_step: int
    last: float = 0.0
    last_step: int = 0
    count: int = 0
    total: float = 0.0
    min: float = math.inf
    max: float = -math.inf
    max_step: int = 0
    """The first step at which it was largest."""

    def add(self, value: float, step: int) -> None:
        """Count one more value."""
        self.last, self.last_step = value, step
        self.count += 1
        self.total += value
        self.min = min(self.min, value)
        if value > self.max:
            self.max, self.max_step = value, step

    def summary(self, *, with_steps: bool) -> dict[str, float]:
        """The "first", "last", "mean", "min" and "max"; with steps also those of the first, last and "best" value."""
        mean = min(self.max, max(self.min, self.total / self.count))  # despite rounding and overflow
        values = {"first": self.first, "last": self.last, "mean": mean, "min": self.min, "max": self.max}
        if with_steps:
            values |= {"best": self.max, "best_step": self.max_step}
            values |= {"first_step": self.first_step, "last_step": self.last_step}
        return values


class StepModule(LightningModule):
    """Trains a policy for ``steps`` steps by manual optimization and validates it.

    Args:
        policy: Trained.
        validation: Run before the first step, after every ``validation.every`` and after the last.
        optimizer: Called with the trainable parameters.
        schedule: (steps completed, total_steps=) -> multiplier of the learning rate.
        steps: Batches of prompts to train on.
        seed: Decides all sampling and shuffling.
        microbatch_tokens: Most tokens, padding included, in one forward pass: memory, never results.
        sampler: Generates the completions; None: the native sampler.
        max_grad_norm: As in `GradientStep`, like ``max_skipped``.
        max_skipped: As in `GradientStep`.
        settings: The run's settings as plain values, which callbacks write into checkpoints, logs and model cards.
    """

    loop: Loop
    """What carries the steps; known once they begin."""

    def __init__(
        self,
        policy: Policy,
        validation: Validation,
        optimizer: OptimizerFactory,
        schedule: LRSchedule,
        *,
        steps: int,
        seed: int,
        microbatch_tokens: int,
        max_grad_norm: float,
        max_skipped: int,
        sampler: Sampler | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = policy
        self.validation = validation
        self.optimizer = optimizer
        self.schedule = schedule
        self.steps = steps
        self.seed = seed
        self.microbatch_tokens = microbatch_tokens
        self.sampler = sampler or NativeSampler()
        self.settings = dict(settings or {})
        self.gradient_step = GradientStep(max_grad_norm=max_grad_norm, max_skipped=max_skipped)
        self.base = base_fingerprint(policy)
        """Tells apart the weights that are not trained, as below an adapter; checkpoints hold the others only."""
        self.strict_loading = self.base is None
        self.clock = Clock()
        self.flops_per_second = 0.0
        self.completed_steps = 0
        self.validated_at = -1
        self.metrics: dict[str, float] = {}
        self.history: dict[str, MetricHistory] = {}
        self.curves: dict[str, list[tuple[int, float]]] = {}
        """(step, value) of every metric as measured by this process, for notebooks."""
        self._own_loop: Loop | None = None

    def seed_of(self, *what: object) -> int:
        """A seed for one purpose, such as ("rollout", 7); the same in every run with the same ``seed``."""
        key = repr((self.seed, *what)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())

    def context(self, *what: object) -> StepContext:
        """Seed, sampler, clock and processes for sampling for one purpose, see `seed_of`."""
        return StepContext(
            seed=self.seed_of(*what),
            step=self.completed_steps,
            clock=self.clock,
            poll=self.loop.check,
            microbatch_tokens=self.microbatch_tokens,
            ranks=self.loop.ranks,
            sampler=self.sampler,
        )

    @contextmanager
    def sampling(self, phase: str) -> Iterator[None]:
        """Context in which the sampler generates with the current weights; ``phase`` is for messages."""
        step, ranks = self.completed_steps, self.loop.ranks
        weights = self.sampler.sync_weights(self.policy, version=step, clock=self.clock, ranks=ranks)
        try:
            with gather_weights(self.policy), weights:
                yield
        except NonFiniteLogits as error:
            when = f"the {phase} after step {step}" if step else f"the {phase} before any step"
            cause = (
                "the last updates have damaged the weights: try a lower optimizer.lr or module.max_grad_norm, a longer "
                "schedule.warmup_steps or trainer.precision=32-true, from an earlier checkpoint"
                if step
                else "the weights were damaged when they were loaded, or are too large for trainer.precision: try "
                "another policy.path, trainer.precision=32-true and policy.dtype=float32"
            )
            raise FloatingPointError(f"in {when}, {error}; {cause}") from error

    def train_step(self, prompts: Prompts | list[Prompt], **columns: Any) -> dict[str, float]:
        """Make one step without a Trainer, for a loop of one's own in one process; returns its metrics by name.

        Args:
            prompts: As the data would yield them, or a list of texts, chat messages or token ids.
            columns: What rewards ask for by name, one value per prompt.
        """
        self.begin_without_trainer()
        if not isinstance(prompts, Prompts):
            prompts = Prompts(tuple(prompts), {name: tuple(values) for name, values in columns.items()})
        with self.loop.precision():
            self.training_step(prompts)
        return dict(self.metrics)

    def begin_without_trainer(self) -> None:
        """Get ready for steps in this process, on the device of the weights."""
        if self._own_loop is None:
            self.to(next(self.policy.parameters()).device)
            self.loop = self._own_loop = Loop(self, precision=self.settings.get("trainer", {}).get("precision"))
            self.on_fit_start()
            self.on_train_start()
        self.loop = self._own_loop  # a validation by a Trainer has its own

    def setup(self, stage: str) -> None:
        super().setup(stage)
        check_strategy(self.trainer.strategy)
        trainer: Any = self.trainer
        if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
            raise ValueError(
                "callbacks: StochasticWeightAveraging replaces the learning-rate schedule, and exports weights that "
                "were not validated: use lightning.pytorch.callbacks.EMAWeightAveraging"
            )
        self.loop = Loop(self, trainer)

    def configure_model(self) -> None:
        """Shard the policy, where the strategy shards."""
        if trainer_shards(self.trainer) and not is_sharded(self.policy):
            mesh = self.trainer.strategy.device_mesh["data_parallel"]  # type: ignore[attr-defined]
            for policy in self.policies():
                half = self.trainer.precision == "bf16-mixed"
                shard(policy, mesh, methods=("logprobs_and_entropy", "support"), half=half)

    def policies(self) -> list[Policy]:
        """All whose weights this module holds, trained or not."""
        return [self.policy]

    def on_fit_start(self) -> None:
        self.loop.begin(epochs=math.ceil(self.steps / self.validation.every))

    def on_train_start(self) -> None:
        self.loop.on_steps_start()
        if self.completed_steps >= self.steps:  # killed after its last step: without a batch no step would end the run
            self.loop.stop()
        with self.loop.precision():
            self.flops_per_second = self.policy.flops_per_second()
            is_half = torch.is_autocast_enabled("cpu")
        if is_half and self.device.type == "cpu":
            half, full = self.flops_per_second / 1e9, self.policy.flops_per_second() / 1e9
            if half < full:
                log.warning(
                    "trainer.precision=bf16-mixed multiplies matrices at %.0f GFLOP/s on this CPU and 32-true at %.0f: "
                    "trainer.precision=32-true is faster",
                    half,
                    full,
                )

    def on_train_end(self) -> None:
        self.loop.end_steps()

    def on_validation_start(self) -> None:
        self.loop.on_steps_start()

    def report(self, values: Mapping[str, float | Tensor]) -> None:
        """Publish scalars averaged over processes (``*_max``: the largest), but those of nothing, which are NaN."""
        averaged = self.loop.ranks.mean(values, device=self.device, largest={"perf/peak_memory_gb"})
        finite = {name: value for name, value in averaged.items() if math.isfinite(value)}
        self.metrics = {name: value for name, value in self.metrics.items() if name not in averaged} | finite
        for name, value in finite.items():
            history = self.history.setdefault(name, MetricHistory(value, self.completed_steps))
            history.add(value, self.completed_steps)
            self.curves.setdefault(name, []).append((self.completed_steps, value))
        self.loop.log(finite, step=self.completed_steps)

    def summary(self) -> dict[str, dict[str, float]]:
        """Every metric over the run by name, see `MetricHistory.summary`; those of validation with their steps."""
        return {name: one.summary(with_steps=name.startswith("val/")) for name, one in sorted(self.history.items())}

    def apply_gradients(self) -> float:
        """Make one optimizer step and return the gradient's norm before clipping, see `GradientStep.apply`."""
        return self.gradient_step.apply(self.loop.optimizer, step=self.completed_steps + 1)

    def complete_step(self, values: Mapping[str, float | Tensor]) -> None:
        """Count the step, report its metrics, and move the schedule on."""
        rate = self.loop.optimizer.param_groups[0]["lr"]
        self.completed_steps += 1
        self.report({**values, "optim/lr": rate, "optim/skipped": float(self.gradient_step.skipped)})
        self.loop.schedule.step()
        if self.completed_steps >= self.steps:
            self.loop.stop()

    def peak_memory(self) -> int:
        """The most bytes so far: allocated on the GPU, or resident on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def performance(self, num_tokens: int, flops: float) -> dict[str, float]:
        """Seconds of the step's phases, its speed and memory, by its sampled tokens and its `Policy.flops`."""
        seconds = self.clock.read()
        metrics = {f"time/{phase}": value for phase, value in seconds.items()}
        if flops and self.flops_per_second:
            possible = self.loop.ranks.size * seconds["step"] * self.flops_per_second
            metrics["perf/gemm_fraction"] = flops / possible
        metrics["perf/tokens_per_second"] = num_tokens / seconds["step"]
        metrics["perf/peak_memory_gb"] = self.peak_memory() / 1e9
        return metrics | dict(self.sampler.metrics)

    @property
    def _validation_due(self) -> bool:
        """False where a resumed run starts between two validations, or right after one that it already has."""
        if self.trainer.state.fn != "fit":
            return True
        if self.trainer.sanity_checking and self.trainer.num_sanity_val_steps != float("inf"):
            return False
        done = self.completed_steps
        return self.validated_at != done and (done in (0, self.steps) or done % self.validation.every == 0)

    def validation_step(self, prompts: Prompts, batch_idx: int) -> dict[str, Any] | None:
        if not self._validation_due:
            return None
        # What is made in Trainer.validate's inference mode could not be used in a later training step.
        with torch.inference_mode(False), torch.no_grad(), self.sampling("validation"):
            scored = self.validation.step(
                self.policy, prompts, completed_steps=self.completed_steps, context=self.context("validation")
            )
        return {"scored": scored}

    def on_validation_epoch_end(self) -> None:
        if not self._validation_due:
            return
        self.validated_at = self.completed_steps
        self.report(self.validation.compute())

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(trained_weights(self.policy))
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.schedule(step, total_steps=self.steps))
        return {"optimizer": optimizer, "lr_scheduler": rate}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.pop("loops", None)  # which would restore a position within an epoch, see on_load_checkpoint
        if self.base is not None:
            checkpoint["base"] = self.base
            trained = trained_names(self.policy)
            for part in {"state_dict", "current_model_state"} & checkpoint.keys():  # the latter beside averaged weights
                checkpoint[part] = {name: value for name, value in checkpoint[part].items() if name in trained}
        checkpoint["step"] = {
            "completed": self.completed_steps,
            "processes": self.loop.ranks.size,
            "sharded": is_sharded(self.policy),
            "validated_at": self.validated_at,
            "skipped": [self.gradient_step.skipped, self.gradient_step.skipped_in_a_row],
            "metrics": dict(self.metrics),
            "values": {name: asdict(one) for name, one in self.history.items()},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the run's state; an adapter of another base or shape is a ValueError."""
        check_adapter(self.policy, self.base, checkpoint)
        state = checkpoint["step"]
        self.completed_steps, self.validated_at = state["completed"], state["validated_at"]
        self.gradient_step.skipped, self.gradient_step.skipped_in_a_row = state["skipped"]
        self.metrics = {name: value for name, value in state["metrics"].items() if isinstance(value, int | float)}
        self.history = {name: MetricHistory(**values) for name, values in state["values"].items()}
        if self.base is not None and "current_model_state" in checkpoint:  # WeightAveraging loads complete weights
            for part in ("state_dict", "current_model_state"):
                checkpoint[part] = self.state_dict() | checkpoint[part]
        if self._trainer is not None and self._trainer.state.fn == "fit":
            checkpoint["loops"] = {"fit_loop": self._loop_state(checkpoint["global_step"])}

    def _loop_state(self, optimizer_steps: int) -> dict[str, Any]:
        """Lightning's counters as an unbroken run would have them: callbacks count and name by them."""
        state: dict[str, Any] = self.trainer.fit_loop.state_dict()
        epochs = self.completed_steps // self.validation.every
        for name, count in {
            "epoch_progress": epochs,
            "epoch_loop.batch_progress": self.completed_steps,
            "epoch_loop.manual_optimization.optim_step_progress": optimizer_steps,
        }.items():
            state[name]["total"] = dict.fromkeys(state[name]["total"], count)
        state["epoch_progress"]["current"] = dict.fromkeys(state["epoch_progress"]["current"], epochs)
        state["epoch_loop.state_dict"] = {"_batches_that_stepped": self.completed_steps}
        return state


class SFTLightningModule(StepModule):
    """Supervised fine-tuning: per batch one optimizer step on the mean negative log-likelihood of demonstrations.

    The data set has a column ``completion`` beside the prompts.
    """

    def training_step(self, prompts: Prompts) -> None:
        ranks = self.loop.ranks
        ranks.all_or_raise(self.loop.check)
        self.clock.restart()
        if "completion" not in prompts.columns:
            raise ValueError(f"module=sft needs a column 'completion'; the data has {sorted(prompts.columns)}")
        with self.clock("update"):
            rows = self.policy.tokenize_demonstrations(prompts.texts, prompts.columns["completion"])
            tokens = rows.mask.sum()
            total = torch.zeros((), device=self.device)
            indices, idle = self.policy.local_microbatches(rows, self.microbatch_tokens, ranks)
            for number, index in enumerate(indices):
                is_real = number < len(indices) - idle  # the others keep step with processes that have more
                loss = -self.policy.logprobs(rows[index], temperature=1.0).sum() * is_real / tokens
                self.loop.backward(loss, last=number == len(indices) - 1)
                total += loss.detach()
            total = ranks.sum({"loss": total})["loss"]
            norm = self.apply_gradients()
        times: dict[str, Any] = {f"time/{phase}": seconds for phase, seconds in self.clock.read().items()}
        self.complete_step({"loss/total": total, "optim/grad_norm": norm, **times})
