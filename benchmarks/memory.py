"""Predicted and measured memory of a run, each in a process of its own; and of PPO with a critic beside GRPO.

A random Llama of 82 M parameters, two steps. On a CPU the resident memory above that before the model is loaded.
"""

import json
import sys
import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import ours
from benchmarks.measure import autocast, device, peak_memory, process_status, start_memory
from benchmarks.models import QWEN, qwen
from benchmarks.process import result
from benchmarks.setting import Setting
from grpo_lightning import memory
from grpo_lightning.policy.hf import shape_of
from grpo_lightning.types import Rollout

MODEL = Setting("memory", prompt=64, cap=64, mean=None, group=4, prompts=2, hidden=768, layers=8, vocabulary=8192)
SMALL = replace(MODEL, hidden=64, layers=1, vocabulary=512)
GROUP = replace(MODEL, prompt=512, cap=3968, group=4, prompts=1, hidden=256, layers=4, vocabulary=32_768, keys=2)
SETTINGS = {
    "run": MODEL,
    "medium": replace(MODEL, prompts=1, hidden=512, layers=4),
    "small": SMALL,
    "group": GROUP,
    "row": replace(GROUP, cap=15_872, group=1),
    "short": replace(GROUP, cap=896),
}
NO_REFERENCE, CHECKPOINTING = ["loss.kl_coef=0"], ["policy.gradient_checkpointing=true"]
HALF = ["trainer.precision=bf16-mixed"]
LORA = ["policy.adapter={r: 8, lora_alpha: 16, target_modules: all-linear}", "reference=adapter_off"]
CASES = {
    "float32": [],
    "float32, no reference": NO_REFERENCE,
    "bf16-mixed": HALF,
    "8-bit Adam": ["optimizer=adamw_8bit"],
    "LoRA": LORA,
    "gradient checkpointing": CHECKPOINTING,
}
LONG: dict[str, tuple[str, list[str]]] = {
    "16k tokens": ("group", NO_REFERENCE),
    "16k tokens, checkpointing": ("group", [*NO_REFERENCE, *CHECKPOINTING]),
    "one of 16k, checkpointing": ("row", [*NO_REFERENCE, *CHECKPOINTING]),
    "16k tokens, LoRA, checkpointing": ("group", [*LORA, *NO_REFERENCE, *CHECKPOINTING]),
    "16k tokens, bf16-mixed": ("group", [*NO_REFERENCE, *HALF]),
}
"""Updates on one stream: a prompt of 512 tokens and four completions of 3968, or one of 15,872; nothing is sampled."""
COMPLETE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MKL_DISABLE_FAST_MM": "1"}
"""glibc and MKL then keep nothing that was freed, see mallopt(3) and MKL's guide: resident is what is allocated."""


def run(options: Namespace) -> dict[str, Any]:
    """The cases, the states of GRPO and PPO, and the prediction for models and GPUs of docs/devices.md."""
    setting = "small" if options.smoke else "run"
    cases = ["float32"] if options.smoke else options.cases or [*CASES, *LONG]
    figures: dict[str, Any] = {}
    parts = ("weights", "optimizer", "reference", "sampling", "update", "peak", "measured")
    print(f"| case | {' | '.join(parts)}, GiB | measured / predicted |\n|---|{'---|' * (len(parts) + 1)}")
    for name in cases:
        arguments = [setting, *CASES[name]] if name in CASES else ["update", LONG[name][0], *LONG[name][1]]
        row = figures[name] = apart(*arguments)
        sizes = [f"{row[part] / memory.GiB:.2f}" if part in row else "-" for part in parts]
        print(f"| {name} | {' | '.join(sizes)} | **{row['measured'] / row['peak']:.2f}** |", flush=True)
    several = {system: [apart("states", system, setting) for _ in range(3)] for system in ("grpo", "ppo")}
    figures["states"] = {system: median(values) for system, values in several.items()}
    print(f"states of GRPO / PPO with a critic: {figures['states']['grpo'] / figures['states']['ppo']:.2f}")
    print(sizes_table(), flush=True)
    return figures


def apart(*arguments: str) -> Any:
    """What this module prints in a process of its own."""
    return result("benchmarks.memory", *arguments, **COMPLETE)


def measured(overrides: list[str], setting: Setting, *, samples: bool) -> dict[str, float]:
    """Bytes predicted and measured of two steps in this process, or of two updates on rows that nobody has sampled."""
    make = two_steps if samples else two_updates
    make(SMALL, overrides)  # what the libraries load and set aside at their first use is not the model's
    before = start_memory()
    run = make(setting, overrides)
    used = peak_memory() - before
    on_cpu = device().type == "cpu"
    load = memory.workload(run.config, processes=1, is_sharded=False, on_cpu=on_cpu, prompt_tokens=setting.prompt)
    parts = memory.predict(run.module.policy.shape(), load)
    if not samples:
        parts = {name: parts[name] for name in ("weights", "optimizer", "update")}
        parts["peak"] = sum(parts.values())
    return {"measured": used, **parts}


