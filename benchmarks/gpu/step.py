"""A whole step of a model of 1.5 B parameters: its phases, and its memory beside the prediction."""

from typing import Any

import torch
from lightning import Callback
from torch.utils.data import DataLoader

from benchmarks import ours
from benchmarks.gpu.models import model, policy, prompts, sized
from benchmarks.gpu.progress import keep
from benchmarks.gpu.tools import device
from benchmarks.setting import Setting
from grpo_lightning import memory
from grpo_lightning.types import Prompts

TOLERANCE = 0.1
STEPS = 3
"""The last one counts: kernels are compiled and rooms are made before."""
MICROBATCH = 16_384


class Phases(Callback):
    """Collects what every step tells of its times."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        known = ("time/", "perf/", "completion/length_mean")
        self.found.append({name: float(module.metrics[name]) for name in module.metrics if name.startswith(known)})
        keep(steps=self.found)
        trainer.should_stop = len(self.found) == STEPS


def use(setting: Setting) -> memory.Workload:
    """What the run does with its model, for the prediction."""
    return memory.Workload(
        prompts=setting.prompts,
        group_size=setting.group,
        prompt_tokens=setting.prompt,
        completion_tokens=setting.cap,
        microbatch_tokens=MICROBATCH,
        is_half=True,
        checkpointing=True,
        device="cuda" if torch.cuda.is_available() else "cpu",
        copy_bytes=2.0,
    )


def run(reduced: bool) -> dict[str, Any]:
    """Three steps in bf16-mixed with gradient checkpointing and AdamW, without a reference."""
    setting = (
        Setting("step", prompt=16, cap=12, group=4, prompts=2)
        if reduced
        else Setting("step", prompt=256, cap=256, group=8, prompts=8)
    )
    config = sized(reduced)
    made = model(config)
    made.gradient_checkpointing_enable({"use_reentrant": False})
    given = policy(made, endless=True)
    expected = memory.predict(given.shape(), use(setting))
    keep(predicted_gib={name: size / memory.GiB for name, size in expected.items()})
    module = ours.built(setting, given, microbatch_tokens=MICROBATCH)
    batches = [
        Prompts(
            tuple(prompts(setting.prompts, setting.prompt, config.vocab_size, seed=seed)),
            {"dead": (False,) * setting.prompts},
        )
        for seed in range(STEPS)
    ]
    phases = Phases()
    ours.bare_trainer(precision="bf16-mixed", callbacks=[phases]).fit(module, DataLoader(batches, batch_size=None))
    if not given.share_prompts:
        raise RuntimeError("prompts are not shared")
    last = phases.found[-1]
    peak = torch.cuda.max_memory_allocated() if device().type == "cuda" else None
    told = ", ".join(f"{name[5:]} {value:.2f}" for name, value in last.items() if name.startswith("time/") and value)
    fit = (
        {} if peak is None else {"measured_gib": peak / memory.GiB, "measured_over_predicted": peak / expected["peak"]}
    )
    main = f"seconds: {told}; predicted {expected['peak'] / memory.GiB:.1f} GiB"
    if fit:
        main += f", measured {fit['measured_gib']:.1f}"
    return {
        "passed": reduced or abs(fit["measured_over_predicted"] - 1) <= TOLERANCE,
        "main": main,
        "judged": not reduced,
        "rows": setting.prompts * setting.group,
        "not_tested": [] if fit else ["memory: it is measured on a GPU only"],
        **fit,
    }
