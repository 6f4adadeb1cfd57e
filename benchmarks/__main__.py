"""Measure this project beside TRL and transformers' ``generate``.

python -m benchmarks                everything, about an hour and a half on two cores
python -m benchmarks compare head   some of it
python -m benchmarks compare:base   one case of the comparison, beside those that are stored
python -m benchmarks report         the tables and pictures again, from the stored figures
python -m benchmarks smoke          every part for one small step: fails where one does not start, and writes nothing
python -m benchmarks gpu            checks and figures of one GPU in less than ten minutes; gpu --help says more

Figures go to benchmarks/results/cpu or gpu, tables into benchmarks/README.md. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.machine import described, threads
from grpo_lightning.console import write_atomic

CASED = ("compare", "memory")
ALONE = ("report", "smoke")
PARTS = ("equality", "rollout", "head", "limit", "growth", "learning", "compare", "memory", "budget")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    if sys.argv[1:2] == ["gpu"]:
        from benchmarks.gpu.command import main as gpu

        raise SystemExit(gpu(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"smoke, report, {', '.join(PARTS)}; all but smoke where none is named"
    )
    asked = parser.parse_args().parts or [*PARTS, "report"]
    if unknown := {part.partition(":")[0] for part in asked} - {*PARTS, *ALONE}:
        parser.error(f"{', '.join(sorted(unknown))}: allowed: {', '.join((*PARTS, *ALONE))}")
    for part, _, case in (name.partition(":") for name in asked):
        if case and part not in CASED:
            parser.error(f"{part}:{case}: only {' and '.join(CASED)} have cases of their own")
    torch.set_num_threads(threads())
    os.environ |= {"OMP_NUM_THREADS": str(threads()), "HF_HUB_OFFLINE": "1"}  # for the processes that are started
    machine = described()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    for part, _, case in (name.partition(":") for name in asked):
        module = import_module(f"benchmarks.{part}")
        if part in ALONE:
            module.run()
            continue
        path = RESULTS / machine["kind"] / f"{part}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text()) if case and path.exists() else {}
        if known and known["machine"] != machine:
            other = ", ".join(
                f"{name} {value}" for name, value in known["machine"].items() if machine.get(name) != value
            )
            parser.error(
                f"{part}:{case}: the other cases in {path} were measured with {other}; allowed is {part}, all of it"
            )
        found = module.run(names=[case]) if case else module.run()
        if case and case not in found:
            parser.error(f"{part} has no case {case}")
        write_atomic(path, json.dumps({**known, "machine": machine, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
