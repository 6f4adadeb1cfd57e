"""This project's side of a comparison: a module of some settings, and its steps one by one for `process.Worker`."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer
from torch.utils.data import DataLoader

import grpo_lightning
from benchmarks.setting import Setting
from grpo_lightning.policy.hf import matmul_rate
from grpo_lightning.types import Prompts


def compose(setting: Setting, policy: Any, *overrides: str) -> Any:
    """A run of these sizes, whose policy is a directory of weights or an object."""
    return grpo_lightning.compose(
        f"data.prompts_per_step={setting.prompts}",
        f"rollout.group_size={setting.group}",
        f"rollout.max_new_tokens={setting.cap}",
        "rollout.stop=[]",
        f"loss.kl_coef={setting.kl}",
        "loss.kl._target_=grpo_lightning.loss.k3_weighted",  # as TRL has it
        "reward=[custom]",
        "reward.custom.function._target_=benchmarks.setting.reward",
        "optimizer.lr=1e-6",
        "schedule.warmup_steps=0",
        "module.self_check=false",
        *overrides,
        policy=policy if not isinstance(policy, Path) else str(policy),
        data=[{"prompt": ids, "dead": dead} for ids, dead in setting.rows(2 * setting.prompts)],
        run_dir=tempfile.mkdtemp(),
    )


def batches(setting: Setting, count: int) -> DataLoader:
    """The prompts of so many steps, as token ids."""
    rows = setting.rows(count * setting.prompts)
    steps = [rows[start : start + setting.prompts] for start in range(0, len(rows), setting.prompts)]
    prompts = [Prompts(tuple(ids for ids, _ in step), {"dead": tuple(dead for _, dead in step)}) for step in steps]
    return DataLoader(prompts, batch_size=None)  # type: ignore[arg-type]


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


class Lockstep(Callback):
    """Waits for a line before every step and answers with what the step took."""

    rate = 0.0
    """The best rate of matrix products that was measured."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if not sys.stdin.readline().strip():
            trainer.should_stop = True
            raise SystemExit(0)
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        seconds = time.perf_counter() - self.started
        times = {name: value for name, value in module.metrics.items() if name.startswith("time/")}
        flops = 3 * sum(update.flops for update in outputs["updates"])  # backward costs two forwards
        matmul_rate.cache_clear()  # what was measured before the first step shared the machine with the other process
        self.rate = max(self.rate, module.policy.flops_per_second())
        more = {
            "update_rate": flops / times["time/update"] / self.rate,
            "length": module.metrics["completion/length_mean"],
        }
        print(json.dumps({**times, "seconds": seconds, **more}), flush=True)


def main() -> None:
    setting, directory = Setting.loads(sys.argv[1]), Path(sys.argv[2])
    module = compose(setting, directory, "steps=200").module
    precision = "bf16-mixed" if setting.bf16 else "32-true"
    bare_trainer(callbacks=[Lockstep()], precision=precision).fit(module, batches(setting, 200))


if __name__ == "__main__":
    main()
