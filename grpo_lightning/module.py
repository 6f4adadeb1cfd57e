"""GRPO as a LightningModule: when things happen. What happens lives in the parts it is given."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_lightning import varying
from grpo_lightning.batch import Prompts, Rollout
from grpo_lightning.judge import Judged
from grpo_lightning.loss import PolicyLoss
from grpo_lightning.policy import Policy
from grpo_lightning.rollout import Collected, Collector
from grpo_lightning.selfcheck import check_rollout
from grpo_lightning.step import OptimizerFactory, Schedule, StepModule
from grpo_lightning.update import accumulate, mean_of_updates
from grpo_lightning.validation import Validation


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
        minibatch_size: Completions per optimizer step, over all ranks; null takes the whole rollout.
        microbatch_tokens: Most tokens, padding included, in one forward pass: memory, never results.
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
        schedule: Schedule,
        *,
        ppo_epochs: int,
        minibatch_size: int | None,
        microbatch_tokens: int,
        skip_dead: bool,
        self_check: bool,
        **common: Any,
    ) -> None:
        super().__init__(policy, validation, optimizer, schedule, **common)
        self.collect = rollout
        self.loss = loss
        self.varied = {"rollout": rollout, "loss": loss}  # what may hold numbers that vary with the step
        self.ppo_epochs = ppo_epochs
        self.minibatch_size = minibatch_size
        self.microbatch_tokens = microbatch_tokens
        self.self_check = self_check
        self.skip_dead = skip_dead
        self.surplus: Judged | None = None
        # a tuple, so not a submodule
        self._reference = (reference(policy) if loss.kl_coef or rollout.kl_penalty else None,)

    @property
    def reference(self) -> Policy | None:
        """The frozen policy of the KL term, if there is one."""
        return self._reference[0]

    def policies(self) -> list[Policy]:
        # a reference without weights of its own is the policy
        return [policy for policy in (self.policy, self.reference) if policy and any(True for _ in policy.parameters())]

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.reference is not None and self.reference.home is None:
            self.reference.to(self.device)

    def training_step(self, prompts: Prompts) -> dict[str, Any]:
        self.clock.restart()
        numbers = varying.values(self.varied, self.completed_steps)
        collect, loss = varying.at(tuple(self.varied.values()), self.completed_steps)
        with self.sampling():
            collected = collect(
                self.policy,
                self.reference,
                prompts,
                microbatch_tokens=self.microbatch_tokens,
                seed=self.seed_of("rollout", self.completed_steps),
                clock=self.clock,
                poll=self.poll,
                carried=self.surplus,
                ranks=self.ranks,
            )
        self.surplus = collected.surplus
        if self.self_check and self.completed_steps == 0:
            check_rollout(self.policy, self.reference, collected.rollout, collect.sampling, self.microbatch_tokens)
        with self.clock("update"):
            updates = self._updates(collected, loss, collect.sampling.temperature)
        ratio = torch.cat([update.pop("ratio") for update in updates])
        work = collected.work + 3 * float(sum(update.pop("work") for update in updates))  # backward costs two forwards
        metrics = {**collected.metrics, **mean_of_updates(updates), **self.performance(collected.num_tokens, work)}
        varying.observe(self.varied, metrics)
        self.complete_step(metrics | {f"varying/{path}": value for path, value in numbers.items()})
        return {"judged": collected.judged, "advantages": collected.advantages, "ratio": ratio}

    def _updates(self, collected: Collected, loss: PolicyLoss, temperature: float) -> list[dict[str, Tensor]]:
        """Every optimizer step on a rollout; returns the metrics of each, and the "ratio" of its tokens."""
        rollout = collected.rollout
        size = self.minibatch_size or len(rollout)
        generator = torch.Generator().manual_seed(self.seed_of("minibatches", self.completed_steps))
        single = collected.is_fresh and self.ppo_epochs == 1 and size >= len(rollout)
        return [
            self._update(minibatch, loss, temperature, on_policy_step=single)
            for minibatch in rollout.minibatches(size=size, epochs=self.ppo_epochs, generator=generator)
        ]

    def _update(self, minibatch: Rollout, loss: PolicyLoss, temperature: float, *, on_policy_step: bool) -> Any:
        """One optimizer step; ``on_policy_step``: the only one, on rows that the policy as it is has sampled."""
        values = accumulate(
            self.policy,
            loss,
            minibatch,
            temperature=temperature,
            microbatch_tokens=self.microbatch_tokens,
            skip_dead=self.skip_dead,
            on_policy_step=on_policy_step,
            ranks=self.ranks,
            backward=self.backward_of_part,
        )
        return values | {"optim/grad_norm": torch.tensor(self.apply_gradients())}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        surplus = self.surplus.state() if self.surplus else None
        checkpoint["grpo"] = {"adapted": varying.state(self.varied), "surplus": surplus}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        state = checkpoint.get("grpo", {"adapted": {}, "surplus": None})  # supervised training leaves none
        varying.restore(self.varied, state["adapted"])
        self.surplus = Judged.from_state(state["surplus"]).to(self.device) if state["surplus"] else None
