"""Sampling by this project beside transformers' ``generate``: same model, prompts, temperature and lengths."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks import ours
from benchmarks.setting import NATIVE, Setting
from benchmarks.timing import in_turns, ratio, told
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.types import Sampling

CASES = [
    Setting("base"),
    Setting("long_prompt", prompt=512, prompts=2),
    Setting("full_length", mean=None),
    Setting("large_vocabulary", vocabulary=151_936, prompts=2),
]


def generate(policy: HFPolicy, setting: Setting, texts: list[str], greedy: bool = False) -> torch.Tensor:
    """Completion ids, every prompt K times."""
    ids = torch.tensor(policy.tokenize(texts), device=policy.model.device).repeat_interleave(setting.group, 0)
    with torch.no_grad():
        found = policy.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=not greedy,
            max_new_tokens=setting.cap,
            temperature=None if greedy else 1.0,
            top_k=None if greedy else 0,
        )
    return found[:, ids.shape[1] :]


def measured(setting: Setting, *, warmup: int, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        setting.write(Path(directory))
        policy = ours.policy(directory).to("cuda" if torch.cuda.is_available() else "cpu")
    texts = [text for text, _ in setting.texts(setting.prompts)]
    greedy = NATIVE.generate(
        policy,
        texts,
        group_size=setting.group,
        sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=setting.cap),
        seed=0,
    )
    expected = generate(policy, setting, texts, greedy=True)
    length = min(expected.shape[1], greedy.mask.shape[1])
    same = (greedy.ids[:, -greedy.mask.shape[1] :][:, :length] == expected[:, :length]) | ~greedy.mask[:, :length]
    if not same.all():
        raise SystemExit(f"{setting.name}: other greedy completions than generate")
    sampling, seeds, lengths = (
        Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=setting.cap),
        iter(range(10**6)),
        [],
    )

    def sample() -> None:
        sampled = NATIVE.generate(policy, texts, group_size=setting.group, sampling=sampling, seed=next(seeds))
        lengths.append(float(sampled.mask.sum(-1).float().mean()))

    seconds = in_turns(
        {"generate": lambda: generate(policy, setting, texts), "ours": sample}, warmup=warmup, steps=steps
    )
    return {
        **{name: median(values) for name, values in seconds.items()},
        **ratio(seconds["generate"], seconds["ours"]),
        "length": median(lengths),
    }


def run(*, cases: Sequence[Setting] = CASES, warmup: int = 3, steps: int = 12) -> dict:
    found = {}
    print(f"{'rollout':18} {'generate s':>10} {'ours s':>7}  ratio", flush=True)
    for case in cases:
        row = found[case.name] = measured(case, warmup=warmup, steps=steps)
        print(f"{case.name:18} {row['generate']:10.2f} {row['ours']:7.2f}  {told(row)}", flush=True)
    return found
