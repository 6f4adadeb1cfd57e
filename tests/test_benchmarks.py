"""The benchmarks run, and say why where they do not."""

import os
import subprocess
import sys

import pytest

from benchmarks import head, memory
from benchmarks.gpu import GROUP, decode_limit
from benchmarks.measure import ratio
from benchmarks.process import Worker
from grpo_lightning.memory import Shape
from tests.support.composed import ROOT


@pytest.mark.slow
def test_a_worker_that_ends_says_why_and_one_that_is_left_is_ended():
    steps = 2
    why = r"^tests\.dying ended with 1: x+(.|\n)*RuntimeError: out of luck$"
    with Worker("tests.dying", str(steps)) as worker:
        assert [worker.step() for _ in range(steps)] == [{"seconds": 1.0}] * steps
        with pytest.raises(RuntimeError, match=why) as error:
            worker.step()
    assert len(str(error.value)) < 2100
    with pytest.raises(RuntimeError, match="out of luck"), Worker("tests.dying", "0") as worker:
        worker.result()
    with pytest.raises(ZeroDivisionError), Worker("tests.dying", "1") as worker:
        raise ZeroDivisionError
    assert worker._process.returncode is not None


def test_every_process_passes_on_why_it_ended(tmp_path, monkeypatch):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    for measured in (lambda: memory.apart("small"), lambda: head.result("benchmarks.head", "naive", "8", "100")):
        with pytest.raises(RuntimeError, match=r"benchmarks\.\w+ ended with 3: out of luck"):
            measured()


def test_ratios_of_neighbours():
    assert ratio([4.0], [2.0]) == {"ratio": 2.0, "quartiles": [2.0, 2.0], "steps": 1}
    found = ratio([2.0, 6.0, 3.0], [2.0, 3.0, 1.0])
    assert (found["ratio"], found["quartiles"]) == (2.0, [1.0, 3.0])


def test_the_limit_of_a_token_step_by_hand():
    # 16-bit weights 2 (100 + 10 * 4) = 280; 16 rows in 2 groups: 2 * 3 + 16 * 5 = 86 tokens, of each keys and values
    # in 2 bytes, 2 * 2 * 6 * 7 = 168: 14448. 14728 bytes at 1000 a second.
    assert GROUP == 8
    sizes = {"trained": 0, "frozen": 0, "body": 100, "hidden": 4, "intermediate": 0}
    shape = Shape(**sizes, vocabulary=10, keys=6, layers=7)
    assert decode_limit(shape, 16, prompt=3, own=5.0, rate=1000.0) == pytest.approx(14.728)


@pytest.mark.slow
def test_every_benchmark_takes_a_step_also_against_another_checkout(tmp_path):
    names = ["compare", "rollout", "head", "learning", "memory", "episodes", "gpu"]
    for words in (names, ["rollout", "--against", str(ROOT)]):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", *words, "--smoke", "--out", str(tmp_path / "figures.json")],
            cwd=ROOT,
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert (tmp_path / "figures.json").exists()
