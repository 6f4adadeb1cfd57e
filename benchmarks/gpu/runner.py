"""All stages one after another, each in a process of its own with a limit on its time."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.progress import write
from benchmarks.gpu.stages import NAMES, REDUCED_SECONDS, STAGES, Stage
from benchmarks.machine import threads

ROOT = Path(__file__).parents[2]
ALL = "all.json"
"""The file that holds what all others do, by stage."""
_GRACE = 3.0
"""Seconds between asking a process to end and ending it."""


def run(names: Sequence[str], directory: Path, *, reduced: bool) -> int:
    """Run the stages of these names, in their order, and tell of each in a line.

    Args:
        names: Some stages; none are all.
        directory: Where the results go: <stage>.json as it has them, and all.json after every stage. Results of other
            stages that are there are kept where some stages are named.
        reduced: Whether sizes are small, and nothing is judged by its time.

    Returns:
        1 if a stage failed or its time was over, else 0.
    """
    directory.mkdir(parents=True, exist_ok=True)
    every = directory / ALL
    found = _read(every) if names else {}
    chosen = [stage for stage in STAGES if stage.name in (names or NAMES)]
    for stage in chosen:
        record = found[stage.name] = one(stage, directory / f"{stage.name}.json", reduced=reduced)
        write(every, {name: found[name] for name in NAMES if name in found})
        print(line(stage.name, record), flush=True)
    records = {stage.name: found[stage.name] for stage in chosen}
    for name, record in records.items():
        for text in record.get("not_tested", []):
            print(f"not tested: {name}: {text}", flush=True)
        if record["outcome"] in ("skipped", "out of time"):
            print(f"not tested: {name}: {record['reason'].splitlines()[0]}", flush=True)
    bad = [name for name, record in records.items() if record["outcome"] in ("failed", "out of time")]
    print(f"{len(records) - len(bad)} of {len(records)} without a fault", flush=True)
    return 1 if bad else 0


def one(stage: Stage, path: Path, *, reduced: bool) -> dict[str, Any]:
    """Run a stage, end it when its time is over, and complete its file by how it ended and its seconds."""
    seconds = REDUCED_SECONDS if reduced else stage.seconds
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.apart", f"{stage.package}.{stage.name}", str(path), str(seconds)]
    own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    own["OMP_NUM_THREADS"] = "1" if reduced else str(threads())
    started = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*command, "reduced" if reduced else "full"],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | own,
            start_new_session=True,  # what it starts is ended with it
        )
        try:
            process.wait(timeout=seconds)
            is_late = False
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            end(process)
        said.seek(max(0, said.seek(0, os.SEEK_END) - 4000))
        text = said.read().decode(errors="replace").strip()
    record = {"stage": stage.name, "reduced": reduced, "outcome": "started", **_read(path)}
    if is_late:
        record |= {"outcome": "out of time", "reason": f"not done after {seconds} s", "said": text}
    elif record["outcome"] == "started":
        record |= {"outcome": "failed", "reason": f"ended with {process.returncode}: {text[-1000:]}", "said": text}
    elif record["outcome"] == "failed":
        record["said"] = text
    record["seconds"] = round(time.perf_counter() - started, 1)
    write(path, record)
    return record


def end(process: subprocess.Popen) -> None:
    """End a process with all that it has started."""
    for kind, wait in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
        if process.poll() is None:
            _send(process.pid, kind)
            try:
                process.wait(timeout=wait)
            except subprocess.TimeoutExpired:
                continue
    _send(process.pid, signal.SIGKILL)  # what outlived it


def _send(group: int, kind: int) -> None:
    try:
        os.killpg(group, kind)
    except (ProcessLookupError, PermissionError):  # nothing is left of it
        return


def line(name: str, record: dict[str, Any]) -> str:
    """What is told of a stage: how it ended, its seconds, and its main figure or the reason."""
    told = record.get("main") or record.get("reason", "did not pass").strip().splitlines()[0][:200]
    if record.get("main") and record["outcome"] in ("failed", "out of time") and record.get("reason"):
        told += f" ({record['reason'].strip().splitlines()[0][:200]})"
    return f"{name:16} {record['outcome']:12} {record['seconds']:6.1f} s  {told}"


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
