"""Predicted and measured memory of a run, each in a process of its own; and of PPO with a critic beside GRPO.

A random Llama of 82 M parameters, two steps. On a CPU the resident memory above that before the model is loaded.
python -m benchmarks.memory sizes prints the README's table of models and GPUs.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from transformers import Qwen2ForCausalLM

from benchmarks.head import status
from benchmarks.ours import bare_trainer
from benchmarks.process import result
from benchmarks.setting import Setting
from benchmarks.shapes import QWEN, qwen
from grpo_lightning import memory
from grpo_lightning.distributed.ranks import SINGLE_PROCESS
from grpo_lightning.module.update import accumulate
from grpo_lightning.transformer.size import shape_of
from grpo_lightning.types import Rollout

MODEL = Setting("memory", prompt=64, cap=64, mean=None, group=4, prompts=2, hidden=768, layers=8, vocabulary=8192)
MEDIUM = replace(MODEL, prompts=1, hidden=512, layers=4)
SMALL = replace(MODEL, hidden=64, layers=1, vocabulary=512)
GROUP = replace(MODEL, prompt=512, cap=3968, group=4, prompts=1, hidden=256, layers=4, vocabulary=32_768, keys=2)
ROW = replace(GROUP, cap=15_872, group=1)
SHORT = replace(GROUP, cap=896)
SETTINGS = {"run": MODEL, "medium": MEDIUM, "small": SMALL, "group": GROUP, "row": ROW, "short": SHORT}
NO_REFERENCE = ["loss.kl_coef=0"]
LORA = ["policy.adapter={r: 8, lora_alpha: 16, target_modules: all-linear}", "reference=adapter_off"]
CASES = {
    "float32": [],
    "float32, no reference": NO_REFERENCE,
    "bf16-mixed": ["trainer.precision=bf16-mixed"],
    "bf16-mixed, no reference": ["trainer.precision=bf16-mixed", *NO_REFERENCE],
    "8-bit Adam": ["optimizer=adamw_8bit"],
    "8-bit Adam, no reference": ["optimizer=adamw_8bit", *NO_REFERENCE],
    "LoRA": LORA,
    "LoRA, no reference": [*LORA, *NO_REFERENCE],
    "gradient checkpointing": ["policy.gradient_checkpointing=true"],
}
CHECKPOINTING = ["policy.gradient_checkpointing=true"]
LONG: dict[str, tuple[str, list[str]]] = {
    "16k tokens": ("group", NO_REFERENCE),
    "16k tokens, checkpointing": ("group", [*NO_REFERENCE, *CHECKPOINTING]),
    "one of 16k": ("row", NO_REFERENCE),
    "one of 16k, checkpointing": ("row", [*NO_REFERENCE, *CHECKPOINTING]),
    "16k tokens, LoRA, checkpointing": ("group", [*LORA, *NO_REFERENCE, *CHECKPOINTING]),
    "16k tokens, bf16-mixed": ("group", [*NO_REFERENCE, "trainer.precision=bf16-mixed"]),
}
"""Updates on one stream: a prompt of 512 tokens and four completions of 3968, or one of 15,872; nothing is sampled."""


def reward(completions, **_):
    return [float(len(text) % 7) for text in completions]


def measured(overrides: list[str], setting: Setting = MODEL) -> dict[str, float]:
    """Bytes predicted and measured, of this process."""
    _fit(SMALL, overrides)  # what the libraries load and set aside at their first use is not the model's
    before = _start()
    module, config = _fit(setting, overrides)
    found = _peak() - before
    use = memory.workload(
        config, processes=1, is_sharded=False, on_cpu=not torch.cuda.is_available(), prompt_tokens=setting.prompt
    )
    return {"measured": found, **memory.predict(module.policy.shape(), use)}


def _fit(setting: Setting, overrides: list[str]) -> tuple[Any, dict]:
    """Two steps; returns the module and its settings."""
    with _built(setting, overrides) as (module, data, config):
        bare_trainer(precision=config["trainer"]["precision"]).fit(module, datamodule=data)
    return module, config


@contextmanager
def _built(setting: Setting, overrides: list[str]) -> Iterator[tuple[Any, Any, dict]]:
    """The module of a run, its data and its settings."""
    with tempfile.TemporaryDirectory() as directory:
        setting.write(Path(directory))
        rows = [json.dumps({"prompt": text, "answer": ""}) for text, _ in setting.texts(16)]
        (Path(directory) / "prompts.jsonl").write_text("\n".join(rows))
        settings = [
            f"run_dir={directory}",
            "policy=hf",
            f"policy.path={directory}",
            "policy.plain_text=true",
            "data=jsonl",
            f"data.path={directory}/prompts.jsonl",
            "data.validate_every=null",
            f"data.prompts_per_step={setting.prompts}",
            f"rollout.group_size={setting.group}",
            f"rollout.max_new_tokens={setting.cap}",
            "reward=[custom]",
            "reward.custom.function._target_=benchmarks.memory.reward",
            "steps=2",
            *overrides,
        ]
        with initialize_config_dir(str(Path(__file__).parents[1] / "conf"), version_base="1.3"):
            cfg = compose("train", settings)
        config = OmegaConf.to_container(cfg, resolve=True)
        data = instantiate(cfg.data, _convert_="all")
        data.load()
        yield instantiate(cfg.module, _convert_="all"), data, config


def updated(overrides: list[str], setting: Setting) -> dict[str, float]:
    """Bytes predicted and measured of two optimizer steps on rows that nobody has sampled, in one micro-batch."""
    _update(SMALL, overrides)
    before = _start()
    module, config = _update(setting, overrides)
    found = _peak() - before
    on_cpu = not torch.cuda.is_available()
    use = memory.workload(config, processes=1, is_sharded=False, on_cpu=on_cpu, prompt_tokens=setting.prompt)
    parts = memory.predict(module.policy.shape(), use)
    parts = {name: parts[name] for name in ("weights", "optimizer", "update")}
    return {"measured": found, **parts, "peak": sum(parts.values())}


def _update(setting: Setting, overrides: list[str]) -> tuple[Any, dict]:
    """Two optimizer steps; returns the module and its settings."""
    overrides = [*overrides, f"module.microbatch_tokens={10**6}"]
    with _built(setting, overrides) as (module, _, config):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        module.to(device)
        rollout = _rollout(setting, device)
        optimizer = module.optimizer([p for p in module.policy.parameters() if p.requires_grad])
        is_half = config["trainer"]["precision"] == "bf16-mixed"
        with torch.autocast(device.type, torch.bfloat16, enabled=is_half, cache_enabled=False):
            for _ in range(2):
                accumulate(
                    module.policy,
                    module.loss,
                    rollout,
                    temperature=1.0,
                    microbatch_tokens=module.microbatch_tokens,
                    skip_dead=False,
                    on_policy_step=True,
                    is_first=True,
                    ranks=SINGLE_PROCESS,
                    backward=_backward,
                )
                optimizer.step()
                optimizer.zero_grad()
    return module, config


def _backward(loss: torch.Tensor, *, last: bool) -> None:
    loss.backward()


def _rollout(setting: Setting, device: torch.device) -> Rollout:
    """Random tokens, every completion as long as the limit."""
    generator = torch.Generator().manual_seed(0)
    rows, length = setting.prompts * setting.group, setting.cap
    least = setting.end_ids[-1] + 1
    ids = torch.randint(least, setting.vocabulary, (rows, setting.prompt + length), generator=generator)
    prompts = ids[:: setting.group, : setting.prompt]
    ids[:, : setting.prompt] = prompts.repeat_interleave(setting.group, 0)  # [P, S] -> [B, S]
    advantages = torch.linspace(-1.0, 1.5, rows).unsqueeze(-1).expand(-1, length)  # [B] -> [B, T]
    zeros = torch.zeros(rows, length, device=device)
    ids = ids.to(device)
    everything = torch.ones_like(ids, dtype=torch.bool)
    return Rollout(
        ids=ids,
        attention_mask=everything,
        mask=everything[:, setting.prompt :],
        old_logprobs=zeros,
        ref_logprobs=zeros,
        advantages=advantages.to(device),
    )


def _start() -> int:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak, see proc(5)
    return status("VmRSS")


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else status("VmHWM")


def states(system: str, setting: Setting = MODEL) -> float:
    """Bytes of all weights, gradients and optimizer states: GRPO's policy and reference, or PPO's four models."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    with tempfile.TemporaryDirectory() as directory:
        setting.write(Path(directory))
        before = _start()
        trained = [AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)]
        frozen = [AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)]
        if system == "ppo":
            sizes = {"num_labels": 1, "ignore_mismatched_sizes": True}
            trained.append(AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, **sizes))
            frozen.append(AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.bfloat16, **sizes))
        for model in trained:
            for weight in model.parameters():
                weight.grad = torch.full_like(weight, 1e-3)
        for model in frozen:
            for weight in model.parameters():
                weight.data = weight.data + 0  # no longer the file's pages
        kept = [torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True) for model in trained]
        for optimizer in kept:
            optimizer.step()
        return float((torch.cuda.memory_allocated() if torch.cuda.is_available() else status("VmRSS")) - before)


