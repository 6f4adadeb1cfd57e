"""What every metric was over a run, also one that was interrupted, and where summary.json says so."""

import json
from datetime import datetime

import pytest
import torch

from grpo_lightning.module.base import MetricHistory
from tests.support.running import small_run

MEASURED = ("time/", "perf/")
"""What is not the same when it is done again."""


def summary(directory):
    return json.loads((directory / "summary.json").read_text())


def same(values):
    return {name: course for name, course in values.items() if not name.startswith(MEASURED)}


def history(pairs):
    pairs = list(pairs)
    found = MetricHistory(pairs[0][1], pairs[0][0])
    for step, value in pairs:
        found.add(value, step)
    return found


def test_the_history_of_a_metric_and_the_first_step_of_the_best_value_of_a_validation():
    found = history([(1, 0.5), (2, 2.0), (3, -1.0), (4, 0.25)]).summary(with_steps=False)
    # (0.5 + 2 - 1 + 0.25) / 4 = 1.75 / 4
    assert found == {"first": 0.5, "last": 0.25, "mean": 0.4375, "min": -1.0, "max": 2.0}
    assert history([(0, 0.25), (20, 0.75), (40, 0.75), (50, 0.5)]).summary(with_steps=True) == {
        **{"first": 0.25, "last": 0.5, "mean": 0.5625, "min": 0.25, "max": 0.75},  # 2.25 / 4
        **{"best": 0.75, "best_step": 20, "first_step": 0, "last_step": 50},
    }


@pytest.mark.slow
def test_a_continued_run_has_the_values_of_an_unbroken_one(tmp_path):
    own = ("steps=5", "validation.every=2", "schedule=constant", "callbacks.checkpoint.every=1")
    module = small_run(tmp_path / "whole", *own)
    told = summary(tmp_path / "whole")
    assert [*told] == ["metrics", "values", "steps", "seconds", "started", "choices", "overrides", "status", "error"]
    assert told["values"] == json.loads(json.dumps(module.summary()))
    assert {name: course["last"] for name, course in told["values"].items()} == told["metrics"]
    assert "best" not in told["values"]["reward/total"]
    small_run(tmp_path / "parts", *own, "+callbacks.stop={_target_: tests.test_callbacks.Stop, step: 3}")
    assert datetime.fromisoformat(summary(tmp_path / "parts")["started"]).utcoffset().total_seconds() == 0
    (tmp_path / "parts" / "summary.json").unlink()  # as if the computer had been switched off
    last = torch.load(tmp_path / "parts" / "checkpoints" / "last.ckpt", weights_only=True)
    last["run"]["started"] = began = "2020-02-29T23:59:59+00:00"
    torch.save(last, tmp_path / "parts" / "checkpoints" / "last.ckpt")
    assert last["step"]["values"]["val/pass@1"]["last_step"] == 2
    small_run(tmp_path / "parts", *own, "checkpoint=last")
    whole, parts = summary(tmp_path / "whole")["values"], summary(tmp_path / "parts")["values"]
    assert len(same(whole)) > 25
    assert same(parts) == same(whole)
    assert [whole["val/pass@1"][name] for name in ("first_step", "last_step")] == [0, 5]
    last = torch.load(tmp_path / "parts" / "checkpoints" / "last.ckpt", weights_only=True)
    assert summary(tmp_path / "parts")["started"] == last["run"]["started"] == began
