"""What health checks find in series of real runs, in series made by hand, and what it does about them.

The series in tests/series were recorded from runs of the shipped policy, one row per rollout and per validation.
"""

import csv
import json
import math

import pytest
import torch

from grpo_lightning import compose
from grpo_lightning.callbacks.health import HealthHistory, UnrecoverableRun, new_findings
from tests.support.composed import ROOT
from tests.support.running import small_run

HEALTHY = ("default", "cispo", "dapo", "dr_grpo", "gmpo", "gspo", "reinforce_pp", "rloo", "sapo")
"""python train.py, and algorithm=NAME steps=60."""
STAGED = {
    "hacked_length": ["hacking"],
    "learning_rate": ["learning_rate"],
    "cold": ["standstill"],
    "format_only": ["teaching", "standstill"],
}
"""Each with steps=60: reward=[accuracy,format,length] with length.weight=5 and target=26, optimizer.lr=4e-2,
rollout.temperature=0.1, reward=[format]. -> what is found, in this order."""
CONSTANT = (
    "reward.custom.function._target_=tests.support.rewards.same",
    "reward=[custom]",
    "callbacks.doctor.rollouts=3",
)


def examined(rows, *, outcome="accuracy", patience=10):
    """(rule, step) of all that is found in rows of metrics by name; a row with val/pass@1 alone is a validation."""
    history, found = HealthHistory(patience=patience), []
    for row in rows:
        if "val/pass@1" in row:
            history.add_validation(row["val/pass@1"])
            continue
        history.add(row, outcome)
        new = new_findings(history, found)
        found += [{"rule": rule.name, "step": history.count, "value": value} for rule, value in new]
    return found


def recorded(name):
    with (ROOT / "tests" / "series" / f"{name}.csv").open(encoding="utf-8") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return rows, "accuracy" if "reward/accuracy" in rows[1] else "format"


def test_shipped_algorithms_are_healthy():
    for name in HEALTHY:
        rows, outcome = recorded(name)
        assert len(rows) >= 60
        assert examined(rows, outcome=outcome) == [], name


def test_staged_failures_get_their_advice():
    for name, rules in STAGED.items():
        rows, outcome = recorded(name)
        found = examined(rows, outcome=outcome)
        assert [one["rule"] for one in found] == rules
        assert found[0]["step"] <= 10


GOOD = {
    **{"reward/total": 1.0, "reward/accuracy": 0.5, "reward/std": 0.3, "advantage/mean": 0.0, "advantage/std": 0.9},
    **{"group/mixed": 0.6, "group/all_right": 0.2, "optim/grad_norm": 0.5, "optim/skipped": 0.0},
    **{"policy/kl_divergence": 0.1, "policy/entropy": 0.4, "policy/clip_fraction": 0.02},
    **{"completion/length_mean": 40.0, "completion/truncated_fraction": 0.02},
}


def run(length=60, **later):
    """``length`` rollouts; of each name ``later`` has what it is from which rollout on, such as {11: 0.7}."""
    rows = []
    for step in range(1, length + 1):
        row = dict(GOOD)
        for name, values in later.items():
            full = next(key for key in GOOD if key.endswith(name))
            reached = [value for start, value in sorted(values.items()) if step >= start]
            row[full] = reached[-1] if reached else row[full]
        rows.append(row)
    return rows


RULES_BY_HAND = [
    # the mean of ten: nine of 0.02 and one of 1 are 0.118; eight and two 0.216; limits are 0.3 and 0.12
    (run(truncated_fraction={21: 0.119}), None),
    (run(truncated_fraction={21: 0.13}), ("truncation", 30)),
    (run(truncated_fraction={1: 0.28}), None),
    (run(truncated_fraction={1: 0.31}), ("truncation", 10)),
    # 40 tokens at first, 60 is half as much again; two of ten at 100 are 52, four 64
    (run(length_mean={21: 100.0}), ("length", 24)),
    (run(length_mean={21: 61.0}, accuracy={21: 0.7}), None),  # longer and better
    (run(mixed={21: 0.21}), None),
    (run(mixed={21: 0.1}), ("teaching", 29)),  # 8 of 10: (2 * .6 + 8 * .1) / 10 = .2; 9 of 10: .15
    (run(mixed={31: 0.1}, accuracy={21: 0.7}), None),  # learned what there was
    (run(entropy={21: 0.021}), None),
    (run(entropy={21: 0.019}), ("entropy", 30)),
    (run(entropy={21: 0.005}, all_right={21: 0.6}), ("entropy", 30)),
    (run(entropy={21: 0.005}, all_right={21: 0.6}, accuracy={11: 0.7}), None),
    (run(clip_fraction={21: 0.29}), None),
    (run(clip_fraction={21: 0.31}), ("clipping", 30)),
    (run(kl_divergence={1: 0.9}), None),  # large from the start, and steady
    (run(kl_divergence={21: 0.6}), ("kl", 29)),  # 9 of 10: .55, beside .1 before
    (run(grad_norm={30: 6.0, 33: 0.5}), None),
    (run(grad_norm={30: 6.0, 34: 0.5}), ("spikes", 33)),
    (run(grad_norm={11: 0.05, 40: 1.0, 44: 0.05}), None),  # usual in the beginning
    (run(skipped={30: 1.0, 31: 2.0, 32: 3.0, 40: 4.0}), ("spikes", 40)),
    # outcome .5, a tenth of max(.5, .5) below is .45; the mean of ten with five of .3 is .4, with three .44
    (run(accuracy={21: 0.3}, total={21: 1.1}), ("hacking", 23)),
    (run(accuracy={21: 0.3}), None),  # the total does not rise
    # a quarter of .5 is .125: five of .1 reach it, four of .1 and one of .5 are .18; KL above 2 needs half
    (run(accuracy={21: 0.1}, total={21: 0.5}), ("learning_rate", 25)),
    (run(accuracy={21: 0.2}, total={21: 0.5}), None),
    (run(accuracy={21: 0.2}, total={21: 0.5}, kl_divergence={1: 2.5}), ("learning_rate", 25)),
    (run(accuracy={21: 0.3}, total={21: 0.5}, kl_divergence={1: 2.5}), None),
]