def sizes() -> str:
    """Predicted GiB per GPU: 8 prompts x 8 completions on each, 512 + 512 tokens, bf16-mixed, checkpointing."""
    rows = []
    for name in QWEN:
        config = qwen(name)
        with torch.device("meta"):
            full = shape_of(Qwen2ForCausalLM(config))
            lora = shape_of(get_peft_model(Qwen2ForCausalLM(config), LoraConfig(r=16, target_modules="all-linear")))
        common = memory.Workload(
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
        settings = [
            (full, {}),
            (full, {"reference_bytes": 2.0}),
            (full, {"state_bytes": 2.03}),
            (full, {"shards": 2}),
            (full, {"shards": 4}),
            (full, {"shards": 8}),
            (lora, {"frozen_bytes": 2.0}),
            (lora, {"frozen_bytes": 0.53, "copy_bytes": 0.0}),
        ]
        peaks = [memory.predict(shape, replace(common, **changed))["peak"] / memory.GiB for shape, changed in settings]
        rows.append(f"| {name} | " + " | ".join(f"{peak:.0f}" for peak in peaks) + " |")
    names = (
        "one GPU",
        "bf16 reference",
        "8-bit Adam",
        "fsdp, 2 GPUs",
        "fsdp, 4",
        "fsdp, 8",
        "LoRA, bf16",
        "QLoRA, 4 bit",
    )
    head = f"| parameters | {' | '.join(names)} |"
    return "\n".join([head, "|---|" + "---|" * 8, *rows])


def run(names: Sequence[str] = (*CASES, *LONG, "states"), *, setting: str = "run", times: int = 3) -> dict:
    """The cases named, and the states of GRPO and PPO as the median of some times."""
    found: dict = {}
    print(f"{'memory':26} {'predicted GiB':>13} {'measured':>9}  measured / predicted", flush=True)
    for name in names:
        if name in CASES:
            row = apart(setting, *CASES[name])
        elif name in LONG:
            row = apart("update", LONG[name][0], *LONG[name][1])
        else:
            continue
        found[name] = row
        ratio = row["measured"] / row["peak"]
        print(f"{name:26} {row['peak'] / 2**30:13.2f} {row['measured'] / 2**30:9.2f}  {ratio:.2f}", flush=True)
    if "states" not in names:
        return found
    several = {system: [apart("states", system, setting) for _ in range(times)] for system in ("grpo", "ppo")}
    found["states"] = {system: median(values) for system, values in several.items()}
    print(f"states of GRPO / PPO with a critic: {found['states']['grpo'] / found['states']['ppo']:.2f}", flush=True)
    return found


RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MKL_DISABLE_FAST_MM": "1"}
"""glibc and MKL then keep nothing that was freed, see mallopt(3) and MKL's guide: resident memory is what is allocated.

MKL keeps buffers of its products otherwise, whose size depends on the kind of processor.
"""


def apart(*arguments: str):
    return result("benchmarks.memory", *arguments, **RETURNS_MEMORY)


if __name__ == "__main__":
    if sys.argv[1] == "sizes":
        print(sizes())
    elif sys.argv[1] == "states":
        print(json.dumps(states(sys.argv[2], SETTINGS[sys.argv[3]])))
    elif sys.argv[1] == "update":
        print(json.dumps(updated(sys.argv[3:], SETTINGS[sys.argv[2]])))
    else:
        print(json.dumps(measured(sys.argv[2:], SETTINGS[sys.argv[1]])))
