"""The benchmarks start, and say why where they do not."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import compare, growth, head, learning, memory, report
from benchmarks.__main__ import PARTS
from benchmarks.machine import described
from benchmarks.process import Worker
from benchmarks.timing import quartiles, ratio
from tests.support.composed import ROOT

BENCHMARKS = Path(ROOT) / "benchmarks"


@pytest.mark.slow
def test_a_worker_that_ends_says_why_and_one_not_asked_any_more_is_ended():
    steps = 2
    why = r"^tests\.dying ended with 1: x+(.|\n)*RuntimeError: out of luck$"
    with Worker("tests.dying", str(steps)) as worker:
        assert [worker.step() for _ in range(steps)] == [{"seconds": 1.0}] * steps
        with pytest.raises(RuntimeError, match=why) as caught:
            worker.step()
    assert len(str(caught.value)) < 2100
    with pytest.raises(RuntimeError, match="out of luck"), Worker("tests.dying", "0") as worker:
        worker.output()
    with pytest.raises(ZeroDivisionError), Worker("tests.dying", "1") as worker:
        raise ZeroDivisionError
    assert worker._process.returncode is not None


SETTING = compare.CASES[0]
MEASURED = {
    "compare": lambda: compare.measured(SETTING, warmup=0, steps=1),
    "growth": lambda: growth.measured("theirs", [SETTING], warmup=0, steps=1),
    "head": lambda: head.peak("naive", 8, 100),
    "learning": lambda: learning.run(seeds=[0], styles=["same"], steps=1),
    "memory": lambda: memory.apart("small"),
}


def test_every_benchmark_passes_on_why_a_process_ended(tmp_path, monkeypatch):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    for measured in MEASURED.values():
        with pytest.raises(RuntimeError, match=r"benchmarks\.\w+ ended with 3: out of luck"):
            measured()


def test_one_step_has_quartiles():
    assert ratio([4.0], [2.0]) == {"ratio": 2.0, "quartiles": [2.0, 2.0], "steps": 1}
    assert quartiles([1.0, 2.0, 3.0]) == (1.0, 2.0, 3.0)


def test_the_readme_has_the_stored_figures(tmp_path):
    shutil.copy(BENCHMARKS / "README.md", tmp_path)
    shutil.copytree(BENCHMARKS / "results", tmp_path / "results")
    report.run(tmp_path)
    assert (tmp_path / "README.md").read_text() == (BENCHMARKS / "README.md").read_text()


def contents() -> dict[Path, str]:
    files = (path for path in BENCHMARKS.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_every_benchmark_takes_a_step_and_stores_nothing():
    before = contents()
    command = [sys.executable, "-m", "benchmarks", "smoke"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    ran = [line.split()[0] for line in done.stdout.splitlines() if " ran in " in line]
    assert ran == [*PARTS, "sizes", "report"]
    assert contents() == before


def test_cases_of_several_machines_are_not_mixed(tmp_path, monkeypatch, capsys):
    here = described()
    file = tmp_path / here["kind"] / "compare.json"
    file.parent.mkdir()
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(compare, "run", lambda names: {"base": {"seconds": 1.0}})
    monkeypatch.setattr("sys.argv", ["benchmarks", "compare:base"])
    monkeypatch.setattr("os.environ", dict(os.environ))  # it sets threads, for itself and what it starts
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    stored = {"machine": here | {"torch": "1.0"}, "other": {"seconds": 2.0}}
    file.write_text(json.dumps(stored))
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert "compare.json were measured with torch 1.0; allowed is compare, all of it" in capsys.readouterr().err
    assert json.loads(file.read_text()) == stored
    file.write_text(json.dumps(stored | {"machine": here}))
    command.main()
    assert json.loads(file.read_text()) == {"machine": here, "other": {"seconds": 2.0}, "base": {"seconds": 1.0}}
    assert [path.name for path in file.parent.iterdir()] == ["compare.json"]
