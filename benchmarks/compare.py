"""A whole training step of this project beside TRL's, in turns on one quiet machine.

python -m benchmarks.compare                    the table of benchmarks/README.md (about 25 minutes)
python -m benchmarks.compare --case long_prompt  one line of it

First equality: both score and differentiate the same completions. Then time: two processes with the same weights,
prompts and settings take one step each in turns. What counts is the ratio of neighbouring steps.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

from benchmarks.machine import described, threads
from benchmarks.setting import Setting

CASES = [
    Setting("base"),
    Setting("long_prompt", prompt=512, prompts=2),
    Setting("half_dead", dead=0.5),
    Setting("full_length", mean=None),
    Setting("large_vocabulary", vocabulary=151_936, prompts=2, cap=128),
    Setting("with_reference", kl=0.04),
    Setting("larger_model", hidden=512, layers=12, prompts=2),
]
RESULTS = Path(__file__).parent / "results"


class Worker:
    """A system in a process of its own, one step at a time."""

    def __init__(self, module: str, setting: Setting, directory: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, setting.dumps(), directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads()), "HF_HUB_OFFLINE": "1"},
        )

    def step(self) -> dict[str, float]:
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self._process.args[2]} ended with {self._process.wait()}")

    def close(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.close()
        self._process.wait(60)


def measured(setting: Setting, warmup: int, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        setting.write(Path(directory))
        workers = {name: Worker(f"benchmarks.{name}", setting, directory) for name in ("theirs", "ours")}
        pairs = [{name: worker.step() for name, worker in workers.items()} for _ in range(warmup + steps)][warmup:]
        for worker in workers.values():
            worker.close()
    ratios = [pair["theirs"]["seconds"] / pair["ours"]["seconds"] for pair in pairs]
    low, _, high = quantiles(ratios, n=4)
    phases = [name for name in pairs[0]["ours"] if name.startswith("time/")]
    return {
        "setting": json.loads(setting.dumps()),
        "theirs": median(pair["theirs"]["seconds"] for pair in pairs),
        "ours": median(pair["ours"]["seconds"] for pair in pairs),
        "ratio": median(ratios),
        "quartiles": [low, high],
        "steps": steps,
        "length": median(pair["ours"]["length"] for pair in pairs),
        "phases": {name: median(pair["ours"][name] for pair in pairs) for name in phases},
        "gemm_fraction": median(pair["ours"].get("perf/gemm_fraction", 0.0) for pair in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    check = subprocess.run([sys.executable, "-m", "benchmarks.equality"], capture_output=True, text=True)
    print(check.stdout.strip() or check.stderr[-2000:], flush=True)
    check.check_returncode()
    found = {"machine": described(), "equality": check.stdout.strip(), "cases": {}}
    print(f"{'case':18} {'TRL s':>7} {'ours s':>7} {'ratio':>6}  quartiles", flush=True)
    for case in CASES:
        if not asked.case or case.name in asked.case:
            row = found["cases"][case.name] = measured(case, asked.warmup, asked.steps)
            low, high = row["quartiles"]
            print(
                f"{case.name:18} {row['theirs']:7.2f} {row['ours']:7.2f} {row['ratio']:6.2f}  {low:.2f} - {high:.2f}"
                f"   { ({name: round(value, 2) for name, value in row['phases'].items()}) }",
                flush=True,
            )
    output = asked.output or RESULTS / f"compare_{found['machine']['kind']}.json"
    output.parent.mkdir(exist_ok=True)
    known = json.loads(output.read_text()) if output.exists() and asked.case else {"cases": {}}
    found["cases"] = known["cases"] | found["cases"]
    output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
