"""What happens to a run whose logs cannot be written: it is said once, and everything else is as it was."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from lightning import Callback
from lightning.pytorch import loggers
from tensorboard.summary.writer.record_writer import RecordWriter

from grpo_lightning.logger.base import SafeLogger, TensorBoardLogger
from grpo_lightning.logger.csv import CSVLogger
from tests.support.running import small_run
from tests.test_callbacks import scalars

RUN = ("steps=6", "validation.every=3", "callbacks.checkpoint.every=1", "callbacks.samples.every=1")


class Remove(Callback):
    """``rm -r`` of a directory in the middle of step ``step``."""

    def __init__(self, directory: str, step: int) -> None:
        self.directory = directory
        self.step = step

    def on_train_batch_start(self, trainer, module, *_):
        if module.completed_steps + 1 == self.step:
            shutil.rmtree(self.directory)


class Failing(SafeLogger, loggers.CSVLogger):
    """Raises wherever it can."""

    def open(self):
        raise ConnectionError("no service")


def trained(directory: Path) -> dict[str, torch.Tensor]:
    return torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "training goes on" in record.getMessage()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    directory = tmp_path_factory.mktemp("unbroken")
    small_run(directory, *RUN)
    return trained(directory)


@pytest.mark.slow
def test_a_removed_log_directory_costs_the_removed_logs_only(unbroken, tmp_path, caplog):
    logs = tmp_path / "tensorboard"
    removal = f"+callbacks.remove={{_target_: tests.test_loggers.Remove, directory: {logs}, step: 3}}"
    small_run(tmp_path, *RUN, removal)
    assert len(warnings_of(caplog)) == 1
    assert f"TensorBoardLogger of {logs} failed" in caplog.text
    same(trained(tmp_path), unbroken)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    assert [step for step, _ in scalars(logs)["reward/total"]] == [4, 5, 6]
    shutil.rmtree(logs)
    small_run(tmp_path, *RUN, "steps=7", "checkpoint=last")
    assert [step for step, _ in scalars(logs)["reward/total"]] == [7]


@pytest.mark.slow
def test_a_removed_csv_directory_is_made_again(unbroken, tmp_path):
    removal = f"+callbacks.remove={{_target_: tests.test_loggers.Remove, directory: {tmp_path}/csv, step: 3}}"
    small_run(tmp_path, *RUN, removal, "logger=csv")
    same(trained(tmp_path), unbroken)
    assert (tmp_path / "csv" / "metrics.csv").read_text().count("\n") > 3


@pytest.mark.slow
def test_a_full_disk_under_the_logger_stops_nothing(unbroken, tmp_path, caplog, monkeypatch):
    write, calls = RecordWriter.write, []

    def written(self, data):
        calls.append(data)
        if 20 < len(calls) < 24:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", written)
    small_run(tmp_path, *RUN)
    assert len(warnings_of(caplog)) == 1
    assert "No space left on device" in caplog.text
    same(trained(tmp_path), unbroken)
    assert len(calls) > 24
    assert 6 in [step for step, _ in scalars(tmp_path / "tensorboard")["reward/total"]]


@pytest.mark.slow
def test_a_logger_that_always_fails_is_warned_about_once(unbroken, tmp_path, caplog):
    small_run(
        tmp_path, *RUN, "logger=none", "+logger.failing={_target_: tests.test_loggers.Failing, save_dir: ${run_dir}}"
    )
    assert len(warnings_of(caplog)) == 1
    assert "failed (ConnectionError: no service)" in caplog.text
    same(trained(tmp_path), unbroken)
    assert (tmp_path / "export" / "config.json").exists()


def test_what_is_said_of_a_failure_is_a_line(tmp_path, caplog):
    class Wordy(TensorBoardLogger):
        def open(self):
            raise ConnectionError("no\nservice\x1b[2J " + "x" * 1000)

    logger = Wordy(tmp_path, name="", version="x")
    for _ in range(3):
        logger.log_metrics({"a": 1.0}, step=1)
        logger.experiment.add_scalar("a", 1.0)  # which does nothing
        logger.save()
    logger.finalize("success")
    [told] = warnings_of(caplog)
    assert r"failed (ConnectionError: no\nservice\x1b[2J xxx" in told
    assert len(told) < 450 + len(str(tmp_path))


def test_a_directory_that_was_removed_is_made_again(tmp_path, caplog):
    board = TensorBoardLogger(tmp_path, name="", version="x")
    table = CSVLogger(tmp_path, name="", version="csv")
    for step in (1, 2):
        for logger in (board, table):
            logger.log_metrics({"a": float(step)}, step=step)
            logger.save()
        if step == 1:
            shutil.rmtree(tmp_path / "x")
            shutil.rmtree(tmp_path / "csv")
            board.log_metrics({"a": 1.5}, step=1)
            board.save()  # which notices
    assert len(warnings_of(caplog)) == 1
    board.finalize("success")
    assert scalars(tmp_path / "x") == {"a": [(2, 2.0)]}
    assert (tmp_path / "csv" / "metrics.csv").read_text() == "step,a\n2,2.0\n"


def test_what_ends_a_run_is_not_held_back(tmp_path):
    class Ending(TensorBoardLogger):
        def open(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Ending(tmp_path, name="", version="x").log_metrics({"a": 1.0}, step=1)
