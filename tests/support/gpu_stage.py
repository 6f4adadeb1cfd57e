"""A stage of ``python -m benchmarks gpu`` that does what the environment says."""

import os
import signal
import subprocess
import time

from benchmarks.gpu.progress import Skipped, keep


def run(reduced: bool) -> dict:
    """Keeps a figure, and then passes, fails, raises, skips, dies or hangs with a process that it has started."""
    keep(first=1)
    what = os.environ["STAGE"]
    if what == "raises":
        raise ValueError("out of luck")
    if what == "skips":
        raise Skipped("there is no such thing")
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        keep(started=subprocess.Popen(["sleep", "600"]).pid)
        time.sleep(600)
    return {"passed": what == "passes", "main": f"{what}, {'reduced' if reduced else 'full'}", "not_tested": ["a", "b"]}
