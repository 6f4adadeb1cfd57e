"""One step of TRL's GRPOTrainer after the other, as a line on standard input asks for it."""

import json
import os
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.setting import Setting, reward


def build(setting: Setting, directory: str, **changed):
    on_gpu = torch.cuda.is_available()
    rows = setting.texts(setting.prompts * 200)
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(directory),
        reward_funcs=changed.pop("reward_funcs", reward),
        train_dataset=changed.pop(
            "train_dataset", Dataset.from_dict({"prompt": [t for t, _ in rows], "dead": [d for _, d in rows]})
        ),
        callbacks=changed.pop("callbacks", None),
        args=GRPOConfig(
            **{
                "output_dir": tempfile.mkdtemp(),
                "per_device_train_batch_size": setting.prompts * setting.group,
                "num_generations": setting.group,
                "max_completion_length": setting.cap,
                "max_steps": 200,
                "learning_rate": 1e-6,
                "lr_scheduler_type": "constant",
                "weight_decay": 0.0,
                "adam_beta2": 0.999,
                "optim": "adamw_torch_fused",
                "beta": setting.kl,
                "loss_type": "grpo",
                "temperature": 1.0,
                "top_k": 0,
                "gradient_checkpointing": False,
                "use_cpu": not on_gpu,
                "bf16": setting.bf16,
                "fp16": False,
                "shuffle_dataset": False,
                "logging_strategy": "no",
                "save_strategy": "no",
                "report_to": [],
                "disable_tqdm": True,
            }
            | changed
        ),
    )


class Lockstep(TrainerCallback):
    """Waits for a line before every step and answers with what the step took."""

    def on_step_begin(self, args, state, control, **_):
        if not sys.stdin.readline().strip():
            os._exit(0)
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        print(json.dumps({"seconds": time.perf_counter() - self.started}), flush=True)


def main() -> None:
    build(Setting.loads(sys.argv[1]), sys.argv[2], callbacks=[Lockstep()]).train()


if __name__ == "__main__":
    main()