def build(setting: Setting, overrides: list[str]) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        setting.write(Path(directory))
        trainer = "trainer=cpu" if device().type == "cpu" else "trainer=gpu"
        run = ours.compose(setting, Path(directory), "steps=2", "loss.kl_coef=0.04", trainer, *overrides)
        run.module  # noqa: B018 (loads the weights while they are there)
    return run


def two_steps(setting: Setting, overrides: list[str]) -> Any:
    run = build(setting, overrides)
    trainer = ours.bare_trainer(precision=run.config["trainer"]["precision"])
    trainer.fit(run.module, ours.batches(setting, 2))
    return run


def two_updates(setting: Setting, overrides: list[str]) -> Any:
    run = build(setting, [*overrides, f"module.microbatch_tokens={10**6}"])
    module = run.module
    module.to(device())
    module.begin_without_trainer()
    collected: Any = SimpleNamespace(rollout=rollout(setting), is_fresh=True)
    with autocast() if run.config["trainer"]["precision"] == "bf16-mixed" else torch.enable_grad():
        for _ in range(2):
            module.update(collected, module.loss, 1.0, apply_gradients=module.apply_gradients)
    return run


def rollout(setting: Setting) -> Rollout:
    """Random tokens, every completion as long as the limit."""
    rows, length = setting.prompts * setting.group, setting.cap
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, setting.vocabulary, (rows, setting.prompt + length), generator=generator).to(device())
    prompts = ids[:: setting.group, : setting.prompt]
    ids[:, : setting.prompt] = prompts.repeat_interleave(setting.group, 0)  # [P, S] -> [B, S]
    advantages = torch.linspace(-1.0, 1.5, rows, device=device()).unsqueeze(-1).repeat(1, length)  # [B] -> [B, T]
    zeros, present = torch.zeros(rows, length, device=device()), torch.ones_like(ids, dtype=torch.bool)
    return Rollout(
        ids=ids,
        attention_mask=present,
        mask=present[:, setting.prompt :],
        old_logprobs=zeros,
        ref_logprobs=zeros,
        advantages=advantages,
    )


def states(system: str, setting: Setting) -> float:
    """Bytes of all weights, gradients and optimizer states: GRPO's policy and reference, or PPO's four models."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    with tempfile.TemporaryDirectory() as directory:
        setting.write(Path(directory))
        before = start_memory()
        kinds: list[tuple[Any, dict[str, Any]]] = [(AutoModelForCausalLM, {})]
        if system == "ppo":
            options = {"num_labels": 1, "ignore_mismatched_sizes": True}
            kinds.append((AutoModelForSequenceClassification, options))
        trained = [kind.from_pretrained(directory, dtype=torch.float32, **options) for kind, options in kinds]
        frozen = [kind.from_pretrained(directory, dtype=torch.bfloat16, **options) for kind, options in kinds]
        for model in trained:
            for weight in model.parameters():
                weight.grad = torch.full_like(weight, 1e-3)
        for model in frozen:
            for weight in model.parameters():
                weight.data = weight.data + 0  # no longer the file's pages
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True) for model in trained]
        for optimizer in optimizers:
            optimizer.step()
        return float((torch.cuda.memory_allocated() if device().type == "cuda" else process_status("VmRSS")) - before)


def sizes_table() -> str:
    """Predicted GiB per GPU: 8 prompts x 8 completions on each, 512 + 512 tokens, bf16-mixed, checkpointing."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2ForCausalLM

    load = memory.Workload(
        prompts=8,
        group_size=8,
        prompt_tokens=512,
        completion_tokens=512,
        microbatch_tokens=16_384,
        device="cuda",
        is_half=True,
        copy_bytes=2.0,
        checkpointing=True,
    )
    columns: dict[str, dict[str, Any]] = {
        "one GPU": {},
        "bf16 reference": {"reference_bytes": 2.0},
        "8-bit Adam": {"state_bytes": 2.03},
        "fsdp, 2 GPUs": {"shards": 2},
        "fsdp, 4": {"shards": 4},
        "fsdp, 8": {"shards": 8},
        "LoRA, bf16": {"frozen_bytes": 2.0},
        "QLoRA, 4 bit": {"frozen_bytes": 0.53, "copy_bytes": 0.0},
    }
    lines = [f"| parameters | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in QWEN:
        with torch.device("meta"):
            full = shape_of(Qwen2ForCausalLM(qwen(name)))
            adapter = LoraConfig(r=16, target_modules="all-linear")
            lora = shape_of(get_peft_model(Qwen2ForCausalLM(qwen(name)), adapter))
        peaks = [
            memory.predict(lora if "LoRA" in column else full, replace(load, **changed))["peak"] / memory.GiB
            for column, changed in columns.items()
        ]
        lines.append(f"| {name} | " + " | ".join(f"{peak:.0f}" for peak in peaks) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    if kind == "states":
        print(json.dumps(states(words[0], SETTINGS[words[1]])))
    elif kind == "update":
        print(json.dumps(measured(words[1:], SETTINGS[words[0]], samples=False)))
    else:
        print(json.dumps(measured(words, SETTINGS[kind], samples=True)))
