"""What happens to a run whose logs cannot be written: it is said once, and everything else is as it was."""

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from grpo_lightning.callbacks.loggers import _BROKEN, guard
from lightning import Callback
from lightning.pytorch import loggers
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from tensorboard.summary.writer.record_writer import RecordWriter

from grpo_lightning.logger.csv import CSVLogger
from tests.support.provocations import provocation
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


class Failing(Logger):
    """Raises wherever it can."""

    name, version = "failing", 0

    @property
    def experiment(self):
        raise ConnectionError("no service")

    def log_metrics(self, metrics, step=None):
        raise ConnectionError("no service")

    def log_hyperparams(self, params, *args, **options):
        raise ConnectionError("no service")

    def save(self):
        raise ConnectionError("no service")

    def finalize(self, status):
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
@provocation(
    "`rm -r RUN/tensorboard` while it trains", "one warning; trains on, saves, and logs into a new file; continues"
)
def test_a_removed_log_directory_costs_the_removed_logs_only(unbroken, tmp_path, caplog):
    logs = tmp_path / "tensorboard"
    removal = f"+callbacks.remove={{_target_: tests.test_loggers.Remove, directory: {logs}, step: 3}}"
    small_run(tmp_path, *RUN, removal)
    assert len(warnings_of(caplog)) == 1
    assert f"TensorBoardLogger of {logs} failed" in caplog.text
    assert "No such file or directory" in caplog.text
    same(trained(tmp_path), unbroken)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    assert [step for step, _ in scalars(logs)["reward/total"]] == [4, 5, 6]
    shutil.rmtree(logs)
    small_run(tmp_path, *RUN, "steps=7", "checkpoint=last")
    assert [step for step, _ in scalars(logs)["reward/total"]] == [7]


@provocation("`rm -r RUN/csv` while it trains with `logger=csv`", "one warning; trains on; later rows are kept")
@pytest.mark.slow
def test_a_removed_csv_directory_is_made_again(unbroken, tmp_path, caplog):
    removal = f"+callbacks.remove={{_target_: tests.test_loggers.Remove, directory: {tmp_path}/csv, step: 3}}"
    small_run(tmp_path, *RUN, removal, "logger=csv")
    assert len(warnings_of(caplog)) == 1
    same(trained(tmp_path), unbroken)
    assert (tmp_path / "csv" / "metrics.csv").read_text().count("\n") > 3


@provocation("the disk is full under the logger only", "one warning; trains on; logs again when there is room")
@pytest.mark.slow
def test_a_full_disk_under_the_logger_stops_nothing(unbroken, tmp_path, caplog, monkeypatch, capfd):
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
    assert "Traceback" not in capfd.readouterr().err
    same(trained(tmp_path), unbroken)
    assert len(calls) > 24
    assert 6 in [step for step, _ in scalars(tmp_path / "tensorboard")["reward/total"]]


@provocation("a logger's service raises in every call", "one warning; trains on, saves and exports")
@pytest.mark.slow
def test_a_logger_that_always_fails_is_warned_about_once(unbroken, tmp_path, caplog):
    small_run(tmp_path, *RUN, "logger=none", "+logger.failing={_target_: tests.test_loggers.Failing}")
    assert len(warnings_of(caplog)) == 1
    assert "Failing of its service failed (ConnectionError: no service)" in caplog.text
    same(trained(tmp_path), unbroken)
    assert (tmp_path / "export" / "config.json").exists()


def test_a_guarded_logger_stays_what_it_is(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="x")
    guard([logger])
    kind = type(logger)
    guard([logger])
    assert type(logger) is kind
    assert isinstance(logger, TensorBoardLogger)
    logger.log_metrics({"a": 1.5}, step=2)
    logger.save()
    logger.experiment.flush()
    assert scalars(tmp_path / "x") == {"a": [(2, 1.5)]}


def test_what_is_said_of_a_failure_is_a_line(caplog):
    asked = []

    class Wordy(Failing):
        @property
        def experiment(self):
            asked.append(1)
            raise ConnectionError("no service")

        def log_metrics(self, metrics, step=None):
            raise ConnectionError("no\nservice\x1b[2J " + "x" * 1000)

    logger = Wordy()
    guard([logger])
    logger.log_metrics({})
    [told] = warnings_of(caplog)
    assert r"failed (ConnectionError: no\nservice\x1b[2J xxx" in told
    assert "\x1b" not in told
    assert len(told) < 450
    for number in range(3):
        for _ in range(2):
            logger.experiment.add_scalar("a", 1.0)  # which does nothing
        assert len(asked) == number  # once more after every save
        logger.__dict__[_BROKEN] = False
    assert len(warnings_of(caplog)) == 1


def test_errors_in_threads_of_others_are_told_as_before(monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", lambda error: told.append(str(error.exc_value)))
    guard([])
    hook = threading.excepthook
    guard([])
    assert threading.excepthook is hook

    def fail():
        raise ValueError("of a thread")

    kinds = (threading.Thread, type("_AsyncWriterThread", (threading.Thread,), {}))
    for thread in [kind(target=fail) for kind in kinds]:
        thread.start()
        thread.join()
    assert told == ["of a thread"]


def test_a_file_that_was_removed_before_a_save_is_begun_anew(tmp_path, caplog):
    logger = TensorBoardLogger(tmp_path, name="", version="x")
    guard([logger])
    logger.log_metrics({"a": 1.0}, step=1)
    logger.experiment.flush()
    shutil.rmtree(tmp_path / "x")
    logger.save()
    logger.save()
    assert len(warnings_of(caplog)) == 1
    assert "was removed" in caplog.text
    logger.log_metrics({"a": 2.0}, step=2)
    logger.finalize("success")
    assert scalars(tmp_path / "x") == {"a": [(2, 2.0)]}


def test_a_directory_that_was_not_made_yet_was_not_removed(tmp_path, caplog):
    logger = CSVLogger(tmp_path / "csv", name="", version="")
    guard([logger])
    logger.log_metrics({"a": 1.0}, step=1)
    logger.save()
    assert warnings_of(caplog) == []
    assert (tmp_path / "csv" / "metrics.csv").exists()
    shutil.rmtree(tmp_path / "csv")
    logger.log_metrics({"a": 2.0}, step=2)
    logger.save()
    assert len(warnings_of(caplog)) == 1
    assert (tmp_path / "csv" / "metrics.csv").read_text() == "step,a\n2,2.0\n"


def test_lightnings_own_csv_files_are_made_again(tmp_path, caplog):
    logger = loggers.CSVLogger(tmp_path / "csv", name="", version="")
    guard([logger])
    for step in (1, 2):
        logger.log_metrics({"a": float(step)}, step=step)
        logger.save()
        if step == 1:
            shutil.rmtree(tmp_path / "csv")
    assert len(warnings_of(caplog)) == 1
    assert (tmp_path / "csv" / "metrics.csv").read_text().splitlines()[-1] == "2.0,2"


def test_what_ends_a_run_is_not_held_back():
    class Ending(Failing):
        def log_metrics(self, metrics, step=None):
            raise KeyboardInterrupt

    logger = Ending()
    guard([logger])
    with pytest.raises(KeyboardInterrupt):
        logger.log_metrics({})
