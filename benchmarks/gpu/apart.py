"""One stage in this process: python -m benchmarks.gpu.apart MODULE FILE SECONDS full|reduced."""

import faulthandler
import sys
import traceback
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.progress import Skipped, keep, reported


def main(module: str, path: str, seconds: str, size: str) -> int:
    """Run the stage of a module, which is passed, failed or skipped then; returns the exit status."""
    faulthandler.dump_traceback_later(max(1.0, float(seconds) - 2))  # where it was when its time was over
    about = {"stage": module.rpartition(".")[2], "reduced": size == "reduced", "outcome": "started"}
    try:
        with reported(Path(path), float(seconds), **about):
            return _run(module, is_reduced=size == "reduced")
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run(module: str, *, is_reduced: bool) -> int:
    try:
        from benchmarks.machine import described  # here, so that it is told if torch cannot be loaded

        keep(machine=described())
        figures = import_module(module).run(is_reduced)
        keep(**figures, outcome="passed" if figures["passed"] else "failed")
        return 0 if figures["passed"] else 1
    except Skipped as reason:
        keep(outcome="skipped", reason=str(reason))
        return 0
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"[:2000]
        keep(outcome="failed", reason=reason, traceback=traceback.format_exc()[-6000:])
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
