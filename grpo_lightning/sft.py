"""Supervised fine-tuning on demonstrations: the stage before GRPO, with the same policy, data and validation."""

from typing import Any

import torch

from grpo_lightning.batch import Prompts
from grpo_lightning.step import StepModule


class SFTLightningModule(StepModule):
    """Per batch of demonstrations, one optimizer step on the mean negative log-likelihood of their tokens.

    The data set has a column ``completion`` beside the prompts.

    Args:
        microbatch_tokens: Most tokens, padding included, in one forward pass: memory, never results.
        common: As in ``StepModule``.
    """

    def __init__(self, *args: Any, microbatch_tokens: int, **common: Any) -> None:
        super().__init__(*args, **common)
        self.microbatch_tokens = microbatch_tokens

    def training_step(self, prompts: Prompts) -> None:
        self.ranks.agree(self.ranks.attempt(self.poll))
        self.clock.restart()
        if "completion" not in prompts.columns:
            raise ValueError(f"module=sft needs a column 'completion'; the data has {sorted(prompts.columns)}")
        with self.clock("update"):
            rows = self.policy.demonstrate(prompts.texts, prompts.columns["completion"])
            tokens = rows.mask.sum()
            total = torch.zeros((), device=self.device)
            indices, idle = self.policy.shares(rows, self.microbatch_tokens, self.ranks)
            for number, index in enumerate(indices):
                counts = number < len(indices) - idle
                loss = -self.policy.logprobs(rows[index], temperature=1.0).sum() * counts / tokens
                self.backward_of_part(loss, last=number == len(indices) - 1)
                total += loss.detach()
            total = self.ranks.add_up({"loss": total})["loss"]
            norm = self.apply_gradients()
        seconds = self.clock.read()
        self.complete_step(
            {
                "loss/total": total,
                "optim/grad_norm": norm,
                "time/update": seconds["update"],
                "time/step": seconds["step"],
            }
        )
