"""Iterative GRPO (arXiv:2402.03300, Algorithm 1): refresh the reference, train the reward model.

Both callbacks change results, and are off unless chosen.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from grpo_lightning.distributed.strategies import full_state_dict, load_full_state_dict
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.reward.model import RewardModel
from grpo_lightning.types import Prompt

Example = tuple[Prompt, str, bool]
"""A prompt, a completion, and whether it is right by the outcome reward."""


class ReferenceRefresh(Callback):
    """Moves the reference every so many rollouts:  reference = alpha * policy + (1 - alpha) * reference.

    With ``alpha=1`` it is iterative GRPO (arXiv:2402.03300, Algorithm 1: the reference becomes the policy); below, the
    soft update of TR-DPO (arXiv:2404.09656, Eq. 4), where alpha 0.6 every 512 steps works well. The weights of a
    reference that has moved are part of checkpoints.

    Args:
        every: Rollouts between two refreshes.
        alpha: How far the reference moves towards the policy, in (0, 1].

    Raises:
        ValueError: When training starts, if there is no reference or its weights are not shaped like the policy's.
    """

    def __init__(self, *, every: int, alpha: float) -> None:
        self.every = every
        self.alpha = alpha
        self._restored: Mapping[str, Tensor] | None = None
        self._moved: nn.Module | None = None

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        reference = getattr(module, "reference", None)
        if reference is None:
            raise ValueError(
                "callbacks.reference: there is no reference to refresh; set loss.kl_coef or rollout.kl_penalty"
            )
        shapes = [{name: w.shape for name, w in m.state_dict().items()} for m in (module.policy, reference)]
        if shapes[0] != shapes[1]:
            name = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))[0][0]
            raise ValueError(f"callbacks.reference: the reference is another model than the policy, see {name}")
        if self._restored is not None:
            load_full_state_dict(reference, self._restored)
            self._restored, self._moved = None, reference

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if module.completed_steps % self.every == 0:
            policy = dict(module.policy.named_parameters())
            for name, weight in module.reference.named_parameters():  # tied weights once
                weight.lerp_(policy[name].to(weight), self.alpha)
            self._moved = module.reference

    def state_dict(self) -> dict[str, Any]:
        return {} if self._moved is None else {"reference": full_state_dict(self._moved)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict.get("reference")


@dataclass(kw_only=True, eq=False)
class RewardModelTraining(Callback):
    """Trains the reward model every so many rollouts, on the outcome reward of their completions and of older ones.

    The step "update r_phi through continuous training using a replay mechanism" of iterative GRPO (arXiv:2402.03300,
    Algorithm 1 and section 4.1.4: 10 % of the data are historical). The paper leaves the rest open; here the loss is
    the mean over a mini-batch of the binary cross-entropy between sigmoid(logit) and the label, by AdamW without weight
    decay or dropout, and the historical examples are drawn from the newest ``buffer_size`` without repetition. A
    completion to which the outcome reward does not apply teaches nothing. Weights, optimizer and examples are part of
    checkpoints.

    Raises:
        ValueError: When training starts, if there is no such reward, it is no `RewardModel` with float32 weights, it is
            the outcome reward itself, or there is more than one process.
    """

    reward: str
    """Name of the reward among conf/reward; its function is a `RewardModel`."""
    every: int
    """Rollouts between two updates."""
    epochs: int
    """Passes over the new and the replayed examples of an update."""
    batch_size: int
    """Examples per optimizer step."""
    lr: float
    """Learning rate, constant; a continued run takes the new one."""
    replay: float
    """The fraction of an update's examples that are from before the last update, in [0, 1); smaller where there are not
    so many."""
    buffer_size: int
    """The most examples that are kept to be replayed."""
    max_grad_norm: float
    """The gradient's L2 norm from which on it is clipped."""
    seed: int
    """Decides which examples are replayed, and the order of all."""

    def __post_init__(self) -> None:
        self.pending: list[Example] = []
        """The examples of the rollouts since the last update."""
        self.buffer: list[Example] = []
        """The examples of the rollouts before, oldest first."""
        self._model: RewardModel | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._restored: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        model = self._find(module)
        if model.dtype != "float32":
            raise ValueError(
                f"callbacks.reward_model.reward={self.reward}: its weights have dtype={model.dtype}, and need "
                "float32 to be trained: small updates vanish in fewer bits"
            )
        if trainer.world_size > 1:
            raise ValueError(
                f"callbacks.reward_model: {trainer.world_size} processes would train a reward model each; use "
                "trainer.devices=1"
            )
        self._restore(model)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        if self._restored:  # a validation without training, of a checkpoint
            self._restore(self._find(module))

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        scored = outputs["scored"]
        applies = scored.rewards[module.rollout.scorer.outcome_name].isfinite().tolist()
        self.pending += [
            (scored.prompts.texts[row // scored.group_size], text, label)
            for row, (text, label) in enumerate(zip(scored.sampled.texts, scored.right.tolist(), strict=True))
            if applies[row]
        ]
        if module.completed_steps % self.every == 0 and self.pending and self._model is not None:
            module.report(self.update(self._model, module.completed_steps))

    def update(self, model: RewardModel, step: int) -> dict[str, float]:
        """Train on the pending examples and replayed ones, then move the former to the buffer.

        With r replayed examples and n others  r / (r + n) = replay,  so  r = n * replay / (1 - replay), rounded.

        Returns:
            "reward_model/accuracy" on the pending examples before the update, by the sign of the logit, and
            "reward_model/loss", the mean over all examples and epochs as they were trained on.
        """
        generator = random.Random(f"{self.seed} {step}")
        prompts, texts, labels = zip(*self.pending, strict=True)
        scores = model(prompts, texts)
        right = [(score > 0) == label for score, label in zip(scores, labels, strict=True)]
        num_replayed = round(len(self.pending) * self.replay / (1 - self.replay))
        mixed = self.pending + generator.sample(self.buffer, min(len(self.buffer), num_replayed))
        self._optimizer = self._optimizer or self._new_optimizer(model)
        losses = []
        for _ in range(self.epochs):
            generator.shuffle(mixed)
            for start in range(0, len(mixed), self.batch_size):
                minibatch = mixed[start : start + self.batch_size]
                losses.append(self._step(model, minibatch, self._optimizer) * len(minibatch))
        self.buffer = [*self.buffer, *self.pending][-self.buffer_size :] if self.buffer_size else []
        self.pending = []
        return {
            "reward_model/accuracy": sum(right) / len(right),
            "reward_model/loss": sum(losses) / (self.epochs * len(mixed)),
        }

    def _step(self, model: RewardModel, minibatch: Sequence[Example], optimizer: torch.optim.Optimizer) -> float:
        """One optimizer step; returns the mean loss before it."""
        prompts, texts, labels = zip(*minibatch, strict=True)
        rows = model.encode(prompts, texts)
        targets = torch.tensor(labels, dtype=torch.float32, device=model.device)
        total = 0.0
        with model.without_autocast(), torch.enable_grad():
            for index in model.batches(rows):
                logits = model.logits([rows[row] for row in index])
                loss = binary_cross_entropy_with_logits(logits, targets[index], reduction="sum") / len(rows)
                loss.backward()
                total += float(loss.detach())
            nn.utils.clip_grad_norm_(model.network.parameters(), self.max_grad_norm, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
        return total

    def _find(self, module: LightningModule) -> RewardModel:
        scorer = module.rollout.scorer if isinstance(module, GRPOLightningModule) else None
        rewards = scorer.rewards if scorer else {}
        model = rewards[self.reward].function if self.reward in rewards else None
        if scorer is None or not isinstance(model, RewardModel):
            models = [name for name, reward in rewards.items() if isinstance(reward.function, RewardModel)]
            raise ValueError(
                f"callbacks.reward_model.reward={self.reward} is no reward model; there are "
                f"{', '.join(models) or 'none: add one, reward=[accuracy,format,model]'}"
            )
        if rewards[scorer.outcome_name].function is model:
            raise ValueError(
                f"rollout.outcome={scorer.outcome_name} is the model that callbacks.reward_model trains, which would "
                "learn from its own scores: name another reward"
            )
        return model

    def _new_optimizer(self, model: RewardModel) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.network.parameters(), lr=self.lr, weight_decay=0.0)

    def _restore(self, model: RewardModel) -> None:
        """Begin where the checkpoint ended, or with the weights of the model's path."""
        self._model, self._optimizer = model, None
        model.reset()  # another run of this process may have trained them
        state, self._restored = self._restored, None
        if state:
            model.network.load_state_dict(state["weights"])
            self._optimizer = self._new_optimizer(model)
            self._optimizer.load_state_dict(state["optimizer"])
            for group in self._optimizer.param_groups:
                group["lr"] = self.lr

    def state_dict(self) -> dict[str, Any]:
        trained = self._restored
        if self._model is not None and self._optimizer is not None:
            trained = {"weights": dict(self._model.network.state_dict()), "optimizer": self._optimizer.state_dict()}
        return {"pending": _to_lists(self.pending), "buffer": _to_lists(self.buffer), "trained": trained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pending = [tuple(example) for example in state_dict["pending"]]
        self.buffer = [tuple(example) for example in state_dict["buffer"]]
        self._restored = state_dict["trained"]


def _to_lists(examples: Sequence[Example]) -> list[list[Any]]:
    """Examples as lists of texts and numbers, which a checkpoint may hold."""
    return [[prompt if isinstance(prompt, str) else [*prompt], *others] for prompt, *others in examples]
