"""A script for tests: some runs after one another in each of several processes, recorded step by step.

python -m tests.support.processes DIRECTORY TRAINER RUNS, with RUNS a JSON object: name -> overrides.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

from lightning import Callback

from grpo_lightning.run import Run
from tests.support.composed import ROOT, build, composed
from tests.support.prepared import Process


class Record(Callback):
    """One line per step: what was sampled, and every metric; ``double`` computes in float64."""

    def __init__(self, path: str, *, double: bool = False) -> None:
        self.path = Path(path)
        self.double = double

    def setup(self, trainer, module, stage):
        if self.double:
            module.double()

    def on_train_batch_end(self, trainer, module, outputs, *_):
        if trainer.is_global_zero:
            judged = outputs["scored"]
            rewards = judged.rewards["total"].view(len(judged.prompts), -1)
            line = {
                "texts": list(judged.sampled.texts),
                "dead": int((rewards == rewards[:, :1]).all(-1).sum()),
                "metrics": module.metrics,
            }
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def start(processes: int, directory: Path, trainer: str, runs: dict[str, list[str]], *, port: int | None = None):
    """Start the script in as many processes, as torchrun does; returns them."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        several = {
            **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes},
            **{"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"},
        }
        given = os.environ | {"OMP_NUM_THREADS": "1"}
        if processes > 1:
            given |= {name: str(value) for name, value in several.items()}
        arguments = ["-m", "tests.support.processes", str(directory), trainer, json.dumps(runs)]
        started.append(Process(arguments, cwd=ROOT, env=given, together=True))
    return started


def finish(started, seconds: float = 300) -> list[str]:
    """What the processes printed, once all have ended well."""
    printed = [process.communicate(timeout=seconds)[0] for process in started]
    for process, text in zip(started, printed, strict=True):
        assert process.returncode == 0, text[-4000:]
    return printed


def wait_for(condition, process=None, seconds=300):
    """Wait until something is true, while a process runs."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        assert process is None or process.poll() is None
        time.sleep(0.2)


def running(mark: str) -> list[str]:
    """The numbers of processes that have a word in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if mark.encode() in words:
            found.append(path.parent.name)
    return found


def main(directory: Path, trainer: str, runs: dict[str, list[str]]) -> None:
    for name, overrides in runs.items():
        place = directory / name
        given = [
            f"trainer={trainer}",
            "trainer.accelerator=cpu",
            f"trainer.devices={os.environ.get('WORLD_SIZE', 1)}",
            f"run_dir={place}",
            "+callbacks.record._target_=tests.support.processes.Record",
            f"+callbacks.record.path={directory / (name + '.jsonl')}",
            *overrides,
        ]
        Run(composed(*given), build(*given), overrides=given, directory_given=True).execute()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
