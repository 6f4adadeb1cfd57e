"""Supervised fine-tuning on demonstrations: the stage before GRPO, with the same policy, data and validation."""

from typing import Any

import torch

from grpo_lightning.module.base import StepModule
from grpo_lightning.types import Prompts


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
        ranks = self.loop.ranks
        ranks.all_or_raise(self.poll)
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
        seconds = self.clock.read()
        self.complete_step(
            {
                "loss/total": total,
                "optim/grad_norm": norm,
                "time/update": seconds["update"],
                "time/step": seconds["step"],
            }
        )
