"""TensorBoard, CSV files, W&B and MLflow: what they get, over kills and restarts, and when they fail."""

import csv
import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from lightning import Callback
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from grpo_lightning.callbacks.logs import chart_layout, hparams_columns
from grpo_lightning.logger import CSVLogger, TensorBoardLogger, read_rows, rewind_csv, write_rows
from grpo_lightning.run import Run
from tests.support.board import events, scalars
from tests.support.composed import build, composed
from tests.support.running import SMALL, same, small_run, weights

TIMED = ("time/", "perf/")


class Photograph(Callback):
    """Copies the run's directory within a step, as it would be found after ``kill -9``."""

    def __init__(self, source: str, target: str, step: int) -> None:
        self.source, self.target, self.step = source, target, step

    def on_train_batch_end(self, trainer, module, *_):
        if module.completed_steps == self.step:
            for logger in trainer.loggers:
                logger.save()
            trainer.loggers[0].experiment.flush()
            shutil.copytree(self.source, self.target)


def rows(directory):
    with (directory / "csv" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An unbroken run, and the same one killed in step 3 and continued; the rows of metrics.csv before that."""
    place = tmp_path_factory.mktemp("runs")
    logged = ("steps=4", "validation.every=2", "callbacks.samples.every=1", "logger=[tensorboard,csv]")
    chosen = ["seed=1", "optimizer.lr=0.01"]

    def run(name, *more):
        words = [*SMALL, *logged, *chosen, f"run_dir={place / name}", *more]
        choices = {"algorithm": "grpo", "policy": "scratch"}
        Run(composed(*words), build(*words), overrides=chosen, directory_given=True, choices=choices).execute()

    photograph = (
        f"{{_target_: tests.test_loggers.Photograph, source: {place}/whole, target: {place}/continued, step: 3}}"
    )
    run("whole", f"+callbacks.photograph={photograph}", "callbacks.checkpoint.every=2")
    before = rows(place / "continued")
    run("continued", "checkpoint=last", "callbacks.checkpoint.every=2")
    return place / "whole", place / "continued", before


@pytest.mark.slow
def test_a_continued_run_has_every_step_once(runs):
    whole, continued, before = runs
    assert [row["step"] for row in before] == ["0", "1", "2", "3"]
    expected, found = rows(whole), rows(continued)
    assert [row["step"] for row in found] == ["0", "1", "2", "3", "4"]
    for row, other in zip(found, expected, strict=True):
        assert all(row[key] == value for key, value in other.items() if not key.startswith(TIMED))
    with (continued / "csv" / "completions_train.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == [str(step) for step in (1, 2, 3, 4) for _ in range(8)]
    for tag, points in scalars(continued / "tensorboard").items():
        assert [step for step, _ in points] == ([0, 2, 4] if tag.startswith("val/") else [1, 2, 3, 4]), tag
    tags = [
        tag for kind in ("scalars", "histograms", "tensors") for tag in events(continued / "tensorboard").Tags()[kind]
    ]
    assert len(tags) == len(set(tags)) > 40


@pytest.mark.slow
def test_charts_show_metrics_that_there_are_and_hparams_what_was_asked_for(runs):
    board = events(runs[1] / "tensorboard")
    [layout] = board.Tensors("custom_scalars__config__")
    charts = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0])
    assert [category.title for category in charts.category] == ["Progress", "Health", "Speed"]
    patterns = [tag for category in charts.category for chart in category.chart for tag in chart.multiline.tag]
    assert patterns[0] == "^val/pass@1$"
    for pattern in patterns:
        assert any(re.match(pattern, tag) for tag in board.Tags()["scalars"]), pattern
    start = board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    shown = HParamsPluginData.FromString(start).session_start_info.hparams
    assert {name: value.string_value or value.number_value for name, value in shown.items()} == {
        **{"seed": 1, "optimizer.lr": 0.01},
        **{"algorithm": "grpo", "policy": "scratch", "reward": "custom+format"},
    }


def test_charts_and_columns_by_hand():
    assert chart_layout(["loss/total", "optim/lr"]) == {
        "Progress": {"loss": ("Multiline", ["^loss/total$"])},
        "Health": {},
        "Speed": {"learning rate": ("Multiline", ["^optim/lr$"])},
    }
    assert list(chart_layout(["val/pass@16"])["Progress"]) == ["pass@k and maj@k"]
    settings = {
        **{"steps": 7, "loss": {"kl_coef": 0.5}, "reward": {"accuracy": {"weight": 1}, "format": {}}},
        **{"policy": {"stop": ["a"], "share": True}, "run_dir": "/x"},
    }
    words = ["+loss.kl_coef=0.5", "policy.stop=[a]", "algorithm=dapo", "policy.share=true", "run_dir=/x", "~a=b"]
    words += ["callbacks.samples.every=2", "logger=csv", "reward=[accuracy]", "gone.key=1"]
    choices = {"algorithm": "dapo", "policy": "tiny", "logger": "csv"}
    assert list(hparams_columns(settings, words, choices, ["algorithm", "reward", "policy", "data"]).items()) == [
        *(("loss.kl_coef", 0.5), ("policy.stop", "['a']"), ("algorithm", "dapo"), ("policy.share", "True")),
        *(("reward", "accuracy+format"), ("policy", "tiny")),
    ]


def csv_logger(place, every=1):
    return CSVLogger(place, name="", version="csv", flush_logs_every_n_steps=every)


def text(place, name="metrics.csv"):
    return (place / "csv" / name).read_text().splitlines()


def test_a_step_is_one_row_and_another_process_may_have_new_columns(tmp_path):
    first = csv_logger(tmp_path)
    for values, step in (({"val": 0.5}, 0), ({"a": 1.0}, 1), ({"a": 2.0}, 2), ({"val": 0.25}, 2)):
        first.log_metrics(values, step=step)
    assert text(tmp_path) == ["step,val,a", "0,0.5,", "1,,1.0", "2,0.25,2.0"]
    with (tmp_path / "csv" / "metrics.csv").open("a") as file:
        file.write("x,1.0,2.0\n3")  # a row of no step, and one that was cut off
    second = csv_logger(tmp_path)
    second.log_metrics({"b": 4.0, "a": 3.0}, step=3)
    second.log_metrics({"a": 5.0}, step=4)
    assert text(tmp_path) == ["step,val,a,b", "0,0.5,,", "1,,1.0,", "2,0.25,2.0,", "3,,3.0,4.0", "4,,5.0,"]
    second.log_table("t", ["a"], [[1], [2]], step=1)
    second.log_table("t", ["a", "b"], [[3, 4]], step=2)
    assert text(tmp_path, "t.csv") == ["step,a,b", "1,1,", "1,2,", "2,3,4"]


def test_csv_files_go_back_to_a_step_and_foreign_ones_stay(tmp_path, monkeypatch):
    logger = csv_logger(tmp_path)
    for step in (1, 2, 3):
        logger.log_metrics({"a": 1.5}, step=step)
        logger.log_table("completions/train", ["text"], [[f"{step}\n,x"], ["=1+A1"]][: 1 + (step == 2)], step=step)
    (tmp_path / "csv" / "mine.csv").write_text("step,loss\n7,1\n")
    rewind_csv([logger], 2)
    assert text(tmp_path) == ["step,a", "1,1.5", "2,1.5"]
    tables = list(read_rows(tmp_path / "csv" / "completions_train.csv"))
    assert [row["text"] for row in tables] == ["1\n,x", "2\n,x", "'=1+A1"]  # no cell is a formula
    logger.log_metrics({"a": 3.5}, step=3)
    assert text(tmp_path)[-1] == "3,3.5"
    rewind_csv([logger], -1)
    assert text(tmp_path, "mine.csv") == ["step,loss", "7,1"]
    assert [path.name for path in (tmp_path / "csv").iterdir()] == ["mine.csv"]
    write_rows(tmp_path / "x.csv", [{"step": 1, "a": 2.0}])
    monkeypatch.setattr(Path, "write_bytes", lambda *_: no_room())
    with pytest.raises(OSError, match="No space left"):
        write_rows(tmp_path / "x.csv", [{"step": 7}])
    assert (tmp_path / "x.csv").read_text().splitlines() == ["step,a", "1,2.0"]


@pytest.mark.slow
def test_a_validation_is_logged_alone_but_not_into_the_logs_of_a_training(tmp_path):
    module = small_run(tmp_path / "alone", "mode=validate", "logger=csv")
    [row] = rows(tmp_path / "alone")
    assert row.pop("step") == "0"
    assert {name: float(value) for name, value in row.items()} == module.metrics
    small_run(tmp_path / "trained", "logger=csv")
    before = text(tmp_path / "trained")
    small_run(tmp_path / "trained", "mode=validate", "logger=csv", "checkpoint=last")
    assert text(tmp_path / "trained") == before


class Remove(Callback):
    """``rm -r`` of directories in the middle of a step."""

    def __init__(self, directory: str, step: int, token: str = "") -> None:
        self.directory, self.step = Path(directory), step

    def on_train_batch_start(self, trainer, module, *_):
        if module.completed_steps + 1 == self.step:
            for name in ("tensorboard", "csv"):
                shutil.rmtree(self.directory / name)


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "training goes on" in record.getMessage()]


@pytest.mark.slow
def test_loggers_that_fail_cost_their_logs_only(tmp_path, caplog):
    def trained(name, *overrides):
        words = ("steps=6", "validation.every=3", "callbacks.checkpoint.every=1", "callbacks.samples.every=1")
        return weights(small_run(tmp_path / name, *words, *overrides))

    unbroken = trained("unbroken")
    removal = f"+callbacks.remove={{_target_: tests.test_loggers.Remove, directory: {tmp_path}/removed, step: 3}}"
    assert same(trained("removed", removal, "logger=[tensorboard,csv]"), unbroken)
    assert len(warnings_of(caplog)) == 1
    assert f"TensorBoardLogger of {tmp_path}/removed/tensorboard failed" in caplog.text
    assert [step for step, _ in scalars(tmp_path / "removed" / "tensorboard")["reward/total"]] == [4, 5, 6]
    assert [row["step"] for row in rows(tmp_path / "removed")][-1] == "6"


def test_a_failure_is_one_short_line_and_an_interrupt_is_none(tmp_path, caplog):
    class Wordy(TensorBoardLogger):
        error: BaseException = ConnectionError("no\nservice\x1b[2J " + "x" * 1000)

        def open(self):
            raise self.error

    logger = Wordy(tmp_path, name="", version="x")
    for _ in range(3):
        logger.log_metrics({"a": 1.0}, step=1)
        logger.experiment.add_scalar("a", 1.0)  # which does nothing
        logger.save()
    logger.finalize("success")
    [warning] = warnings_of(caplog)
    assert r"failed (ConnectionError: no\nservice\x1b[2J xxx" in warning
    assert len(warning) < 450 + len(str(tmp_path))
    Wordy.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        Wordy(tmp_path, name="", version="x").log_metrics({"a": 1.0}, step=1)


SECRET = "k-known-to-nobody-7"


@pytest.mark.slow
def test_every_service_has_the_same_run_with_every_scalar_and_no_secret(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    services = tmp_path
    monkeypatch.chdir(tmp_path)  # MLflow's own directory of artifacts is below the working one
    monkeypatch.setenv("WANDB_MODE", "offline")
    secret = f"+callbacks.remove={{_target_: tests.test_loggers.Remove, directory: x, step: 9, token: {SECRET}}}"
    words = ("logger=[tensorboard,csv,wandb,mlflow]", "logger.wandb.offline=true", secret)
    words += ("validation.every=2", "callbacks.samples.every=1", "callbacks.checkpoint.every=2")
    database = f"logger.mlflow.tracking_uri=sqlite:///{tmp_path}/mlflow.db"
    for more in (("steps=2",), ("steps=3", "checkpoint=last")):
        small_run(tmp_path / "run", *words, database, *more)
    expected = scalars(services / "run" / "tensorboard")
    assert [step for step, _ in expected["reward/total"]] == [1, 2, 3]
    client = MlflowClient(f"sqlite:///{services}/mlflow.db")
    [experiment] = [found for found in client.search_experiments() if found.name == "grpo-lightning"]
    [run] = client.search_runs([experiment.experiment_id])
    table = rows(services / "run")
    for tag, points in expected.items():
        logged = client.get_metric_history(run.info.run_id, tag.replace("@", "_at_"))
        assert [(point.step, point.value) for point in logged] == [(s, pytest.approx(v, rel=1e-6)) for s, v in points]
        found = [(int(row["step"]), float(row[tag])) for row in table if row[tag]]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in points]
    assert (run.info.status, run.data.params["rollout/group_size"]) == ("FINISHED", "4")
    tables = {Path(file.path).name for file in client.list_artifacts(run.info.run_id, "completions/train")}
    assert tables == {"000001.json", "000002.json", "000003.json"}
    files = list((services / "run").glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1 < len(files)  # the same run, continued
    assert all(
        name.encode() in b"".join(file.read_bytes() for file in files) for name in ("reward/total", "val/pass@1")
    )
    written = [path for path in services.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
