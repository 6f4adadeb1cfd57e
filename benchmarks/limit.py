"""The training phase as a fraction of what the machine's matrix products allow."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks import ours
from benchmarks.setting import NATIVE, Setting
from benchmarks.timing import quartiles
from grpo_lightning.transformer.size import matmul_rate
from grpo_lightning.types import Rollout, Sampling

CASES = [
    Setting("6 M"),
    Setting("6 M, full length", mean=None),
    Setting("6 M, P512", prompt=512, prompts=2),
    Setting("40 M", hidden=512, layers=12),
    Setting("40 M, P512", prompt=512, hidden=512, layers=12, prompts=2),
]


def measured(setting: Setting, *, warmup: int, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        setting.write(Path(directory))
        module = ours.built(setting, directory)
    policy = module.policy.to("cuda" if torch.cuda.is_available() else "cpu")
    device = policy.model.device
    texts = [text for text, _ in setting.texts(setting.prompts)]
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=setting.cap)
    sampled = NATIVE.generate(policy, texts, group_size=setting.group, sampling=sampling, seed=0)
    advantages = torch.randn(len(sampled.ids), 1, device=device) * sampled.mask
    rows = Rollout(sampled.ids, sampled.attention_mask, sampled.mask, sampled.logprobs, sampled.logprobs, advantages)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    flops = 3 * policy.flops(rows)

    def update() -> None:
        weights = module.loss.weights(rows.mask)
        for index in policy.microbatches(rows, module.microbatch_tokens):
            part, share = rows[index], weights[index]
            known = module.loss.gradient(part, share, on_policy=False)
            logprobs, _ = policy.logprobs_and_entropy(part, temperature=1.0, loss_gradient=known)
            module.loss(logprobs, None, part, share)[0].backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    fractions, seconds, rates = [], [], []
    for _ in range(warmup + steps):
        rates.append(matmul_rate(setting.hidden, device=device, dtype=torch.float32))
        started = time.perf_counter()
        update()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        fractions.append(flops / (seconds[-1] * rates[-1]))
    low, middle, high = quartiles(fractions[warmup:])
    return {
        "fraction": middle,
        "quartiles": [low, high],
        "seconds": median(seconds[warmup:]),
        "gflops": median(rates[warmup:]) / 1e9,
        "parameters": sum(p.numel() for p in policy.parameters()),
    }


def run(*, cases: Sequence[Setting] = CASES, warmup: int = 2, steps: int = 12) -> dict:
    found = {}
    print(f"{'training phase':18} {'seconds':>8} {'GFLOP/s':>8}  fraction of the limit", flush=True)
    for case in cases:
        row = found[case.name] = measured(case, warmup=warmup, steps=steps)
        low, high = row["quartiles"]
        shown = f"{row['fraction']:.2f} ({low:.2f} - {high:.2f})"
        print(f"{case.name:18} {row['seconds']:8.2f} {row['gflops']:8.0f}  {shown}", flush=True)
    return found
