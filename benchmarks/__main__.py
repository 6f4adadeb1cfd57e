"""Measure this project beside TRL, transformers' ``generate`` and earlier versions of itself.

python -m benchmarks                              compare, rollout, head, learning and memory: an hour on two cores
python -m benchmarks compare --cases base         one case of the comparison with TRL
python -m benchmarks compare --against DIR        steps in turns with those of another checkout of this project
python -m benchmarks compare rollout --model DIR  a model on disk, asked the questions of data=arithmetic
python -m benchmarks episodes                     learning in multi-turn episodes, with controls: the figures of docs/
python -m benchmarks tasks --model DIR            which tasks of reasoning_gym give it a signal
python -m benchmarks gpu [--cases decode step]    figures of one GPU in less than ten minutes
python -m benchmarks NAME --smoke                 one small step of it, which only shows that it runs

Nothing else should run meanwhile. Figures are printed; --out FILE stores them as JSON, with machine and versions.
"""

import argparse
import json
import os
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.measure import machine, num_threads

NAMES = ("compare", "rollout", "head", "learning", "memory", "episodes", "gpu", "tasks")
DEFAULT = NAMES[:5]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--cases", nargs="+", default=[], metavar="CASE", help="of the benchmark; default: all")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, for compare and rollout")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face directory, for compare and rollout")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of learning and episodes")
    parser.add_argument("--prompts", type=int, default=16, help="of each task of tasks")
    parser.add_argument("--smoke", action="store_true", help="one small step of everything")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the figures, as JSON")
    options = parser.parse_args()
    names = options.names or DEFAULT
    if unknown := sorted({*names} - {*NAMES}):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(NAMES)}")
    threads = 1 if options.smoke else num_threads()  # what is this small is slower with more
    torch.set_num_threads(threads)
    os.environ |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    figures = {"machine": machine()}
    print(", ".join(f"{name} {value}" for name, value in figures["machine"].items()), flush=True)
    for name in names:
        figures[name] = import_module(f"benchmarks.{name}").run(options)
        print(f"{name} done", flush=True)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
