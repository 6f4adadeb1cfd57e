"""Training of the reward model on the run's outcomes, as in iterative GRPO."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from grpo_lightning.config.rules import integer, number, problems
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.reward.model import RewardModel
from grpo_lightning.types import Prompt, Scored

Example = tuple[Prompt, str, bool]
"""A prompt, a completion, and whether it is right by the outcome reward."""


_RULES = {
    **dict.fromkeys(("every", "epochs", "batch_size"), integer(1)),
    "buffer_size": integer(0),
    "replay": number(lambda v: 0 <= v < 1, "a fraction in [0, 1)"),
    "lr": number(lambda v: v >= 0, "a number >= 0"),
    "max_grad_norm": number(lambda v: v > 0, "a number > 0"),
}


@dataclass(kw_only=True, eq=False, repr=False)
class RewardModelTraining(Callback):
    """Trains the reward model every so many rollouts, on the outcome reward of their completions and of older ones.

    The step "update r_phi through continuous training using a replay mechanism" of iterative GRPO (arXiv:2402.03300,
    Algorithm 1 and section 4.1.4: 10 % of the data are historical). The paper leaves the rest open; here the loss is
    the mean over a mini-batch of the binary cross-entropy between sigmoid(logit) and the label, by AdamW without weight
    decay or dropout, and the historical examples are drawn from the newest ``buffer_size`` without repetition. A
    completion to which the outcome reward does not apply teaches nothing. Weights, optimizer and examples are part of
    checkpoints.

    Args:
        reward: Name of the reward among conf/reward; its function is a `RewardModel`.
        every: Rollouts between two updates.
        epochs: Passes over the new and the replayed examples of an update.
        batch_size: Examples per optimizer step.
        lr: Learning rate, constant; a continued run takes the new one.
        replay: The fraction of an update's examples that are from before the last update, in [0, 1); smaller where
            there are not so many.
        buffer_size: The most examples that are kept to be replayed.
        max_grad_norm: The gradient's L2 norm from which on it is clipped.
        seed: Decides which examples are replayed, and the order of all.

    Raises:
        ValueError: On construction, if a number is out of range; when training starts, if there is no such reward, it
            is no `RewardModel` with float32 weights that are not quantized, it is the outcome reward itself, or there
            is more than one process.
    """

    reward: str
    every: int
    epochs: int
    batch_size: int
    lr: float
    replay: float
    buffer_size: int
    max_grad_norm: float
    seed: int
    pending: list[Example] = field(default_factory=list, init=False)
    """The examples of the rollouts since the last update."""
    buffer: list[Example] = field(default_factory=list, init=False)
    """The examples of the rollouts before, oldest first."""

    def __post_init__(self) -> None:
        if wrong_numbers := problems(_RULES, vars(self), prefix="callbacks.reward_model."):
            raise ValueError("; ".join(wrong_numbers))
        self._model: RewardModel | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._restored: dict[str, Any] | None = None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(reward=self.reward)

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        model = self._find(module)
        if model.quantization or model.dtype != "float32":
            raise ValueError(
                f"callbacks.reward_model.reward={self.reward}: its weights have quantization={model.quantization} and "
                f"dtype={model.dtype}; to be trained they need null and float32: small updates vanish in fewer bits"
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

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not isinstance(module, GRPOLightningModule) or self._model is None or not outputs:
            return
        self.pending += examples(outputs["scored"], module.rollout.scorer.outcome_name)
        if module.completed_steps % self.every == 0 and self.pending:
            module.report(self.update(self._model, module.completed_steps))

    def update(self, model: RewardModel, step: int) -> dict[str, float]:
        """Train on the pending examples and replayed ones, then move the former to the buffer.

        Returns:
            "reward_model/accuracy" on the pending examples before the update, by the sign of the logit, and
            "reward_model/loss", the mean over all examples and epochs as they were trained on.
        """
        generator = random.Random(f"{self.seed} {step}")
        prompts, texts, labels = zip(*self.pending, strict=True)
        scores = model(prompts, texts)
        right = [(score > 0) == label for score, label in zip(scores, labels, strict=True)]
        mixed = self.pending + replayed(self.buffer, len(self.pending), self.replay, generator)
        if self._optimizer is None:
            self._optimizer = self._new_optimizer(model)
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
        with model.isolated(), torch.enable_grad():
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
            trained = {
                "weights": dict(self._model.network.state_dict()),
                "optimizer": self._optimizer.state_dict(),
            }
        return {"pending": _plain(self.pending), "buffer": _plain(self.buffer), "trained": trained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pending = [tuple(example) for example in state_dict["pending"]]
        self.buffer = [tuple(example) for example in state_dict["buffer"]]
        self._restored = state_dict["trained"]


def examples(scored: Scored, outcome: str) -> list[Example]:
    """The rows to which the reward called ``outcome`` applies."""
    applies = scored.rewards[outcome].isfinite().tolist()
    return [
        (scored.prompts.texts[row // scored.group_size], text, label)
        for row, (text, label) in enumerate(zip(scored.sampled.texts, scored.right.tolist(), strict=True))
        if applies[row]
    ]


def replayed(buffer: Sequence[Example], new: int, fraction: float, generator: random.Random) -> list[Example]:
    """Examples of ``buffer``, none twice, so many that together with ``new`` others they are a ``fraction`` of all.

    With r of them and n others  r / (r + n) = fraction,  so  r = n * fraction / (1 - fraction), rounded; fewer where
    the buffer holds fewer.
    """
    return generator.sample(buffer, min(len(buffer), round(new * fraction / (1 - fraction))))


def _plain(examples: Sequence[Example]) -> list[list[Any]]:
    """Examples as lists of texts and numbers, which a checkpoint may hold."""
    return [[prompt if isinstance(prompt, str) else [*prompt], *others] for prompt, *others in examples]
