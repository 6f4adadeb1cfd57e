"""The CSV files of a run, as they are after whatever happened to them."""

import csv
from pathlib import Path

import pytest

from grpo_lightning.logger.csv import CSVLogger, read_rows, rewind, write_rows
from tests.support.running import small_run


def logger(place):
    return CSVLogger(place, name="", version="csv", flush_logs_every_n_steps=1)


def text(place, name="metrics.csv"):
    return (place / "csv" / name).read_text().splitlines()


def test_a_step_is_one_row_whenever_its_metrics_come(tmp_path):
    first = logger(tmp_path)
    first.log_metrics({"val": 0.5}, step=0)
    first.log_metrics({"a": 1.0}, step=1)
    first.log_metrics({"a": 2.0}, step=2)
    first.log_metrics({"val": 0.25}, step=2)
    assert text(tmp_path) == ["step,val,a", "0,0.5,", "1,,1.0", "2,0.25,2.0"]


def test_another_process_goes_on_with_the_file_and_may_have_new_columns(tmp_path):
    logger(tmp_path).log_metrics({"a": 1.0}, step=1)
    second = logger(tmp_path)
    second.log_metrics({"a": 2.0}, step=2)
    assert text(tmp_path) == ["step,a", "1,1.0", "2,2.0"]
    second.log_metrics({"b": 4.0, "a": 3.0}, step=3)
    assert text(tmp_path) == ["step,a,b", "1,1.0,", "2,2.0,", "3,3.0,4.0"]
    second.log_metrics({"a": 5.0}, step=4)
    assert text(tmp_path)[-1] == "4,5.0,"
    with (tmp_path / "csv" / "metrics.csv").open("a") as file:
        file.write("x,1.0,2.0\n")  # of no step
    third = logger(tmp_path)
    third.log_metrics({"a": 6.0}, step=5)
    third.log_metrics({"c": 7.0}, step=6)
    assert text(tmp_path)[-3:] == ["4,5.0,,", "5,6.0,,", "6,,,7.0"]


@pytest.mark.slow
def test_a_validation_alone_is_logged_and_one_of_a_training_adds_nothing(tmp_path):
    alone = small_run(tmp_path / "alone", "mode=validate", "logger=csv")
    (row,) = read_rows(tmp_path / "alone" / "csv" / "metrics.csv")
    assert len([*read_rows(tmp_path / "alone" / "csv" / "completions_validation.csv")]) == 16
    assert row.pop("step") == "0"
    assert {name: float(value) for name, value in row.items()} == alone.metrics
    small_run(tmp_path / "trained", "logger=csv")
    before = (tmp_path / "trained" / "csv" / "metrics.csv").read_bytes()
    small_run(tmp_path / "trained", "mode=validate", "logger=csv", "checkpoint=last", "validation.samples_per_prompt=8")
    assert (tmp_path / "trained" / "csv" / "metrics.csv").read_bytes() == before


def test_no_text_and_no_name_of_a_metric_is_a_formula(tmp_path):
    evil = "=cmd|' /C calc'!A0"
    for step in (1, 2):
        one = logger(tmp_path)
        one.log_table("completions/train", ["text"], [[evil], ["a\n,b"]], step=step)
        one.log_metrics({evil: 1.0, "loss/total": 2.0}, step=step)
    with (tmp_path / "csv" / "completions_train.csv").open(newline="", encoding="utf-8") as file:
        assert [row["text"] for row in csv.DictReader(file)] == [f"'{evil}", "a\n,b"] * 2
    assert text(tmp_path) == [f"step,'{evil},loss/total", "1,1.0,2.0", "2,1.0,2.0"]


def test_steps_after_the_checkpoint_and_torn_rows_go(tmp_path):
    one = logger(tmp_path)
    for step in (1, 2, 3):
        one.log_metrics({"a": 1.5, "b": 2.5}, step=step)
        one.log_table("completions/train", ["text"], [[f"{step}\n,x"]], step=step)
    with (tmp_path / "csv" / "metrics.csv").open("a") as file:
        file.write("x,1.5,2.5\n2")
    again = logger(tmp_path)
    rewind([again], 2)
    assert text(tmp_path) == ["step,a,b", "1,1.5,2.5", "2,1.5,2.5"]
    with (tmp_path / "csv" / "completions_train.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"step": "1", "text": "1\n,x"}, {"step": "2", "text": "2\n,x"}]
    again.log_metrics({"a": 3.5, "b": 4.5}, step=3)
    assert text(tmp_path)[-1] == "3,3.5,4.5"
    rewind([again], -1)
    assert list((tmp_path / "csv").iterdir()) == []


def test_steps_are_noted_until_they_are_saved(tmp_path):
    one = CSVLogger(tmp_path, name="", version="csv", flush_logs_every_n_steps=100)
    one.log_metrics({"a": 1.0}, step=3)
    one.log_metrics({"b": 2.0}, step=3)
    one.log_metrics({"a": 4.0}, step=5)
    one.save()
    one.save()
    assert text(tmp_path) == ["step,a,b", "3,1.0,2.0", "5,4.0,"]
    one.experiment.log_metrics({"a": 6.0})  # without a step: the one after the last
    one.log_metrics({"a": 7.0}, step=4)
    one.save()
    assert text(tmp_path) == ["step,a,b", "3,1.0,2.0", "4,7.0,", "5,4.0,", "6,6.0,"]


def test_a_file_that_cannot_be_written_anew_stays(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    write_rows(path, [{"step": 1, "a": 2.0}])

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_rows(path, [{"step": 7, "a": 2.0}])
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.csv"]
    assert path.read_text().splitlines() == ["step,a", "1,2.0"]


def test_files_of_others_stay(tmp_path):
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "mine.csv").write_text("step,loss\n7,1\n")
    rewind([logger(tmp_path)], -1)
    assert text(tmp_path, "mine.csv") == ["step,loss", "7,1"]


def test_a_table_with_other_columns_keeps_the_rows_that_there_are(tmp_path):
    one = logger(tmp_path)
    one.log_table("t", ["a"], [[1], [2]], step=1)
    one.log_table("t", ["a", "b"], [[3, 4]], step=2)
    assert text(tmp_path, "t.csv") == ["step,a,b", "1,1,", "1,2,", "2,3,4"]
    with pytest.raises(ValueError, match="argument 2 is longer"):
        one.log_table("t", ["a"], [[1, 2]], step=3)
