"""The CSV files of a run, as they are after whatever happened to them."""

import csv
import os

import pytest

from grpo_lightning.logger.csv import CSVLogger, read, rewind, write
from tests.support.provocations import provocation
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


@provocation(
    "`logger=csv` with prompts or completions that begin with `=`, `+`, `-` or `@`: spreadsheets take it for a formula",
    "an apostrophe stands before them; numbers stay",
)
def test_a_validation_alone_is_logged_and_one_of_a_training_adds_nothing(tmp_path):
    alone = small_run(tmp_path / "alone", "mode=validate", "logger=csv")
    (row,) = read(tmp_path / "alone" / "csv" / "metrics.csv")
    assert len([*read(tmp_path / "alone" / "csv" / "completions_validation.csv")]) == 16
    assert row.pop("step") == "0"
    assert {name: float(value) for name, value in row.items()} == alone.metrics
    small_run(tmp_path / "trained", "logger=csv")
    before = (tmp_path / "trained" / "csv" / "metrics.csv").read_bytes()
    small_run(tmp_path / "trained", "mode=validate", "logger=csv", "checkpoint=last", "validation.samples_per_prompt=8")
    assert (tmp_path / "trained" / "csv" / "metrics.csv").read_bytes() == before


def test_no_text_is_a_formula(tmp_path):
    texts = ["=cmd|' /C calc'!A0", "@x", "+x", "-2", "\t=x", "a=b", "\uff1d1+1", 'a;"=x', "a; - b; -2\n+x"]
    for step in (1, 2):
        logger(tmp_path).log_table("completions/train", ["text"], [[one] for one in texts], step=step)
    with (tmp_path / "csv" / "completions_train.csv").open(newline="", encoding="utf-8") as file:
        found = [row["text"] for row in csv.DictReader(file)]
    told = ["'=cmd|' /C calc'!A0", "'@x", "'+x", "-2", "'\t'=x", "a=b", "'\uff1d1+1", "a;\"'=x", "a; - b; '-2\n'+x"]
    assert found == told * 2
    lines = (tmp_path / "csv" / "completions_train.csv").read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ['"step","text"', '"1","\'=cmd|\' /C calc\'!A0"']
    assert '"2","\'=cmd|\' /C calc\'!A0"' in lines  # of the second process, behind those of the first
    rewind([logger(tmp_path)], 1)
    left = (tmp_path / "csv" / "completions_train.csv").read_text(encoding="utf-8").splitlines()
    assert left == lines[: len(lines) // 2 + 1]


@provocation("a row of metrics.csv was cut short by `kill -9`, continued", "it is written again, whole")
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


def test_a_file_that_is_written_anew_goes_through_no_link_and_leaves_nothing_beside_it(tmp_path, monkeypatch):
    path, mine = tmp_path / "metrics.csv", tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / f".metrics.csv.{os.getpid()}").symlink_to(mine)
    write(path, [{"step": 1, "a": 2.0}])
    assert path.read_text().splitlines() == ["step,a", "1,2.0"]
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.csv", "mine"}

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(csv.DictWriter, "writerows", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, [{"step": 7, "a": 2.0}])
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.csv", "mine"}
    assert path.read_text().splitlines() == ["step,a", "1,2.0"]
    assert mine.read_text() == "mine"


@provocation("`hydra.run.dir=.` where csv/ holds files of one's own", "they stay, also beyond links")
def test_files_of_others_stay(tmp_path):
    place = tmp_path / "csv"
    place.mkdir()
    (place / "metrics.csv").write_text("epoch,loss\n7,1\n")
    (place / "mine.csv").write_text("step,loss\n7,1\n")
    elsewhere = tmp_path / "elsewhere.csv"
    elsewhere.write_text("step,loss\n7,1\n")
    (place / "completions_x.csv").symlink_to(elsewhere)
    rewind([logger(tmp_path)], -1)
    assert len(list(place.iterdir())) == 3
    assert elsewhere.read_text() == "step,loss\n7,1\n"
    (place / "metrics.csv").write_text("step,loss\n7,1\n")
    place.rename(tmp_path / "of_another_run")
    place.symlink_to(tmp_path / "of_another_run")
    rewind([logger(tmp_path)], -1)
    assert (place / "metrics.csv").exists()


def test_a_table_with_other_columns_keeps_the_rows_that_there_are(tmp_path):
    one = logger(tmp_path)
    one.log_table("t", ["a"], [[1], [2]], step=1)
    one.log_table("t", ["a", "b"], [[3, 4]], step=2)
    assert text(tmp_path, "t.csv") == ['"step","a","b"', '"1","1",""', '"1","2",""', '"2","3","4"']
    with pytest.raises(ValueError, match="argument 2 is longer"):
        one.log_table("t", ["a"], [[1, 2]], step=3)


def test_no_name_of_a_metric_is_a_formula(tmp_path):
    """A recording's names of metrics may be a stranger's."""
    one = logger(tmp_path)
    for step in (1, 2):
        one.log_metrics({"=cmd|' /C calc'!A0": 1.0, "loss/total": 2.0}, step=step)
        one.save()
    lines = (tmp_path / "csv" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert lines == ["step,'=cmd|' /C calc'!A0,loss/total", "1,1.0,2.0", "2,1.0,2.0"]
