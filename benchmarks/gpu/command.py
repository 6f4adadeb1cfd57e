"""The command line of ``python -m benchmarks gpu``."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu import runner
from benchmarks.gpu.stages import NAMES, STAGES

RESULTS = Path(__file__).parents[1] / "results" / "gpu" / "stages"


def main(arguments: Sequence[str]) -> int:
    """Run stages; returns the exit status: 1 if one failed, 2 if there is no CUDA device."""
    limits = ", ".join(f"{stage.name} ({stage.seconds} s)" for stage in STAGES)
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=f"Stages: {limits}.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="all where none is named")
    parser.add_argument("--reduced", action="store_true", help="small sizes, on a CPU too; nothing is judged by time")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"for the results; {RESULTS}, or none with --reduced")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.stages) - set(NAMES)):
        parser.error(f"{', '.join(unknown)}: allowed: {', '.join(NAMES)}")
    if not torch.cuda.is_available() and not given.reduced:
        print("There is no CUDA device here: --reduced runs the same stages at a small size on a CPU.", file=sys.stderr)
        return 2
    if given.out is None and given.reduced:
        with tempfile.TemporaryDirectory() as directory:
            return runner.run(given.stages, Path(directory), reduced=True)
    directory = given.out or RESULTS
    status = runner.run(given.stages, directory, reduced=given.reduced)
    print(f"results: {directory}")
    return status
