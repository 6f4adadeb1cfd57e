"""A budget for keys and values: 64 completions of up to 4,096 tokens, of which 16 are drawn at a time.

The completions are those without a budget, but for tokens whose random number lies where rounding decides. The time is
beside that of an ideal packing: every token at the rate of the steps in which no place was free. Memory is that of a
process of its own, above what it held before the model.
"""

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from benchmarks import ours
from benchmarks.head import status
from benchmarks.memory import RETURNS_MEMORY
from benchmarks.process import result
from benchmarks.setting import NATIVE, Setting
from benchmarks.timing import quartiles
from grpo_lightning.memory import GiB, Workload, predict
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.sampler.native import sampler
from grpo_lightning.types import Sampled, Sampling

CASE = Setting("budget", cap=4096, mean=700, prompts=8, hidden=128, layers=4)
ROWS = 16


def sampled(policy: HFPolicy, setting: Setting, rows: int | None, seed: int = 0):
    """Completions, with a budget for so many of them."""
    shape = policy.shape()
    tokens = setting.prompts * setting.prompt + (rows or 0) * (setting.cap + setting.prompt)
    gib = None if rows is None else 8 * shape.keys * shape.layers * tokens / GiB
    options = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": setting.cap}
    texts = [text for text, _ in setting.texts(setting.prompts)]
    return NATIVE.generate(
        policy, texts, group_size=setting.group, sampling=Sampling(**options, kv_cache_gib=gib), seed=seed
    )


class Watched(sampler.DecodeBatch):
    """DecodeBatch that know how long they were all taken, and how many tokens were drawn meanwhile."""

    full_seconds = 0.0
    full_tokens = 0
    _before: float | None = None

    def sync(self, stops):
        seconds = None if Watched._before is None else time.perf_counter() - Watched._before
        is_full, tokens = len(self.running) == ROWS, sum(self.lengths)
        over = super().sync(stops)
        if seconds is not None and is_full:
            Watched.full_seconds += seconds
            Watched.full_tokens += sum(self.lengths) - tokens
        Watched._before = time.perf_counter()
        return over


def num_same(one: Sampled, other: Sampled) -> int:
    """How many completions are the same in both."""
    own, others = (
        [ids[is_real] for ids, is_real in zip(part.ids[:, -part.mask.shape[1] :], part.mask, strict=True)]
        for part in (one, other)
    )
    return sum(map(torch.equal, own, others))


def timed(setting: Setting, directory: str, times: int) -> dict:
    """How many completions are the same, and seconds with the budget over those of an ideal packing."""
    policy = ours.policy(directory).to("cuda" if torch.cuda.is_available() else "cpu")
    ratios, seconds = [], []
    sampler.DecodeBatch = Watched  # type: ignore[misc]
    for number in range(times):
        Watched.full_seconds, Watched.full_tokens, Watched._before = 0.0, 0, None
        started = time.perf_counter()
        found = sampled(policy, setting, ROWS, seed=number)
        seconds.append(time.perf_counter() - started)
        ideal = int(found.mask.sum()) * Watched.full_seconds / max(1, Watched.full_tokens)
        ratios.append(seconds[-1] / ideal)
    same = num_same(found, sampled(policy, setting, None, seed=number))
    low, middle, high = quartiles(ratios)
    return {
        "same": same,
        "ratio": middle,
        "quartiles": [low, high],
        "seconds": median(seconds),
        "tokens": int(found.mask.sum()),
        "longest": int(found.mask.sum(-1).max()),
    }


def weighed(setting: Setting, directory: str) -> dict[str, float]:
    """Bytes predicted and measured, of this process."""
    small = replace(setting, hidden=64, layers=1, vocabulary=512, cap=32, prompts=1)
    with tempfile.TemporaryDirectory() as other:
        small.write(Path(other))
        sampled(ours.policy(other), small, ROWS)  # what libraries set aside at their first use is not the model's
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak, see proc(5)
    before = status("VmRSS")
    policy = ours.policy(directory)
    sampled(policy, setting, ROWS)
    found = status("VmHWM") - before
    shape = policy.shape()
    use = Workload(
        prompts=setting.prompts,
        group_size=setting.group,
        prompt_tokens=setting.prompt,
        completion_tokens=setting.cap,
        microbatch_tokens=1,
        copy_bytes=4.0,
        kv_cache_bytes=8.0
        * shape.keys
        * shape.layers
        * (setting.prompts * setting.prompt + ROWS * (setting.cap + setting.prompt)),
    )
    parts = predict(shape, use)
    return {"measured": found, "predicted": parts["weights"] + parts["sampling"]}


def run(*, setting: Setting = CASE, times: int = 3) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        setting.write(Path(directory))
        found = {
            "setting": json.loads(setting.dumps()),
            **result("benchmarks.budget", "time", setting.dumps(), directory, str(times)),
            **result("benchmarks.budget", "memory", setting.dumps(), directory, **RETURNS_MEMORY),
        }
    print(
        f"{setting.prompts * setting.group} completions of up to {found['longest']} tokens, {ROWS} at a time: "
        f"{found['seconds']:.1f} s, {found['ratio']:.2f} of an ideal packing, {found['same']} the same as without; "
        f"{found['measured'] / 2**20:.0f} MiB, {found['measured'] / found['predicted']:.2f} of the predicted",
        flush=True,
    )
    return found


if __name__ == "__main__":
    given = Setting.loads(sys.argv[2])
    if sys.argv[1] == "time":
        print(json.dumps(timed(given, sys.argv[3], int(sys.argv[4]))))
    else:
        print(json.dumps(weighed(given, sys.argv[3])))