def test_rules_find_what_they_say():
    for number, (rows, expected) in enumerate(RULES_BY_HAND):
        found = [(finding["rule"], finding["step"]) for finding in examined(rows)]
        assert found == ([expected] if expected else []), number


SIGNAL = {"advantage/std": 0.9, "advantage/mean": 1e-9, "reward/total": 0.5, "optim/grad_norm": 0.1}
EQUAL = {"advantage/std": 0.0, "advantage/mean": 0.0, "reward/std": 6e-8, "reward/total": 0.6, "optim/grad_norm": 0.02}
FLAT = SIGNAL | {"optim/grad_norm": 0.0}


def test_a_rollout_with_signal_starts_the_count_anew():
    for rollouts, expected in (
        ([EQUAL, EQUAL, SIGNAL, EQUAL, EQUAL], []),
        ([EQUAL, EQUAL, SIGNAL, EQUAL, EQUAL, EQUAL, SIGNAL, EQUAL, EQUAL, EQUAL], [("standstill", 6)]),
        ([EQUAL | {"optim/grad_norm": 0.0}] * 4, [("standstill", 3)]),
        ([FLAT, FLAT, EQUAL | {"optim/grad_norm": 0.0}, FLAT, FLAT], []),
        ([FLAT] * 8, [("no_gradient", 3)]),
        ([EQUAL | {"completion/truncated_fraction": 1.0}] * 4, [("all_truncated", 3)]),
        ([FLAT | {"completion/truncated_fraction": 1.0}] * 4, [("all_truncated", 3)]),  # they are masked
        ([EQUAL | {"completion/truncated_fraction": 0.9}] * 4, [("standstill", 3)]),
        ([EQUAL | {"advantage/mean": 0.1}] * 5, []),  # the same for all, and yet it has signal
        ([EQUAL | {"reward/std": 0.1}] * 5, []),  # the tokens that would have signal are masked
    ):
        assert [(one["rule"], one["step"]) for one in examined(rollouts, outcome=None, patience=3)] == expected


def test_a_falling_pass_at_1_is_hacking_only_where_the_reward_rises():
    def validated(total):
        rows = run(40, total={21: total})
        return [{"val/pass@1": 0.6}, *rows[:20], {"val/pass@1": 0.7}, *rows[20:], {"val/pass@1": 0.55}, rows[-1]]

    assert [one["rule"] for one in examined(validated(1.1))] == ["hacking"]
    assert examined(validated(0.95)) == []
    assert examined(validated(1.1)[:-2]) == []


def test_a_history_continues_from_its_state():
    rows = run(60, accuracy={21: 0.3}, total={21: 1.1})
    whole, parts = HealthHistory(patience=10), HealthHistory(patience=10)
    for row in rows:
        whole.add(row, "accuracy")
        parts.add(row, "accuracy")
        parts = HealthHistory(**json.loads(json.dumps(vars(parts))))
    assert parts == whole
    assert len(whole.first) == 10
    assert len(whole.recent) == 20


@pytest.mark.slow
def test_a_hopeless_run_is_ended_and_can_be_continued(tmp_path):
    with pytest.raises(UnrecoverableRun, match=r"step 3: in each of the last 3 rollouts .*; what helps: a reward"):
        small_run(tmp_path, *CONSTANT, "steps=7", "validation.every=7", "callbacks.doctor.stop=true")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 3)
    assert summary["error"].startswith("step 3: in each of the last 3 rollouts")
    assert not (tmp_path / "export").exists()
    health = (tmp_path / "health.json").read_text()
    [finding] = json.loads(health)["findings"]
    assert (finding["rule"], finding["step"], finding["hopeless"]) == ("standstill", 3, True)
    assert math.isclose(finding["value"], 1.0)

    small_run(tmp_path, *CONSTANT, "steps=7", "validation.every=7", "checkpoint=last")
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    assert (tmp_path / "health.json").read_text() == health  # said once in a run, whatever its restarts


@pytest.mark.slow
def test_completions_that_only_their_length_can_end_are_not_called_truncated(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8)

        def forward(self, ids):
            return self.head(self.embedding(ids))

    words = ("steps=12", "data.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=4", "trainer=cpu")
    reward, rows = (lambda completions, completion_ids: [ids[0] / 8 for ids in completion_ids]), [[1, 2], [3]]
    run = compose(*words, policy=Model(), reward=reward, data=rows, run_dir=tmp_path).fit()
    assert run.metrics["completion/truncated_fraction"] == 1
    assert "truncat" not in (tmp_path / "health.json").read_text()
