"""A whole training step of this project beside TRL's, in turns.

Two processes with the same weights, prompts and settings take one step each. What counts is the ratio of neighbouring
steps; that both compute the same is for `equality` to show.
"""

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.process import Worker
from benchmarks.setting import Setting
from benchmarks.timing import ratio, told

CASES = [
    Setting("base"),
    Setting("long_prompt", prompt=512, prompts=2),
    Setting("half_dead", dead=0.5),
    Setting("full_length", mean=None),
    Setting("large_vocabulary", vocabulary=151_936, prompts=2),
    Setting("thousand_tokens", mean=None, cap=1024, prompts=2),
    Setting("base_bf16", bf16=True),
]


def measured(setting: Setting, *, warmup: int, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as started:
        setting.write(Path(directory))
        arguments = setting.dumps(), directory
        workers = {name: started.enter_context(Worker(f"benchmarks.{name}", *arguments)) for name in ("theirs", "ours")}
        pairs = [{name: worker.step() for name, worker in workers.items()} for _ in range(warmup + steps)][warmup:]
    seconds = {name: [pair[name]["seconds"] for pair in pairs] for name in workers}
    phases = [name for name in pairs[0]["ours"] if name.startswith("time/")]
    return {
        "setting": json.loads(setting.dumps()),
        **{name: median(values) for name, values in seconds.items()},
        **ratio(seconds["theirs"], seconds["ours"]),
        "length": median(pair["ours"]["length"] for pair in pairs),
        "phases": {name: median(pair["ours"][name] for pair in pairs) for name in phases},
        "gemm_fraction": median(pair["ours"].get("perf/gemm_fraction", 0.0) for pair in pairs),
    }


def run(*, cases: Sequence[Setting] = CASES, names: Sequence[str] = (), warmup: int = 3, steps: int = 10) -> dict:
    """All cases, or those named."""
    found = {}
    print(f"{'whole step':18} {'TRL s':>7} {'ours s':>7}  ratio", flush=True)
    for case in cases:
        if names and case.name not in names:
            continue
        row = found[case.name] = measured(case, warmup=warmup, steps=steps)
        print(f"{case.name:18} {row['theirs']:7.2f} {row['ours']:7.2f}  {told(row)}", flush=True)
    return found
