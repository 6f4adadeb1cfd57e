"""Every system of every benchmark for one small step, to see that it starts: no figure means anything or is stored."""

import contextlib
import io
import json
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import budget, compare, equality, growth, head, learning, limit, memory, report, rollout
from benchmarks.machine import described
from benchmarks.setting import Setting
from benchmarks.shapes import QWEN

TINY = Setting("base", prompt=16, cap=8, mean=4, group=4, prompts=2, hidden=64, layers=1, vocabulary=512)
MEMORY = ("states",)


def sizes() -> None:
    """The table of models and GPUs, a line for each size."""
    lines = memory.sizes().splitlines()
    if len(lines) != 2 + len(QWEN):
        raise RuntimeError(f"sizes has {len(lines)} lines")


def rendered(found: dict[str, Any]) -> None:
    """The tables and pictures of the stored figures and then of these ones, in a directory of their own."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        shutil.copy(report.HERE / "README.md", copy)
        shutil.copytree(report.HERE / "results", copy / "results")
        report.run(copy)
        machine = described()
        results = copy / "results" / machine["kind"]
        results.mkdir(exist_ok=True)
        for part, figures in found.items():
            (results / f"{part}.json").write_text(json.dumps({"machine": machine, **figures}))
        report.run(copy)


def run() -> None:
    """A line per benchmark with its seconds; where some fail, why they did, and an exit status other than 0."""
    os.environ["OMP_NUM_THREADS"] = "1"  # what is this small is slower with more, the more so beside other processes
    torch.set_num_threads(1)
    one: dict[str, int] = {"warmup": 0, "steps": 1}
    found: dict[str, Any] = {}
    parts: dict[str, Callable[[], Any]] = {
        "equality": equality.run,
        "rollout": partial(rollout.run, cases=[TINY], **one),
        "head": partial(head.run, sizes=[64], timed=64, vocabulary=2048, **one),
        "limit": partial(limit.run, cases=[TINY], **one),
        "growth": partial(growth.run, axes={"K": [TINY]}, **one),
        "learning": partial(learning.run, seeds=[0], styles=["same"], steps=1),
        "compare": partial(compare.run, cases=[TINY], **one),
        "memory": partial(memory.run, MEMORY, setting="small", times=1),
        "budget": partial(budget.run, setting=replace(TINY, prompts=3, group=8), times=1),
        "sizes": sizes,
        "report": partial(rendered, found),
    }
    failed = []
    for name, part in parts.items():
        started, printed = time.perf_counter(), io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                figures = part()
            if figures is not None:
                found[name] = figures
            outcome = "ran"
        except (Exception, SystemExit):
            print(printed.getvalue() + traceback.format_exc(), flush=True)
            failed.append(name)
            outcome = "failed"
        print(f"{name:10} {outcome} in {time.perf_counter() - started:5.1f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
