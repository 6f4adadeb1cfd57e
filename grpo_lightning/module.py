"""GRPO as a LightningModule: when things happen. What happens lives in the parts it is given."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.batch import Prompts, Rollout
from grpo_lightning.clock import peak_memory
from grpo_lightning.loss import PolicyLoss
from grpo_lightning.policy import Policy
from grpo_lightning.rollout import Collector, on_policy, split
from grpo_lightning.selfcheck import check_rollout
from grpo_lightning.step import OptimizerFactory, Schedule, StepModule
from grpo_lightning.validation import Validation


class GRPOLightningModule(StepModule):
    """Per batch of prompts: collect one rollout, then ``ppo_epochs`` passes of minibatch updates over it.

    Args:
        policy: Trained.
        reference: Makes the frozen policy of the KL term from ``policy`` as it is now, or None; the result stays out
            of checkpoints, optimizer and parameter counts.
        rollout: Turns prompts into a scored rollout.
        loss: Turns log-probabilities and a rollout into a scalar.
        validation: As in ``StepModule``, like ``optimizer``, ``schedule`` and the keywords not listed here.
        optimizer: Called with the trainable parameters.
        schedule: Multiplier of the learning rate by step.
        ppo_epochs: Passes over each rollout.
        minibatch_size: Completions per optimizer step, over all ranks; null takes the whole rollout.
        microbatch_tokens: Most tokens, padding included, in one forward pass: memory, never results.
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
        self_check: bool,
        **common: Any,
    ) -> None:
        super().__init__(policy, validation, optimizer, schedule, **common)
        self.collect = rollout
        self.loss = loss
        self.ppo_epochs = ppo_epochs
        self.minibatch_size = minibatch_size
        self.microbatch_tokens = microbatch_tokens
        self.self_check = self_check
        self._reference = (reference(policy) if loss.kl_coef else None,)  # a tuple, so not a submodule

    @property
    def reference(self) -> Policy | None:
        """The frozen policy of the KL term, if there is one."""
        return self._reference[0]

    def on_fit_start(self) -> None:
        if self.reference is not None:
            self.reference.to(self.device)

    def training_step(self, prompts: Prompts) -> dict[str, Any]:
        self.clock.restart()
        rollout, judged, metrics = self.collect(
            self.policy,
            self.reference,
            prompts,
            microbatch_tokens=self.microbatch_tokens,
            seed=self.seed_of("rollout", self.completed_steps),
            clock=self.clock,
            poll=self.poll,
        )
        if self.self_check and self.completed_steps == 0:
            check_rollout(self.policy, self.reference, rollout, self.collect.sampling, self.microbatch_tokens)
        with self.clock("update"):
            updates = self._updates(rollout)
        ratio = torch.cat([update.pop("ratio") for update in updates])
        self.complete_step({**metrics, **_mean(updates), **self._performance(rollout)})
        return {"judged": judged, "advantages": rollout.advantages[:, 0], "ratio": ratio}

    def _updates(self, rollout: Rollout) -> list[dict[str, Tensor]]:
        """Every optimizer step on ``rollout``; returns the metrics of each, and the "ratio" of its tokens."""
        size = len(rollout) if self.minibatch_size is None else self.minibatch_size // self.trainer.world_size
        generator = torch.Generator().manual_seed(self.seed_of("minibatches", self.completed_steps))
        single = self.ppo_epochs == 1 and size >= len(rollout)
        return [
            self._update(minibatch, on_policy_step=single)
            for minibatch in rollout.minibatches(size=size, epochs=self.ppo_epochs, generator=generator)
        ]

    def _update(self, minibatch: Rollout, *, on_policy_step: bool) -> dict[str, Tensor]:
        """One optimizer step; ``on_policy_step`` says that it is the rollout's only one."""
        tokens = self.trainer.strategy.reduce(minibatch.mask.sum().float(), reduce_op="mean")
        weights = self.loss.weights(minibatch.mask, tokens)
        parts: dict[str, Tensor] = {}
        sums: dict[str, Tensor] = {}
        ratio: list[Tensor] = []
        for index in split(minibatch, self.microbatch_tokens):
            rows = minibatch[index]
            logprobs, entropy = self.policy.score(
                rows,
                temperature=self.collect.sampling.temperature,
                entropy_gradient=self.loss.entropy_coef != 0,
            )
            if on_policy_step:
                rows = on_policy(rows, logprobs)
            loss, part = self.loss(logprobs, entropy, rows, weights[index])
            self.manual_backward(loss)
            parts = {name: parts.get(name, 0) + value for name, value in part.items()}
            for name, value in self.loss.statistics(logprobs, entropy, rows).items():
                known = sums.get(name, torch.zeros_like(value))
                sums[name] = torch.maximum(known, value) if name.endswith("_max") else known + value
            ratio.append((logprobs.detach() - rows.old_logprobs)[rows.mask].exp())
        norm = self.apply_gradients()
        count, peak = sums.pop("tokens"), sums.pop("ratio_max")
        return (
            {f"loss/{name}": value for name, value in parts.items()}
            | {f"policy/{name}": value / count for name, value in sums.items()}
            | {"policy/ratio_max": peak, "optim/grad_norm": torch.tensor(norm), "ratio": torch.cat(ratio)}
        )

    def _performance(self, rollout: Rollout) -> dict[str, float]:
        seconds = self.clock.read()
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else peak_memory()
        return {f"time/{phase}": value for phase, value in seconds.items()} | {
            "perf/tokens_per_second": float(rollout.mask.sum()) * self.trainer.world_size / seconds["step"],
            "perf/peak_memory_gb": peak / 1e9,
        }


def _mean(updates: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Every metric averaged over the optimizer steps of a rollout; of ``*_max`` the largest."""
    stacked = {name: torch.stack([update[name].cpu() for update in updates]) for name in updates[0]}
    return {name: values.max() if name.endswith("_max") else values.mean() for name, values in stacked.items()}
