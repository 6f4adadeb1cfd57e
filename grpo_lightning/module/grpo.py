"""GRPO training step: a rollout, then PPO-style updates."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from grpo_lightning.loss import PolicyLoss
from grpo_lightning.module.base import LRSchedule, OptimizerFactory, StepModule
from grpo_lightning.module.update import Update, accumulate, check_rollout, mean_metrics
from grpo_lightning.policy import Policy
from grpo_lightning.rollout import Collector
from grpo_lightning.rollout.collector import Collected
from grpo_lightning.rollout.scoring import StepContext, describe_examples, log_to_file
from grpo_lightning.schedule import (
    resolve_schedules,
    restore_schedules,
    schedule_state,
    schedule_values,
    update_schedules,
)
from grpo_lightning.types import Prompts, Scored
from grpo_lightning.validation import Validation

log = logging.getLogger(__name__)


class GRPOLightningModule(StepModule):
    """Per batch of prompts: collect one rollout, then ``ppo_epochs`` passes of minibatch updates over it.

    Args:
        policy: Trained.
        reference: Makes the frozen policy of the KL term from ``policy`` as it is now, or None; the result stays out
            of checkpoints, optimizer and parameter counts. Not called where no KL term has a coefficient.
        rollout: Turns prompts into a scored rollout; its numbers and those of ``loss`` may vary with the step.
        loss: Turns log-probabilities and a rollout into a scalar.
        validation: As in ``StepModule``, like ``optimizer``, ``schedule`` and the keywords not listed here.
        optimizer: Called with the trainable parameters.
        schedule: Multiplier of the learning rate by step.
        ppo_epochs: Passes over each rollout.
        minibatch_size: Completions per optimizer step, over all processes; null takes the whole rollout.
        skip_dead: Whether completions that cannot have a gradient are left out of the forward pass.
        self_check: Whether the first rollout of the run is checked for errors that training would hide.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Callable[[Policy], Policy | None],
        rollout: Collector,
        loss: PolicyLoss,
        validation: Validation,
        optimizer: OptimizerFactory,
        schedule: LRSchedule,
        *,
        ppo_epochs: int,
        minibatch_size: int | None,
        skip_dead: bool,
        self_check: bool,
        **common: Any,
    ) -> None:
        super().__init__(policy, validation, optimizer, schedule, **common)
        self.rollout = rollout
        self.loss = loss
        self.ppo_epochs = ppo_epochs
        self.minibatch_size = minibatch_size
        self.self_check = self_check
        self.skip_dead = skip_dead
        self.carried: Scored | None = None
        self._is_shown = False
        # What may hold numbers that vary with the step, by the user's keys.
        own = {name: value for name, value in vars(rollout).items() if name != "reward"}
        self._varying = {"loss": loss, "reward": rollout.reward, "rollout": own}
        # a tuple, so not a submodule
        self._reference = (reference(policy) if loss.kl_coef or rollout.uses_reference else None,)

    @property
    def reference(self) -> Policy | None:
        """The frozen policy of the KL term, if there is one."""
        return self._reference[0]

    def policies(self) -> list[Policy]:
        # a reference without weights of its own is the policy
        return [policy for policy in (self.policy, self.reference) if policy and any(True for _ in policy.parameters())]

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.reference is not None and self.reference.idle_device is None:
            self.reference.to(self.device)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        # The rewards of validation are separate objects, whose adaptive weights follow those of training.
        restore_schedules(self.validation.scorer.rewards, schedule_state(self.rollout.reward))

    def training_step(self, prompts: Prompts) -> dict[str, Any]:
        step = self.completed_steps
        self.clock.restart()
        numbers = schedule_values(self._varying, step)
        rollout, loss = resolve_schedules(self.rollout, step), resolve_schedules(self.loss, step)
        collected = self.collect(prompts, rollout, self.context("rollout", step), carried=self.carried)
        self.carried = collected.carried
        if not self._is_shown and self.loop.ranks.rank == 0:
            self._is_shown = True
            log_to_file(describe_examples(self.policy, collected.scored, 1))
        with self.clock("update"):
            updates = self.update(collected, loss, rollout.temperature, apply_gradients=self.apply_gradients)
        flops = collected.flops + 3 * sum(update.flops for update in updates)  # backward costs two forwards
        metrics: dict[str, Any] = {
            **collected.metrics,
            **mean_metrics(updates),
            **self.performance(collected.num_tokens, flops),
        }
        update_schedules(self._varying, metrics)
        self.complete_step(metrics | {f"varying/{path}": value for path, value in numbers.items()})
        return {
            "collector": rollout,
            "collected": collected,
            "updates": updates,
            "scored": collected.scored,
            "advantages": collected.rollout.completion_advantages,
            "ratio": torch.cat([update.ratio for update in updates]),
        }

    def collect(
        self, prompts: Prompts, rollout: Collector, context: StepContext, *, carried: Scored | None = None
    ) -> Collected:
        """Collect one rollout with the weights as they are; the first one of a run is checked."""
        with self.sampling("rollout"):
            collected = rollout.collect(self.policy, self.reference, prompts, context=context, carried=carried)
        if self.self_check and self.completed_steps == 0 and collected.is_fresh:
            checked = (self.policy, self.reference, collected.rollout, rollout.sampling, self.microbatch_tokens)
            check_rollout(*checked, coarse=self.sampler.is_coarse, filtered=self.sampler.is_engine)
        return collected

    def update(
        self, collected: Collected, loss: PolicyLoss, temperature: float, *, apply_gradients: Callable[[], float]
    ) -> list[Update]:
        """Make every optimizer step on a rollout: ``ppo_epochs`` passes of minibatches over it.

        ``apply_gradients`` is called after the backward passes of each minibatch and returns the gradient's norm.
        """
        rollout = collected.rollout
        size = self.minibatch_size or len(rollout)
        generator = torch.Generator().manual_seed(self.seed_of("minibatches", self.completed_steps))
        # The only step on rows that the present policy has sampled: the ratio is 1 by definition.
        single = collected.is_fresh and self.ppo_epochs == 1 and size >= len(rollout)
        updates: list[Update] = []
        for minibatch in rollout.minibatches(size=size, epochs=self.ppo_epochs, generator=generator):
            update = accumulate(
                self.policy,
                loss,
                minibatch,
                temperature=temperature,
                microbatch_tokens=self.microbatch_tokens,
                skip_dead=self.skip_dead,
                on_policy_step=single,
                is_first=collected.is_fresh and not updates,
                ranks=self.loop.ranks,
                backward=self.loop.backward,
            )
            update.metrics["optim/grad_norm"] = torch.tensor(apply_gradients())
            updates.append(update)
        return updates

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        carried = self.carried.state() if self.carried else None
        checkpoint["grpo"] = {"varying": schedule_state(self._varying), "carried": carried}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        state = checkpoint.get("grpo", {})  # supervised training leaves none
        restore_schedules(self._varying, state.get("varying", {}))
        data: Any = getattr(self._trainer, "datamodule", None)
        then, carried = checkpoint.get("run", {}).get("data"), state.get("carried")
        if carried and then and hasattr(data, "fingerprint") and dict(then) != data.fingerprint():
            log.warning("the checkpoint's surplus groups are of other data: left out")
            carried = None  # their columns may not be those that rewards now ask for
        self.carried = Scored.from_state(carried).to(self.device) if carried else None
