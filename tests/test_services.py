"""W&B and MLflow without a network, beside TensorBoard and CSV: all get the same."""

import csv
import json
from pathlib import Path

import pytest

import grpo_lightning
from grpo_lightning import config as settings
from grpo_lightning.config import ConfigError, check_config
from grpo_lightning.logger.base import load_run_id, save_run_id
from tests.support.composed import composed
from tests.support.running import SMALL, small_run
from tests.test_callbacks import scalars

SECRET = "k-known-to-nobody-7"
ALL = ("logger=[tensorboard,csv,wandb,mlflow]", "logger.wandb.offline=true", f"+service.token={SECRET}")
SETTINGS = ("validation.every=2", "callbacks.samples.every=1", "callbacks.checkpoint.every=2")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A run of two steps, continued to three."""
    place = tmp_path_factory.mktemp("services")
    patch = pytest.MonkeyPatch()
    patch.chdir(place)  # MLflow's own directory of artifacts is below the working one
    patch.setenv("WANDB_MODE", "offline")
    own = f"logger.mlflow.tracking_uri=sqlite:///{place}/mlflow.db"
    for more in (("steps=2",), ("steps=3", "checkpoint=last")):
        small_run(place / "run", *SETTINGS, *ALL, own, *more)
    yield place
    patch.undo()


def records(file: Path):
    """The bytes of each record of W&B's file, which is a log as LevelDB writes it: blocks of 32 KiB with fragments."""
    data, place, whole = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last fragment
            yield whole
            whole = b""


def wandb_records(directory: Path):
    """What W&B would upload: the rows of the history, and the settings."""
    from wandb.proto.wandb_internal_pb2 import Record

    history, config = [], {}
    for file in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        for record in map(Record.FromString, records(file)):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
            for update in (*record.run.config.update, *record.config.update):
                config[update.key] = json.loads(update.value_json)
    return history, config


@pytest.mark.slow
def test_every_logger_has_every_scalar_the_settings_and_the_completions(directory):
    from mlflow import MlflowClient

    run = directory / "run"
    expected = {tag: points for tag, points in scalars(run / "tensorboard").items() if not tag.startswith("~")}
    assert [step for step, _ in expected["reward/total"]] == [1, 2, 3]
    assert [step for step, _ in expected["val/pass@1"]] == [0, 2, 3]

    with (run / "csv" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
    written = {tag: [(int(row["step"]), float(row[tag])) for row in rows if row[tag]] for tag in rows[0]}
    written.pop("step")
    same(written, expected)

    history, config = wandb_records(run)
    keys = {key for row in history for key in row}
    step = "trainer/global_step"
    found = {tag: [(row[step], row[tag]) for row in history if tag in row] for tag in keys & expected.keys()}
    same(found, expected)
    assert config["rollout"]["group_size"] == 4
    assert {"completions/train", "completions/validation"} <= {key.rpartition("/_type")[0] or key for key in keys}

    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    [experiment] = [one for one in client.search_experiments() if one.name == "grpo-lightning"]
    [one] = client.search_runs([experiment.experiment_id])
    named = {tag.replace("@", "_at_"): points for tag, points in expected.items()}
    logged = {
        tag: [(point.step, point.value) for point in client.get_metric_history(one.info.run_id, tag)] for tag in named
    }
    same(logged, named)
    assert one.info.status == "FINISHED"
    assert one.data.params["rollout/group_size"] == "4"
    tables = {Path(file.path).name for file in client.list_artifacts(one.info.run_id, "completions/train")}
    assert tables == {"000001.json", "000002.json", "000003.json"}


def same(found, expected):
    assert found.keys() == expected.keys()
    for tag, points in expected.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points], tag
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in points], rel=1e-6), tag


@pytest.mark.slow
def test_runs_of_wandb_end_with_their_training_and_say_how(tmp_path, monkeypatch):
    from wandb.proto.wandb_internal_pb2 import Record

    from grpo_lightning.logger.services import WandbLogger

    names = []
    for status in ("success", "failed"):
        logger = WandbLogger(str(tmp_path / status), offline=True, project="mine")
        names.append(logger.experiment.id)
        logger.finalize(status)
        [file] = (tmp_path / status).glob("wandb/offline-run-*/run-*.wandb")
        ends = [one.exit.exit_code for one in map(Record.FromString, records(file)) if one.HasField("exit")]
        assert ends == [int(status == "failed")]
        logger.log_metrics({"after": 1.0})  # a `fit()` once more goes on with it
        assert logger.experiment.id == names[-1]
        logger.finalize(status)
    assert len({*names}) == 2


@pytest.mark.slow
def test_a_continued_run_is_the_same_run_there_and_no_secret_leaves(directory):
    names = [file.name for file in directory.glob("run/wandb/offline-run-*/run-*.wandb")]
    assert len(names) == 2
    assert len(set(names)) == 1
    files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 20
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_without_its_package_is_refused_with_the_command_that_brings_it(name, monkeypatch):
    find = settings.find_spec
    monkeypatch.setattr(settings, "find_spec", lambda package: None if package == name else find(package))
    expected = rf"logger.{name} needs the package {name}: pip install 'grpo-lightning\[{name}\]'"
    with pytest.raises(ConfigError, match=expected):
        check_config(composed(f"logger=[csv,{name}]"))
    check_config(composed("logger=[csv,tensorboard]"))


def test_settings_of_a_logger_that_was_not_chosen_are_refused():
    with pytest.raises(
        ConfigError, match=r"logger.csv: this logger is not chosen; choose 'logger=\[tensorboard,csv\]'"
    ):
        check_config(composed("+logger.csv.name=x"))


@pytest.mark.slow
def test_a_program_names_loggers_or_hands_them_over(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    own = CSVLogger(tmp_path / "own")
    words = SMALL
    for number, (given, kinds) in enumerate(
        [
            (["csv", own], ["CSVLogger", "CSVLogger"]),
            ("csv", ["CSVLogger"]),
            (own, ["CSVLogger"]),
            ({"mine": own}, ["CSVLogger"]),
            (False, []),
        ]
    ):
        run = grpo_lightning.compose(*words, run_dir=tmp_path / str(number), logger=given)
        assert [type(logger).__name__ for logger in run.trainer.loggers] == kinds
    with pytest.raises(ValueError, match=r"logger=3: allowed are Lightning's loggers, names such as csv, and False"):
        grpo_lightning.compose(*words, run_dir=tmp_path, logger=3)


def test_a_continued_run_has_the_same_name_there(tmp_path):
    file = tmp_path / "run" / ".wandb_id"
    assert load_run_id(file) is None
    save_run_id(file, "ab12-c_d")
    assert load_run_id(file) == "ab12-c_d"
