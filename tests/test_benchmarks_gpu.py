"""The stages of ``python -m benchmarks gpu``: how they are run and told, and what they would find."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from benchmarks.gpu import apart, decode, equality, flex, mismatch, progress, runner, synchronisation
from benchmarks.gpu.stages import NAMES, Stage
from grpo_lightning.batch import Sampled
from grpo_lightning.memory import Shape
from grpo_lightning.transformer.attention import Stream
from grpo_lightning.transformer.head import Head
from tests.support.composed import ROOT
from tests.test_attention import masked
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


def test_a_stage_that_cannot_be_loaded_fails(tmp_path) -> None:
    path = tmp_path / "found.json"
    assert apart.main("benchmarks.gpu.nothing", str(path), "60", "full") == 1
    assert json.loads(path.read_text())["reason"].startswith("ModuleNotFoundError: No module named")


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
    whole, logits = equality.head(1000, entropy=True), Head.logits
    assert whole < 1e-5
    assert equality.head(5000, entropy=False) < 1e-5
    monkeypatch.setattr(Head, "logits", lambda self, *given: logits(self, *given) * 1.001)
    assert equality.head(1000, entropy=True) > 1e-4
    assert equality.head(5000, entropy=False) > 1e-4
    with pytest.raises(RuntimeError, match="gemma: prompts are not shared"):
        equality.exact("gemma")


def test_layouts_have_all_tokens() -> None:
    # 100: a prompt of 12, of the other 88 shares of 1/36 to 8/36: 2 4 7 9 12 14 17 19 are 84, and 4 more to the first
    assert flex.layout(100) == ((12, (6, 4, 7, 9, 12, 14, 17, 19)),)
    for size in (*flex.SIZES, *flex.OTHERS):
        assert sum(prompt + sum(lengths) for prompt, lengths in flex.layout(size)) == size
    assert [len(flex.layout(size)) for size in (4096, 4097, 16_384)] == [1, 2, 4]


def test_attention_by_row_is_a_masked_softmax() -> None:
    groups = flex.layout(60)
    query, key, value, _ = (tensor.detach().cpu() for tensor in flex.inputs(60, torch.float32))
    assert_close(flex.by_row(query, key, value, groups), masked(query, key, value, groups, 128**-0.5))


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


def test_seconds_of_a_token_are_a_difference(monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(decode, "seconds", lambda action, **_: (action(), 7.0 + 0.5 * asked[-1])[1])
    assert decode.per_token(asked.append, short=4, long=12) == 0.5
    assert asked == [12, 4, 12]


class Uttered:
    """A policy whose sampler is wrong about one token in two, by ``gap`` nats."""

    share_prompts = True

    def __init__(self, gap: float) -> None:
        ids, real = torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)
        stated = torch.tensor([[-1.0, -2.0]])
        self._rows = Sampled(ids, real, real[:, :2], stated, torch.tensor([[0.5, 1.5]]), ("",), (True,))
        self._found = stated + torch.tensor([[0.0, gap]])

    def sample(self, *_, **__) -> Sampled:
        return self._rows

    def microbatches(self, rows, tokens) -> list[torch.Tensor]:
        return [torch.tensor([0])]

    def logprobs(self, rows, *, temperature) -> torch.Tensor:
        return self._found


def test_a_mismatch_by_hand() -> None:
    found = mismatch.measured(Uttered(-0.1), [], group_size=1, length=2)
    # (0 + (e^-0.1 - 1 + 0.1)) / 2 = 0.00483742 / 2
    expected = {"mean": 0.05, "max": 0.1, "k3": 0.00241871, "tokens": 2.0, "entropy": 1.0, "shared": 1.0}
    assert found == pytest.approx(expected | {"rounding": 0.0}, rel=1e-5)


def test_a_mismatch_beyond_its_bound_does_not_pass(monkeypatch) -> None:
    for gap, passes in ((0.018, True), (0.022, False)):
        row = mismatch.measured(Uttered(gap), [], group_size=1, length=2)
        monkeypatch.setattr(mismatch, "measured", lambda *_, row=row, **__: row)
        assert mismatch.run(True)["passed"] is passes
        monkeypatch.undo()


def test_without_a_gpu_no_graph_is_said_to_be_tested() -> None:
    found = synchronisation.run(True)
    if not torch.cuda.is_available():
        assert found["not_tested"] == ["no CUDA graphs on a CPU"]
    assert found["passed"]


class Steps:
    """Stands for the sampler's: recorded by the first call of a version, which makes one step of it."""

    def __init__(self, done: list[str]) -> None:
        self._done, self._graph, self._version = done, None, None

    def _step(self) -> None:
        self._done.append("step")

    def __call__(self, times: int, version: int) -> None:
        self._graph, self._version = "recorded", version
        self._done += ["replayed"] * times


@pytest.mark.parametrize("graph", [True, False])
def test_token_steps_are_watched(graph, monkeypatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", done.append)
    steps, plain = Steps(done), Steps.__call__
    with synchronisation.watched(Steps, graph=graph) as counts:
        for times, version in ((3, 1), (2, 1), (1, 2)):
            steps(times, version)
    assert Steps.__call__ is plain
    if graph:  # only the second call finds a recording of its version
        assert counts == [2]
        assert done == [*["replayed"] * 3, "error", *["replayed"] * 2, "default", "replayed"]
    else:
        assert counts == [3, 2, 1]
        assert done == [word for n in (3, 2, 1) for word in ("error", *["step"] * n, "default")]


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
