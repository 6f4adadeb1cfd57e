"""What TensorBoard shows of runs, by its own answers: names, scalars, charts, settings, texts."""

import csv
import re
import shutil

import pytest
from lightning import Callback

from grpo_lightning.callbacks.tensorboard import CHARTS, chart_layout
from grpo_lightning.run import Run
from tests.support.board import Board
from tests.support.composed import build, composed
from tests.support.running import SMALL

SETTINGS = (
    *("steps=4", "validation.every=2", "callbacks.checkpoint.every=1", "callbacks.samples.every=1"),
    "logger=[tensorboard,csv]",
)
FIRST, SECOND = "group_size=4,seed=0", "group_size=4,seed=1"


class Photograph(Callback):
    """Copies the run's directory within a step, as it would be found after ``kill -9``."""

    def __init__(self, source: str, target: str, step: int) -> None:
        self.source = source
        self.target = target
        self.step = step

    def on_train_batch_end(self, trainer, module, *_):
        if module.completed_steps == self.step:
            for logger in trainer.loggers:
                logger.save()
            trainer.loggers[0].experiment.flush()
            shutil.copytree(self.source, self.target)


def run(directory, *overrides):
    words = [*SMALL, *SETTINGS, f"run_dir='{directory}'", *overrides]
    own = [word for word in overrides if "callbacks" not in word and "checkpoint" not in word]
    made = Run(
        composed(*words),
        build(*words),
        overrides=own,
        directory_given=True,
        choices={"algorithm": "grpo", "policy": "scratch"},
    )
    made.execute()
    return made


def rows(directory):
    with (directory / "csv" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two runs of a sweep, the second one killed in step 3 and continued."""
    place = tmp_path_factory.mktemp("sweep")
    common = ("rollout.group_size=4", "optimizer.lr=0.01")
    run(place / FIRST, "seed=0", *common)
    places = f"source: {place}/whole, target: '{place}/{SECOND}'"
    photograph = f"{{_target_: tests.test_board.Photograph, {places}, step: 3}}"
    run(place / "whole", "seed=1", *common, f"+callbacks.photograph={photograph}", "callbacks.checkpoint.every=2")
    before = rows(place / SECOND)
    unbroken = rows(place / "whole")
    shutil.rmtree(place / "whole")
    run(place / SECOND, "seed=1", *common, "checkpoint=last")
    return place, before, unbroken


@pytest.fixture(scope="module")
def board(sweep):
    return Board(sweep[0])


@pytest.fixture(scope="module")
def both(board):
    return board.get("runs")


@pytest.mark.slow
def test_a_run_is_named_by_what_it_differs_in(both):
    assert sorted(both) == [f"{FIRST}/tensorboard", f"{SECOND}/tensorboard"]


def test_every_scalar_has_every_step_and_no_tag_has_two_kinds(board, both):
    tags = board.plugin("scalars/tags")
    for name in both:
        assert len(tags[name]) > 35
        for tag in tags[name]:
            expected = [0, 2, 4] if tag.startswith("val/") else [1, 2, 3, 4]
            assert board.steps(name, tag) == expected, tag
    kinds = [board.plugin(f"{kind}/tags") for kind in ("scalars", "histograms", "text")]
    for name in both:
        found = [tag for kind in kinds for tag in kind.get(name, {})]
        assert len(found) == len(set(found)) > 40


def test_the_charts_show_metrics_that_there_are(board, both):
    charts = {one["title"]: one["chart"] for one in board.plugin("custom_scalars/layout")["category"]}
    assert list(charts) == ["Progress", "Health", "Speed"]
    [first, *_] = charts["Progress"]
    assert first["multiline"]["tag"] == ["^val/pass@1$"]
    for chart in (one for category in charts.values() for one in category):
        [pattern] = chart["multiline"]["tag"]
        answer = board.plugin("custom_scalars/scalars", run=both[0], tag=pattern)
        assert answer["regex_valid"]
        assert answer["tag_to_events"], pattern
        assert all(re.fullmatch(pattern, tag) for tag in answer["tag_to_events"])
    titles = [chart["title"] for category in charts.values() for chart in category]
    assert len(titles) == len(set(titles)) > 12


def test_charts_are_those_of_the_metrics():
    assert chart_layout(["loss/total", "optim/lr"]) == {
        "Progress": {"loss": ("Multiline", ["^loss/total$"])},
        "Speed": {"learning rate": ("Multiline", ["^optim/lr$"])},
    }
    assert "loss" not in chart_layout(["loss/total", "reward/total"])["Progress"]
    assert list(chart_layout(["val/pass@1"])["Progress"]) == ["pass@1 on held-out prompts"]
    assert list(chart_layout(["val/pass@16"])["Progress"]) == ["pass@k and maj@k"]
    assert len({title for charts in CHARTS.values() for title in charts}) == sum(map(len, CHARTS.values()))


def test_hparams_has_settings_and_results(board, both):
    columns, found = board.hparams()
    assert sorted(columns) == sorted(
        (
            *("algorithm", "optimizer.lr", "policy", "reward", "rollout.group_size", "seed"),
            *("val/pass@1", "val/reward/total", "reward/total", "policy/kl_divergence"),
        )
    )
    assert sorted(found) == sorted(both)
    for number, name in enumerate(sorted(both)):
        row = found[name]
        assert (row["seed"], row["optimizer.lr"], row["rollout.group_size"]) == (number, 0.01, 4)
        assert (row["algorithm"], row["policy"], row["reward"]) == ("grpo", "scratch", "custom+format")
        passes = [value for _, _, value in board.plugin("scalars/scalars", run=name, tag="val/pass@1")]
        assert row["val/pass@1"] == passes[-1]


def test_a_continued_csv_file_has_every_step_once(sweep):
    place, before, unbroken = sweep
    assert [row["step"] for row in before] == ["0", "1", "2", "3"]
    after = rows(place / SECOND)
    assert [row["step"] for row in after] == ["0", "1", "2", "3", "4"]
    assert next(iter(after[0])) == "step"
    timed = ("time/", "perf/")
    for one, other in zip(after, unbroken):
        assert {key: one[key] for key in other if not key.startswith(timed)} == {
            key: value for key, value in other.items() if not key.startswith(timed)
        }
    with (place / SECOND / "csv" / "completions_train.csv").open(newline="") as file:
        steps = [row["step"] for row in csv.DictReader(file)]
    assert steps == [str(step) for step in (1, 2, 3, 4) for _ in range(8)]
