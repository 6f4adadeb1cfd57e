"""W&B and MLflow without a network, beside TensorBoard and CSV: all get the same."""

import contextlib
import csv
import itertools
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from grpo_lightning.logger.known import STORE, keep, known

import grpo_lightning
from grpo_lightning.logger.mlflow import MLFlowLogger, _has_links
from grpo_lightning.logger.wandb import _without_git
from grpo_lightning.settings import ConfigError, check
from grpo_lightning.settings import loggers as loggers_of_settings
from tests.support.composed import ROOT, composed
from tests.support.provocations import provocation
from tests.support.running import SMALL, small_run
from tests.support.too_long import STEPS, led_away
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


@pytest.fixture
def own_store(tmp_path, monkeypatch):
    """An empty working directory whose ``mlflow.db`` MLflow opens; it keeps what it opened by that name elsewhere."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from mlflow.tracking._tracking_service.utils import _tracking_store_registry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SqlAlchemyStore, "_engine_map", {})
    _tracking_store_registry._get_store_with_resolved_uri.cache_clear()
    yield tmp_path
    _tracking_store_registry._get_store_with_resolved_uri.cache_clear()


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

    from grpo_lightning.logger.wandb import WandbLogger

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


@provocation(
    "`logger=mlflow` in a stranger's folder, whose `mlflow.db` has files of runs written elsewhere, or to `hdfs://`, "
    "for which `./libhdfs.so` would be loaded",
    "the logger is refused in one sentence, training goes on; nothing is written there",
)
@pytest.mark.slow
def test_mlflow_writes_files_where_the_database_of_the_directory_is(own_store, tmp_path):
    from mlflow import MlflowClient

    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "link").symlink_to("..")
    (real := tmp_path / "x" / "/".join("e" * STEPS)).mkdir(parents=True)
    (tmp_path / "mlruns" / "deep").symlink_to(f"{led_away(tmp_path / 'mlruns', real)}{'/..' * STEPS}")
    client = MlflowClient(STORE)
    places = {
        "hdfs": "hdfs://x:1/y",
        "elsewhere": str(tmp_path / "elsewhere"),
        "url": (tmp_path / "elsewhere").as_uri(),
        "dots": f"{tmp_path}/mlruns/../elsewhere",
        "quoted": f"{tmp_path}/mlruns/%2e%2e/elsewhere",
        "link": f"{tmp_path}/mlruns/link/elsewhere",
        "deep": f"{tmp_path}/mlruns/deep/elsewhere",
        "inside": str(tmp_path / "mlruns" / "inside"),
    }
    for name, place in places.items():
        client.create_experiment(name, artifact_location=place)

    def made(name, **options):
        (tmp_path / f"run_{name}").mkdir(exist_ok=True)
        return MLFlowLogger(str(tmp_path / f"run_{name}"), experiment_name=name, tracking_uri=STORE, **options)

    for name in ("hdfs", "elsewhere", "url", "dots", "quoted", "link", "deep"):
        logger = made(name)
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"^logger.mlflow.tracking_uri=sqlite:///mlflow.db: this database has f"
            ):
                logger.log_metrics({"x": 1.0}, 1)
    assert not (tmp_path / "elsewhere").exists()
    for place, is_refused in (("file:mlruns/x", False), ("FILE:mlruns/x", True), (f"File://{tmp_path}/mlruns/x", True)):
        with pytest.raises(ValueError, match="this database has f") if is_refused else contextlib.nullcontext():
            made("inside")._check_one(place, is_new=True)  # MLflow takes the latter for folders "FILE:mlruns", "File:"
    for logger in (made("inside"), made("new"), made("elsewhere", artifact_location=str(tmp_path / "elsewhere"))):
        logger.experiment.log_dict(logger.run_id, {}, "table/1.json")
        [run] = client.search_runs([logger.experiment_id], max_results=1)
        assert Path(run.info.artifact_uri, "table", "1.json").exists()
    run = client.create_run(client.get_experiment_by_name("inside").experiment_id).info
    (Path(run.artifact_uri) / "table").mkdir(parents=True)
    (Path(run.artifact_uri) / "table" / "1.json").symlink_to(tmp_path / "mine")
    (tmp_path / "run_held").mkdir()
    (tmp_path / "run_held" / ".mlflow_id").write_text(run.run_id)
    with pytest.raises(ValueError, match="^logger.mlflow.tracking_uri="):
        made("held").log_metrics({"x": 1.0}, 1)
    (Path(run.artifact_uri) / "table" / "1.json").unlink()
    with pytest.MonkeyPatch.context() as patch:  # a folder whose files cannot be listed
        real = os.scandir

        def hidden(place):
            if Path(place).name == "table":
                raise PermissionError
            return real(place)

        patch.setattr(os, "scandir", hidden)
        assert _has_links(Path(run.artifact_uri))
    assert not _has_links(Path(run.artifact_uri))
    client.create_experiment("later", artifact_location=str(tmp_path / "mlruns" / "later"))
    logger = made("later")
    logger.log_metrics({"x": 1.0}, 1)
    with contextlib.closing(sqlite3.connect("mlflow.db")) as database, database:
        database.execute("update runs set artifact_uri = ?", [str(tmp_path / "late")])
    with pytest.raises(ValueError, match="^logger.mlflow.tracking_uri="):
        logger.experiment.log_dict(logger.run_id, {}, "table/1.json")


@provocation(
    "such a database in which `runs` is a view that says something else every time, or a trigger changes it, or beside "
    "which `mlflow.db-journal` has SQLite remove a file",
    "the logger is refused in one sentence; nothing is removed or written there",
)
@pytest.mark.slow
def test_mlflow_takes_a_database_that_mlflow_has_made(own_store, tmp_path):
    from mlflow import MlflowClient

    client = MlflowClient(STORE)
    client.log_metric(client.create_run(client.create_experiment("x")).info.run_id, "x", 1.0)
    (tmp_path / "run").mkdir()
    table = "CREATE TRIGGER t AFTER INSERT ON metrics BEGIN UPDATE \"Runs\" SET artifact_uri = '/tmp/x'; END"
    made = [
        (table, "t"),
        ("CREATE VIEW v AS SELECT random()", "v"),
        ("CREATE TRIGGER s AFTER INSERT ON tags BEGIN DELETE FROM tags; END", ""),
    ]
    for (created, name), kind in itertools.product(made, ("", "type = upper(type)")):
        with contextlib.closing(sqlite3.connect("mlflow.db")) as database, database:
            database.execute("PRAGMA writable_schema = ON")
            if name or not kind:
                database.execute(created)
            if name and kind:  # SQLite reads the text alone
                database.execute(f"UPDATE sqlite_master SET {kind} WHERE name = ?", [name])
        if name:
            refused = rf"^logger.mlflow.tracking_uri=.*: this database has {name} \(CREATE (VIEW|TRIGGER) {name} "
            with pytest.raises(ValueError, match=refused):
                MLFlowLogger(str(tmp_path / "run"), experiment_name="x", tracking_uri=STORE)
            with contextlib.closing(sqlite3.connect("mlflow.db")) as database, database:
                database.execute("PRAGMA writable_schema = ON")
                database.execute("DELETE FROM sqlite_master WHERE name = ?", [name])
        else:
            MLFlowLogger(str(tmp_path / "run"), experiment_name="x", tracking_uri=STORE).log_metrics({"x": 1.0}, 1)
    logger = MLFlowLogger(str(tmp_path / "run"), experiment_name="x", tracking_uri=STORE)
    client, run = logger.experiment, logger.run_id
    with contextlib.closing(sqlite3.connect("mlflow.db")) as database, database:
        [(place,)] = database.execute("SELECT artifact_uri FROM runs WHERE run_uuid = ?", [run])
        database.execute("UPDATE runs SET artifact_uri = ?", [str(tmp_path / "late")])
    client.log_dict(run, {}, "table/1.json")  # where it was when it was looked at
    assert Path(place, "table", "1.json").exists()
    assert not (tmp_path / "late").exists()
    with contextlib.closing(sqlite3.connect("mlflow.db")) as database, database:
        database.execute("UPDATE runs SET artifact_uri = ?", [place])
    mine = tmp_path / "mine"
    mine.write_bytes(b"\0" * 8)
    name = str(mine).encode()
    end = len(name).to_bytes(4, "big") + sum(name).to_bytes(4, "big") + bytes.fromhex("d9d505f920a163d7")
    journal = end[-8:] + bytes(20) + bytes(484) + b"\0\0\0\1" + name + end
    Path("mlflow.db-journal").write_bytes(journal)
    with pytest.raises(ValueError, match=r"^logger.mlflow.tracking_uri=.*mlflow.db-journal names another file"):
        MLFlowLogger(str(tmp_path / "run"), experiment_name="x", tracking_uri=STORE).log_metrics({"x": 1.0}, 1)
    assert mine.exists()
    Path("mlflow.db-journal").write_bytes(journal[:-1])
    MLFlowLogger(str(tmp_path / "run"), experiment_name="x", tracking_uri=STORE).log_metrics({"x": 1.0}, 2)
    Path("mlflow.db").rename(tmp_path / "kept.db")
    Path("mlflow.db").write_text("text " * 999)
    with pytest.raises(ValueError, match=r"^logger.mlflow.tracking_uri=.*mlflow.db: file is not a database; allowed"):
        MLFlowLogger(str(tmp_path / "run"), experiment_name="x", tracking_uri=STORE)
    Path("mlflow.db").unlink()
    for name, link in itertools.product(("", "-journal", "-wal", "-shm"), ("symlink_to", "hardlink_to")):
        getattr(Path(f"mlflow.db{name}"), link)(mine)
        with pytest.raises(ValueError, match=rf"^logger.mlflow.tracking_uri=.*: mlflow.db{name} is a link, or another"):
            MLFlowLogger(str(tmp_path / "run"), experiment_name="x", tracking_uri=STORE)
        Path(f"mlflow.db{name}").unlink()
    assert mine.read_bytes() == b"\0" * 8


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_without_its_package_is_refused_with_the_command_that_brings_it(name, monkeypatch):
    find = loggers_of_settings.find_spec
    monkeypatch.setattr(loggers_of_settings, "find_spec", lambda package: None if package == name else find(package))
    expected = rf"logger.{name}: needs the package {name}; pip install 'grpo-lightning\[{name}\]' brings it"
    with pytest.raises(ConfigError, match=expected):
        check(composed(f"logger=[csv,{name}]"))
    check(composed("logger=[csv,tensorboard]"))


@provocation(
    "`logger.mlflow.tracking_uri=sqlite:///$HOME/.vimrc`, or a file of another program's by any name",
    "refused by its key",
)
@pytest.mark.parametrize(
    "name", ["/h/.vimrc", "file:x.db?uri=true", "file:/h/.zshenv?uri=true&x=.db", "/h/x.db/.profile", "x.dbx"]
)
def test_a_database_is_called_one(name):
    def told(value):
        config = composed("logger=mlflow")
        config["logger"]["mlflow"]["tracking_uri"] = value
        return list(loggers_of_settings.logger_problems(config))

    assert told("sqlite:///mlflow.db") == told("sqlite:////h/my runs.sqlite3?timeout=9") == told("http://h/x") == []
    for plain in ("postgresql://h/x", "mysql+pymysql://h/x", "databricks", "https://h/x?", "mlruns/x", "file:mlruns"):
        assert told(plain) == []
    for loading in (
        "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx.so",
        "postgresql://h/x?sslkey=engine:x",
        "mysql+mysqldb://h",
    ):
        (problem,) = told(loading)
        assert f"tracking_uri={loading}: allowed are sqlite:///PATH of a database" in problem
    config = composed("logger=mlflow")
    for place in (
        "hdfs://localhost/x",
        "viewfs://h/x",
        "ftp://h/x",
        "s3://b/x",
        "file:x",
        "mlflow-artifacts:/x",
        "x/y",
    ):
        config["logger"]["mlflow"]["artifact_location"] = place
        is_refused = place.startswith(("hdfs", "viewfs", "ftp"))
        assert len(list(loggers_of_settings.logger_problems(config))) == is_refused, place
    (problem,) = told(f"sqlite:///{name}")
    assert problem.startswith(f"logger.mlflow.tracking_uri=sqlite:///{name}: allowed is sqlite:///PATH of a database")


def test_settings_of_a_logger_that_was_not_chosen_are_refused():
    with pytest.raises(
        ConfigError, match=r"logger.csv: no such logger was chosen; allowed is 'logger=\[tensorboard,csv\]'"
    ):
        check(composed("+logger.csv.name=x"))
    config = composed()
    config["logger"]["$(touch HIT)"] = {"name": "x"}
    with pytest.raises(ConfigError, match=r"allowed is 'logger=\[tensorboard,\"\$\(touch HIT\)\"\]'"):
        check(config)


@pytest.mark.slow
def test_a_program_names_loggers_or_hands_them_over(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    own = CSVLogger(tmp_path / "own")
    words = [word for word in SMALL if not word.startswith("trusted")]
    for number, (given, kinds) in enumerate(
        [
            (["csv", own], ["CSVLogger", "CSVLogger"]),
            ("csv", ["CSVLogger"]),
            (own, ["CSVLogger"]),
            ({"mine": own}, ["CSVLogger"]),
            (False, []),
        ]
    ):
        run = grpo_lightning.compose(*words, "trusted=[tests]", run_dir=tmp_path / str(number), logger=given)
        assert [type(logger).__name__ for logger in run.trainer.loggers] == kinds
    with pytest.raises(ValueError, match=r"logger=3: allowed are Lightning's loggers, names such as csv, and False"):
        grpo_lightning.compose(*words, "trusted=[tests]", run_dir=tmp_path, logger=3)


@provocation(
    "`logger=wandb` of a program in a directory whose `.git/config` may name a command",
    "git is not asked there",
)
@pytest.mark.slow
def test_wandb_asks_no_git(tmp_path):
    git = tmp_path / "programs" / "git"
    git.parent.mkdir()
    git.write_text(f"#!/bin/sh\ntouch {tmp_path}/HIT\nexit 1\n")
    git.chmod(0o755)
    (tmp_path / "mine" / ".git").mkdir(parents=True)
    (tmp_path / "mine" / "program.py").write_text(
        "from grpo_lightning.logger.wandb import WandbLogger\n"
        "logger = WandbLogger('run', offline=True, project='mine')\n"
        "logger.log_metrics({'a': 1.0})\n"
        "logger.finalize('success')\n"
    )
    known = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment = known | {"PYTHONPATH": str(ROOT), "PATH": f"{git.parent}:{os.environ['PATH']}"}
    command = [sys.executable, "program.py"]
    done = subprocess.run(
        command, cwd=tmp_path / "mine", env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len([*tmp_path.glob("mine/run/wandb/offline-run-*/run-*.wandb")]) == 1
    assert not (tmp_path / "HIT").exists()


def test_w_and_bs_variable_is_left_as_it_was(monkeypatch):
    for before in ("false", None):
        monkeypatch.delenv("WANDB_DISABLE_GIT", raising=False)
        if before is not None:
            monkeypatch.setenv("WANDB_DISABLE_GIT", before)
        with _without_git():
            assert os.environ["WANDB_DISABLE_GIT"] == "true"
        assert os.environ.get("WANDB_DISABLE_GIT") == before


@provocation("`wandb/settings` in the directory of the start that names another server", "it is not read")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "before"),
    [("wandb", ""), (".wandb", ""), ("mine", "import wandb; wandb.setup(wandb.Settings(mode='offline'))\n")],
    ids=["wandb", ".wandb", "set_up_before"],
)
def test_settings_of_wandb_in_the_directory_are_not_read(name, before, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\nentity = evil\n")
    (tmp_path / "run" / ".wandb").mkdir(parents=True)  # where W&B would write, if it was let to
    code = before + (
        "from grpo_lightning.logger.wandb import WandbLogger\n"
        "run = WandbLogger('run', offline=True, project='mine', settings={'console': 'off'}).experiment\n"
        "import json, os, wandb\n"
        "found = [run.settings.base_url, run.settings.entity, os.path.abspath(run.dir)]\n"
        "found += [run.settings.disable_git, run.settings.console]\n"
        "os.chdir('/')\n"  # where no settings lie
        "open(os.environ['TOLD'], 'w').write(json.dumps([wandb.Settings().base_url, *found]))\n"
    )
    known = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment = known | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path / "home"), "TOLD": str(tmp_path / "told")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    of_the_library, address, entity, place, asks_no_git, console = json.loads((tmp_path / "told").read_text())
    assert (address, entity) == (of_the_library, None)
    assert address.startswith("https://")
    assert place.startswith(str(tmp_path / "run" / "wandb"))
    assert (asks_no_git, console) == (True, "off")


@provocation(
    "such a database whose trigger or constraint calls a function that the program gives to every connection, such as "
    "one that asks a shell",
    "the logger is refused in one sentence",
)
@pytest.mark.slow
def test_mlflows_database_calls_no_function_of_the_programs(own_store, tmp_path):
    from mlflow import MlflowClient
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    ran = []
    told = r"^logger\.mlflow\.tracking_uri=.*: this database has (t|metrics) \(CREATE .* may call a function"
    (tmp_path / "run").mkdir()

    def give(connection, _):
        for name in ("sh", "my KEY", "x$KEY"):
            connection.create_function(name, 1, lambda text: ran.append(text) or 1, deterministic=True)
        connection.create_function("regexp", 2, lambda *texts: ran.append(texts) or 1, deterministic=True)
        connection.create_collation("mine", lambda *texts: ran.append(texts) or 0)

    event.listen(Engine, "connect", give)
    client = MlflowClient(STORE)  # which has connections already
    client.log_metric(client.create_run(client.create_experiment("x")).info.run_id, "x", 1.0)
    MLFlowLogger(str(tmp_path / "run"), experiment_name="x", tracking_uri=STORE).log_metrics({"x": 1.0}, 1)
    assert ran == []
    try:
        for created, dropped in (
            ("CREATE TRIGGER t AFTER INSERT ON metrics BEGIN SELECT sh('x'); END", "DROP TRIGGER t"),
            ("CREATE TRIGGER t AFTER INSERT ON metrics BEGIN SELECT \"sh\" -- x\n ('x'); END", "DROP TRIGGER t"),
            ("CREATE TRIGGER t AFTER INSERT ON metrics BEGIN SELECT [SH]/* ( */('x'); END", "DROP TRIGGER t"),
            (
                "CREATE TRIGGER t AFTER INSERT ON tags BEGIN SELECT 1 FROM tags a JOIN tags b ON sh('x'); END",
                "DROP TRIGGER t",
            ),
            ("CREATE TRIGGER t AFTER INSERT ON tags BEGIN SELECT \"my KEY\"('x'); END", "DROP TRIGGER t"),
            ("CREATE TRIGGER t AFTER INSERT ON tags BEGIN SELECT x$KEY('x'); END", "DROP TRIGGER t"),
            ("CREATE TRIGGER t AFTER INSERT ON tags BEGIN SELECT 'x' REGEXP 'x'; END", "DROP TRIGGER t"),
            ("CREATE INDEX t ON tags (sh(key))", "DROP INDEX t"),
            ("CREATE TABLE t (x TEXT COLLATE/**/\ufeffmine)", "DROP TABLE t"),
            ("CREATE TABLE t (x TEXT COLLATE mine)", "DROP TABLE t"),
            ("CREATE TABLE t (x TEXT CHECK(sh (x)))", "DROP TABLE t"),
            ('CREATE TABLE t (x TEXT DEFAULT ("sh"(1)))', "DROP TABLE t"),
            ("ALTER TABLE metrics ADD COLUMN more INTEGER DEFAULT 1 CHECK (sh('x'))", ""),
        ):
            with contextlib.closing(sqlite3.connect("mlflow.db")) as database, database:
                give(database, None)
                database.execute(created)
                ran.clear()
            with pytest.raises(ValueError, match=told):
                MLFlowLogger(str(tmp_path / "run"), experiment_name="x", tracking_uri=STORE)
            with contextlib.closing(sqlite3.connect("mlflow.db")) as database, database:
                database.execute(dropped)
            assert ran == []
    finally:
        event.remove(Engine, "connect", give)


@provocation(
    "`config-defaults.yaml` in the directory of the start, with values that a tag of YAML makes that the program has "
    "registered, or a link to a file of the user's",
    "W&B does not read it, and sends nothing of it",
)
@pytest.mark.slow
def test_defaults_of_wandb_in_the_directory_are_not_read(tmp_path):
    (tmp_path / "private").write_text("db: {value: mine-77}\n")
    code = (
        "import yaml, sys\n"
        "yaml.SafeLoader.add_constructor('!sh', lambda loader, node: open('HIT', 'w') and 1)\n"
        "from grpo_lightning.logger.wandb import WandbLogger\n"
        "run = WandbLogger('run', offline=True, project='mine', config={'a': 3}).experiment\n"
        "print('config', dict(run.config))\n"
    )
    known = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment = known | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path / "home")}
    for number in range(2):
        start = tmp_path / str(number)
        start.mkdir()
        file = start / "config-defaults.yaml"
        file.symlink_to(tmp_path / "private") if number else file.write_text("build: {value: !sh x}\n")
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=start, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "config {'a': 3}" in done.stdout
        assert not (start / "HIT").exists()


@provocation(
    "a run directory whose `.wandb_id` or `.mlflow_id` is no name of a run, or a link to a file of the user's",
    "its text is not sent, and the file is as before",
)
@pytest.mark.parametrize("text", ["key = of-mine", "../../x", "a/b", "x" * 129, "", "\xff"])
def test_only_names_of_runs_are_sent_to_services(text, tmp_path):
    file, mine = tmp_path / ".wandb_id", tmp_path / "mine"
    file.write_bytes(text.encode("latin-1"))
    assert known(file) is None
    mine.write_text("of-mine\n")
    file.unlink()
    file.symlink_to(mine)
    assert known(file) is None
    keep(file, "ab12-c_d")
    assert known(file) == "ab12-c_d"
    assert mine.read_text() == "of-mine\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".wandb_id", "mine"]
