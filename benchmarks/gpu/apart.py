"""One stage in this process: python -m benchmarks.gpu.apart STAGE FILE SECONDS full|reduced."""

import faulthandler
import sys
import traceback
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.progress import Skipped, begin, keep


def main(name: str, path: str, seconds: str, size: str) -> int:
    """Run a stage, which is passed, failed or skipped then; returns the exit status."""
    faulthandler.dump_traceback_later(max(1.0, float(seconds) - 2))  # where it was when its time was over
    begin(Path(path), float(seconds), stage=name, reduced=size == "reduced", outcome="started")
    try:
        from benchmarks.machine import described

        keep(machine=described())
        figures = import_module(f"benchmarks.gpu.{name}").run(size == "reduced")
        keep(**figures, outcome="passed" if figures["passed"] else "failed")
        return 0 if figures["passed"] else 1
    except Skipped as reason:
        keep(outcome="skipped", reason=str(reason))
        return 0
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        keep(
            outcome="failed", reason=f"{type(error).__name__}: {error}"[:2000], traceback=traceback.format_exc()[-6000:]
        )
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
