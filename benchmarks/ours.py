"""One step of this project after the other, as a line on standard input asks for it."""

import json
import sys
import time
from functools import partial
from typing import Any

import torch
from lightning import Callback, Trainer
from torch.utils.data import DataLoader

from benchmarks.setting import Setting, reward
from grpo_lightning import advantage, loss, schedule
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import load
from grpo_lightning.reference import frozen_copy, none
from grpo_lightning.reward import RewardSpec
from grpo_lightning.rollout import Collector
from grpo_lightning.types import Prompts
from grpo_lightning.validation import Validation


def policy(directory, **options):
    return load(
        directory, dtype="float32", attn_implementation="sdpa", trust_remote_code=False, plain_text=True, **options
    )


def built(
    setting: Setting, given: str | HFPolicy, *, share_prompts: bool = True, microbatch_tokens: int = 16384
) -> GRPOLightningModule:
    """A module that trains what is ``given``: a directory of weights, or a policy."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": setting.cap, "stop": []}
    rewards = {"reward": RewardSpec(reward, 1.0)}
    return GRPOLightningModule(
        given if isinstance(given, HFPolicy) else policy(given, share_prompts=share_prompts),
        frozen_copy if setting.kl else none,
        Collector(
            reward=rewards,
            advantage=partial(advantage.standardized, eps=1e-4, correction=1),
            outcome=None,
            threshold=1.0,
            group_size=setting.group,
            **sampling,
        ),
        loss.PolicyLoss(
            partial(loss.clipped, epsilon_low=0.2, epsilon_high=0.2),
            loss.k3_weighted,
            loss.completion_mean,
            setting.kl,
            0.0,
        ),
        Validation(rewards, None, 1.0, every=10**9, samples_per_prompt=1, ks=[1], **sampling),
        partial(torch.optim.AdamW, lr=1e-6, betas=(0.9, 0.999), weight_decay=0.0, fused=True),
        partial(schedule.constant, warmup_steps=0),
        ppo_epochs=1,
        minibatch_size=None,
        microbatch_tokens=microbatch_tokens,
        skip_dead=True,
        self_check=False,
        steps=10**9,
        seed=0,
        max_grad_norm=1.0,
        max_skipped=5,
    )


class Lockstep(Callback):
    """Waits for a line before every step and answers with what the step took."""

    def on_train_batch_start(self, trainer, module, *_):
        if not sys.stdin.readline().strip():
            trainer.should_stop = True
            raise SystemExit(0)
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer, module, *_):
        told = {name: module.metrics[name] for name in module.metrics if name.startswith(("time/", "perf/"))}
        told |= {"seconds": time.perf_counter() - self.started, "length": module.metrics["completion/length_mean"]}
        print(json.dumps(told), flush=True)


def bare_trainer(**more: Any) -> Trainer:
    """One device, and nothing written or printed."""
    return Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **more,
    )


def main() -> None:
    setting, directory = Setting.loads(sys.argv[1]), sys.argv[2]
    module = built(setting, directory)
    rows = [Prompts.collate([(text, {"dead": dead})]) for text, dead in setting.texts(setting.prompts * 200)]
    batches = [
        Prompts(
            tuple(row.texts[0] for row in rows[start : start + setting.prompts]),
            {"dead": tuple(row.columns["dead"][0] for row in rows[start : start + setting.prompts])},
        )
        for start in range(0, len(rows), setting.prompts)
    ]
    precision = "bf16-mixed" if setting.bf16 else "32-true"
    bare_trainer(callbacks=[Lockstep()], precision=precision).fit(module, DataLoader(batches, batch_size=None))


if __name__ == "__main__":
    main()
