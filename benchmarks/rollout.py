"""Sampling by this project beside transformers' ``generate``: same model, prompts, temperature and lengths."""

import tempfile
from argparse import Namespace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import compare
from benchmarks.measure import device, format_ratio, in_turns, ratio
from benchmarks.setting import Setting
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.sampler.native import NativeSampler
from grpo_lightning.types import Sampled, Sampling

CASES = tuple(case for case in compare.CASES if case.name in ("base", "long_prompt", "full_length", "large_vocabulary"))


def run(options: Namespace) -> dict[str, Any]:
    """All cases, or those named; with ``options.against`` whole steps, of which the rollout is a column."""
    if options.against:
        return compare.run(options, CASES)
    figures = {}
    print("| case | `generate`, s | ours, s | `generate` / ours (quartiles) |\n|---|---|---|---|")
    for case in (case for case in compare.select(CASES, options) if not case.bf16):
        row = figures[case.name] = measure(case, **{"warmup": 0, "steps": 1} if options.smoke else {})
        print(f"| {case.name} | {row['generate']:.2f} | {row['ours']:.2f} | **{format_ratio(row)}** |", flush=True)
    return figures


def measure(setting: Setting, *, warmup: int = 3, steps: int = 12) -> dict[str, Any]:
    """Seconds of both, in turns.

    Raises:
        SystemExit: Greedy completions of both differ.
    """
    with tempfile.TemporaryDirectory() as directory:
        setting.write(Path(directory))
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        policy = HFPolicy(model, AutoTokenizer.from_pretrained(directory)).to(device())
    prompts = [ids for ids, _ in setting.rows(setting.prompts)]
    inputs = policy.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(device())
    inputs = {name: values.repeat_interleave(setting.group, 0) for name, values in inputs.items()}  # [P, S] -> [B, S]

    @torch.no_grad()
    def generate(*, greedy: bool = False) -> torch.Tensor:
        """Completion ids [B, T]."""
        options = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
        ids = model.generate(**inputs, max_new_tokens=setting.cap, **options)
        return ids[:, inputs["input_ids"].shape[1] :]

    def sample(temperature: float, seed: int) -> Sampled:
        sampling = Sampling(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=setting.cap)
        return NativeSampler().generate(policy, prompts, group_size=setting.group, sampling=sampling, seed=seed)

    greedy, expected = sample(0.0, 0), generate(greedy=True)
    length = min(expected.shape[1], greedy.mask.shape[1])
    ours = greedy.ids[:, -greedy.mask.shape[1] :][:, :length]
    if not ((ours == expected[:, :length]) | ~greedy.mask[:, :length]).all():
        raise SystemExit(f"{setting.name}: other greedy completions than generate")
    seeds = count()
    actions = {"generate": generate, "ours": lambda: sample(1.0, next(seeds))}
    seconds = in_turns(actions, warmup=warmup, steps=steps)
    medians = {name: median(values) for name, values in seconds.items()}
    return {**medians, **ratio(seconds["generate"], seconds["ours"])}
