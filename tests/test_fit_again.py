"""A program calls ``fit()`` of a run once more: after it has finished, after an error, after Ctrl-C."""

import csv
import json
import signal

import pytest
import torch

import grpo_lightning as grpo
from grpo_lightning.distributed.signals import Preempted
from tests.kills import difference
from tests.support.running import SMALL
from tests.test_composition import ROWS, letters, same, weights
from tests.test_damaged import contents

AGAIN = [
    *(word for word in SMALL if not word.startswith(("reward", "steps", "data.train", "validation"))),
    "steps=6",
    "data.validation_size=4",
    "validation.every=3",
    "optimizer.lr=0.01",
]


class Failing:
    """A reward that raises when it is called for the ``bad``-th time, once; or Ctrl-C is pressed at the -``bad``-th."""

    def __init__(self, bad=0):
        self.calls, self.bad = 0, bad

    def __call__(self, completions, **_):
        self.calls += 1
        if self.calls == self.bad:
            raise RuntimeError("the network is away")
        if self.calls == -self.bad:
            signal.raise_signal(signal.SIGINT)
        return letters(completions)


def logged_of(directory):
    """The rows of metrics.csv, of which what a clock measures is left out, and the bytes of all other logs."""
    with (directory / "csv" / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in csv.DictReader(file)]
    return rows, {path.name: path.read_bytes() for path in (directory / "tensorboard").iterdir()}


@pytest.mark.slow
def test_a_run_that_has_finished_is_not_fitted_again(tmp_path):
    run = grpo.compose(*AGAIN, "logger=[csv,tensorboard]", run_dir=tmp_path, reward=letters, data=ROWS).fit()
    files = contents(tmp_path)
    metrics = dict(run.metrics)
    assert run.fit() is run
    assert contents(tmp_path) == files
    assert run.metrics == metrics
    assert len(logged_of(tmp_path)[0]) == 7


@pytest.fixture
def heard():
    """Ctrl-C is heard, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(("bad", "done"), [(8, 5), (-3, 1)])
def test_a_run_that_failed_is_fitted_again(bad, done, tmp_path):
    """A call for each step, and for the validations before the first and after the third; Ctrl-C if negative."""
    more = ("logger=[csv,tensorboard]",)
    whole = grpo.compose(*AGAIN, *more, run_dir=tmp_path / "whole", reward=Failing(), data=ROWS).fit()
    failing = Failing(bad)
    run = grpo.compose(*AGAIN, *more, run_dir=tmp_path / "run", reward=failing, data=ROWS)
    with pytest.raises(
        (RuntimeError, ValueError, Preempted),
        match="the network is away" if bad > 0 else f"^interrupted: step {done} is saved",
    ):
        run.fit()
    made, seconds = run.module.completed_steps, json.loads((tmp_path / "run" / "summary.json").read_text())["seconds"]
    run.fit()
    assert made == done
    assert same(weights(run.module), weights(whole.module))
    rows, events = logged_of(tmp_path / "run")
    assert rows == logged_of(tmp_path / "whole")[0]
    assert sum(len(content) for content in events.values()) > 10_000
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 6)
    assert summary["seconds"] > seconds
    ended = [torch.load(tmp_path / n / "checkpoints" / "last.ckpt", weights_only=True) for n in ("whole", "run")]
    assert len(ended[0]["optimizer_states"][0]["state"]) > 5
    assert difference(ended[0]["optimizer_states"], ended[1]["optimizer_states"]) is None
