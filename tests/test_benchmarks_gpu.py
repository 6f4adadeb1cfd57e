"""The stages of ``python -m benchmarks gpu``: how they are run and told, and what they would find."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import apart, decode, equality, flex, progress, runner
from benchmarks.gpu.stages import NAMES, Stage
from grpo_lightning.memory import Shape
from grpo_lightning.transformer.attention import Stream
from grpo_lightning.transformer.lm_head import LMHead
from tests.support.composed import ROOT
from tests.test_benchmarks import contents


def staged(what: str, seconds: int = 60) -> Stage:
    os.environ["STAGE"] = what
    return Stage("gpu_stage", seconds, "-", package="tests.support")


@pytest.fixture(autouse=True)
def _environment(monkeypatch) -> None:
    monkeypatch.setenv("STAGE", "")


@pytest.mark.parametrize(
    "what, status, expected",
    [
        ("passes", 0, {"outcome": "passed", "main": "passes, reduced"}),
        ("fails", 1, {"outcome": "failed", "main": "fails, reduced"}),
        ("raises", 1, {"outcome": "failed", "reason": "ValueError: out of luck"}),
        ("skips", 0, {"outcome": "skipped", "reason": "there is no such thing"}),
    ],
)
def test_how_a_stage_ends(what, status, expected, tmp_path) -> None:
    staged(what)
    path = tmp_path / "found.json"
    assert apart.main("tests.support.gpu_stage", str(path), "60", "reduced") == status
    found = json.loads(path.read_text())
    assert found | expected == found
    assert (found["stage"], found["reduced"], found["first"]) == ("gpu_stage", True, 1)
    assert [one.name for one in tmp_path.iterdir()] == ["found.json"]
    progress.keep(second=2)  # there is no stage any more
    assert progress.seconds_left() == float("inf")
    assert json.loads(path.read_text()) == found


@pytest.mark.slow
def test_what_a_stage_found_before_it_died_is_kept(tmp_path) -> None:
    found = runner.one(staged("dies"), tmp_path / "found.json", reduced=False)
    assert (found["outcome"], found["first"], found["reduced"]) == ("failed", 1, False)
    assert found["reason"].startswith("ended with -9: ")
    assert json.loads((tmp_path / "found.json").read_text()) == found


@pytest.mark.slow
def test_a_stage_that_hangs_is_ended_with_all_that_it_started(tmp_path) -> None:
    found = runner.one(staged("hangs", seconds=20), tmp_path / "found.json", reduced=False)
    assert (found["outcome"], found["reason"], found["first"]) == ("out of time", "not done after 20 s", 1)
    assert 20 <= found["seconds"] < 40
    assert "gpu_stage.py" in found["said"]  # where it was
    status = Path(f"/proc/{found['started']}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_a_stage_that_fails_or_is_out_of_time_fails_the_command(tmp_path, monkeypatch) -> None:
    ends = {
        "machine": {"outcome": "passed", "main": "7 GB/s", "not_tested": ["heat"]},
        "flex": {"outcome": "skipped", "reason": "no kernel"},
        "decode": {"outcome": "out of time", "reason": "not done after 130 s", "main": "B 64: 2 ms"},
        "head": {"outcome": "failed", "reason": "RuntimeError: no\nmore"},
    }
    monkeypatch.setattr(runner, "one", lambda stage, path, *, reduced: ends[stage.name] | {"seconds": 1.25})
    assert runner.run(["head", "machine"], tmp_path, reduced=True) == 1
    assert runner.run(["flex"], tmp_path, reduced=True) == 0
    assert runner.run(["decode"], tmp_path, reduced=True) == 1
    assert list(json.loads((tmp_path / "all.json").read_text())) == ["machine", "flex", "decode", "head"]


def test_errors_beyond_their_bounds_do_not_pass(monkeypatch) -> None:
    exact = {"logprobs": 9e-5, "gradient": 1e-6, "other_rows": 0.0}
    half = {
        "logprobs": 0.009,
        "entropies": 0.001,
        "sampler_logprobs": 0.002,
        "gradient": 0.014,
        "plain_gradient": 0.01,
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    good = {"a": exact}, {"a": half}
    assert equality.verdict(9e-5, *good)["passed"]
    assert not equality.verdict(2e-4, *good)["passed"]
    for wrong in ({"logprobs": 2e-4}, {"gradient": 2e-4}, {"other_rows": 0.05}):
        assert not equality.verdict(0.0, {"a": exact, "b": exact | wrong}, good[1])["passed"]
    for wrong in ({"logprobs": 0.011}, {"entropies": 0.011}, {"sampler_logprobs": 0.011}, {"gradient": 0.016}):
        assert not equality.verdict(0.0, good[0], {"a": half, "b": half | wrong})["passed"]


def test_a_head_that_errs_is_noticed(monkeypatch) -> None:
    whole, logits = equality.head(1000, entropy=True), LMHead.logits
    assert whole < 1e-5
    assert equality.head(5000, entropy=False) < 1e-5
    monkeypatch.setattr(LMHead, "logits", lambda self, *given: logits(self, *given) * 1.001)
    assert equality.head(1000, entropy=True) > 1e-4
    assert equality.head(5000, entropy=False) > 1e-4
    with pytest.raises(RuntimeError, match="gemma: prompts are not shared"):
        equality.exact("gemma")


def test_an_attention_that_errs_is_noticed(monkeypatch) -> None:
    assert max(flex.errors(60, torch.float32).values()) < 1e-5
    attend = Stream.attend
    monkeypatch.setattr(Stream, "attend", lambda *given: attend(*given[:-1], 1.05 * given[-1]))
    assert min(flex.errors(60, torch.float32).values()) > 1e-3


def test_the_limit_of_a_token_step_by_hand() -> None:
    # 16-bit weights 2 (100 + 10 * 4) = 280; 16 rows in 2 groups: 2 * 3 + 16 * 5 = 86 tokens, of each keys and values
    # in 2 bytes, 2 * 2 * 6 * 7 = 168: 14448. 14728 bytes at 1000 a second.
    sizes = {"trained": 0, "frozen": 0, "body": 100, "hidden": 4, "intermediate": 0}
    shape = Shape(**sizes, vocabulary=10, keys=6, layers=7)
    assert decode.limit(shape, 16, prompt=3, own=5.0, rate=1000.0) == pytest.approx(14.728)


@pytest.mark.slow
def test_every_stage_runs_at_reduced_size_and_stores_nothing() -> None:
    before = contents()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", "--reduced"],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    told = [line.split()[:2] for line in done.stdout.splitlines() if not line.startswith("not tested: ")]
    assert told.pop() == ["9", "of"]
    assert told == [[name, "passed"] for name in NAMES]
    assert "not tested: synchronisation: no CUDA graphs on a CPU" in done.stdout or torch.cuda.is_available()
    assert contents() == before
