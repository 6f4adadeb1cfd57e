"""Code reached in roundabout ways: by a run that is replayed, names of files, places of arguments, other users"""

import json
import os
import resource
import stat
import subprocess
import sys
import tempfile
from contextlib import ExitStack

import pytest
from hydra.errors import ConfigCompositionException

import grpo_lightning as grpo
from grpo_lightning.composition.recalled import recalled
from grpo_lightning.distributed import caches
from grpo_lightning.logger.mlflow import MLFlowLogger
from grpo_lightning.sandbox import client
from grpo_lightning.sandbox.limits import Limits
from grpo_lightning.settings import ConfigError, check, given
from tests.support.composed import composed
from tests.support.provocations import provocation

EVIL = "open('HIT', 'w')\n\n\nclass C:\n    pass\n"
HYDRA = {
    "callbacks": "+hydra.callbacks.x={_target_: shared.evil.C}",
    "launcher": "hydra.launcher._target_=shared.evil.C",
    "sweeper": "hydra.sweeper._target_=shared.evil.C",
    "search space": "hydra.sweeper.custom_search_space=shared.evil.C",
}


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A stranger's run directory in the directory of the start, with a file of Python in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shared" / ".hydra").mkdir(parents=True)
    (tmp_path / "shared" / "evil.py").write_text(EVIL)
    for name in ("shared", "shared.evil"):  # of another test
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path / "shared"
    for name in ("shared", "shared.evil"):
        sys.modules.pop(name, None)


@provocation(
    "a stranger's run directory is replayed whose overrides, or the files that they choose, name a file that has come "
    "with it in Hydra's own settings",
    "it is not run",
)
@pytest.mark.parametrize("words", [[word] for word in HYDRA.values()] + [None], ids=[*HYDRA, "a file"])
def test_what_a_run_tells_hydra_is_not_run(words, shared):
    if words is None:
        (shared / "experiment").mkdir()
        lines = "# @package _global_\nhydra: {callbacks: {x: {_target_: shared.evil.C}}}\n"
        (shared / "experiment" / "evil.yaml").write_text(lines)
        words = [f"hydra.searchpath=[file://{shared}]", "experiment=evil"]
    sweeper = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize"] if "space" in words[0] else []
    (shared / ".hydra" / "overrides.yaml").write_text(json.dumps(["reward=[format]", *sweeper, *words]))
    with pytest.raises(ConfigError, match=r"hydra[./]\S+=.* stands in the run's settings; allowed there are choices"):
        recalled(shared, [], ["reward"])
    assert "shared.evil" not in sys.modules
    assert "PYTHONSAFEPATH" not in os.environ  # no job is launched
    assert not (shared.parent / "HIT").exists()


@provocation(
    "`policy=no_trust_remote_code`: a stranger's settings file whose name has words in it that only the user may say",
    "refused by its key: the name of a file says nothing",
)
def test_the_name_of_a_file_gives_no_trust(tmp_path):
    (tmp_path / "policy").mkdir()
    lines = "defaults: [hf]\npath: pkg://grpo_lightning/policy/tiny\ntrust_remote_code: true\n"
    (tmp_path / "policy" / "no_trust_remote_code.yaml").write_text(lines)
    words = (f"hydra.searchpath=[file://{tmp_path}]", "policy=no_trust_remote_code", "steps=1")
    told = r"remote_code\.yaml: policy\.trust_remote_code=True stands in a file"
    with pytest.raises(ConfigCompositionException, match=told):
        grpo.compose(*words, run_dir=tmp_path / "run")


@provocation(
    "arguments by their place, `_args_`, which the rules of settings would not find by their names",
    "refused by the key",
)
@pytest.mark.parametrize(
    "target", ["lightning.pytorch.callbacks.ModelCheckpoint", "grpo_lightning.logger.mlflow.MLFlowLogger"]
)
def test_arguments_have_names(target):
    config = composed()
    config["callbacks"]["mine"] = {"_target_": target, "_args_": ["a", "b", "mysql+mine://x"]}
    with pytest.raises(ConfigError, match=r"callbacks\.mine\._args_: allowed are arguments by name"):
        check(config)


def test_arguments_of_the_users_code_may_have_places():
    config = composed()
    config["callbacks"]["mine"] = {"_target_": "tests.test_attacks_indirect.Kept", "_args_": ["../elsewhere"]}
    check(config)


class Kept:
    """A class of the user's."""

    def __init__(self, directory: str = "kept") -> None:
        self.directory = directory


JUDGE = {
    "_target_": "grpo_lightning.reward.judge.ChatJudge",
    "base_url": "https://theirs.example/v1",
    "api_key_env": "OPENAI_API_KEY",
    "cache": "../theirs/answers.jsonl",
}


@provocation(
    "a reward whose name has dots, `a.function.reward.judge`, or any other key with dots or without letters, so that "
    "what stands below it looks like what the user has said of a judge of his own, of which there is a copy",
    "refused by the key",
)
@pytest.mark.parametrize("name", ["a.function.reward.judge", "", 0, None, 1.5])
def test_keys_of_settings_have_no_dots(name):
    own = {**JUDGE, "base_url": "http://127.0.0.1:8000/v1", "cache": "answers.jsonl"}
    copied = {"function": {"_target_": "mine.x", "reward": {"judge": {"function": own}}}}
    config = {"reward": {"judge": {"function": own}, "a": copied, name: {"function": JUDGE}}, "run_dir": "run"}
    words = [f"reward.judge.function.{key}={own[key]}" for key in ("base_url", "cache")]
    told = f"reward.{name}: {str(name)!r} is a key of settings; allowed is a text without '.'"
    assert told in given.ungiven(config, words)
    assert given.ungiven({**config, "reward": {"judge": {"function": own}, "a": copied}}, words) == []
    config["reward"] = {"a": {"lists": [{name: {}}, {"b.c": 8}]}}
    assert given.ungiven(config, []) == [told.replace(f"reward.{name}", f"reward.a.lists.0.{name}")]


def test_a_strangers_reward_is_no_copy_of_the_users_judge(tmp_path):
    (tmp_path / "experiment").mkdir()
    lines = {
        "a": {
            "_target_": "grpo_lightning.reward.Weighted",
            "weight": 0.1,
            "function": {
                "_target_": "grpo_lightning.reward.format.format",
                "_partial_": True,
                "reward": {"judge": {"function": "${reward.judge.function}"}},
            },
        },
        "a.function.reward.judge": {"_target_": "grpo_lightning.reward.Weighted", "weight": 1.0, "function": JUDGE},
    }
    (tmp_path / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{json.dumps({'reward': lines})}\n")
    words = (f"hydra.searchpath=[file://{tmp_path}]", "experiment=theirs", "reward=[accuracy,judge]")
    own = ("base_url=http://127.0.0.1:8000/v1", "model=mine", "cache=answers.jsonl")
    with pytest.raises(ConfigCompositionException, match=r"a\.function\.reward\.judge=.* stands in a file that the"):
        grpo.compose(*words, *(f"reward.judge.function.{word}" for word in own), run_dir=tmp_path / "run")


@provocation("Lightning's own MLflow logger, which would ask git", "refused by its key")
def test_lightnings_own_mlflow_logger_is_refused():
    config = composed()
    config["logger"]["mine"] = {"_target_": "lightning.pytorch.loggers.MLFlowLogger"}
    with pytest.raises(ConfigError, match=r"logger\.mine\._target_=lightning\.pytorch\.loggers\.MLFlowLogger: allowed"):
        check(config)


@provocation(
    "`logger=mlflow` of a program below a directory whose `.git/config` names a command", "git is not asked there"
)
@pytest.mark.slow
def test_mlflow_asks_no_git(tmp_path, monkeypatch):
    place = tmp_path / "theirs"
    (place / "project").mkdir(parents=True)
    for words in (["init", "-q"], ["config", "core.fsmonitor", f"touch {tmp_path}/HIT; false"]):
        subprocess.run(["git", *words], cwd=place, check=True)
    program = place / "project" / "train.py"
    program.write_text("")
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # which MLflow sets, and nobody takes back
    logger = MLFlowLogger(str(tmp_path), tracking_uri=f"sqlite:///{tmp_path}/m.db")
    run = logger.experiment.get_run(logger.run_id)
    assert run.data.tags["mlflow.source.name"] == str(program)
    assert not (tmp_path / "HIT").exists()


@provocation(
    "`/tmp/torchinductor_USER`, where torch keeps code that it compiles, is another user's, a link or everybody's",
    "a new directory is taken, and no compiled headers, which torch keeps there at any rate",
)
def test_compiled_code_is_kept_in_a_directory_of_ones_own(tmp_path, monkeypatch):
    headers = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"

    def taken():
        monkeypatch.delenv(caches.VARIABLE, raising=False)
        monkeypatch.delenv(headers, raising=False)
        caches.use_private_cache()
        assert os.environ.get(headers) == (None if os.environ[caches.VARIABLE] == str(usual) else "0")
        return os.environ[caches.VARIABLE]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "me")
    usual = tmp_path / "torchinductor_me"
    assert taken() == str(usual)
    assert stat.S_IMODE(usual.stat().st_mode) == 0o700
    usual.chmod(0o775)
    monkeypatch.setattr(caches, "_is_private", lambda group: True)
    assert taken() == str(usual)
    monkeypatch.setattr(caches, "_is_private", lambda group: False)
    others = {taken()}
    usual.chmod(0o777)
    others.add(taken())
    usual.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: usual.stat().st_uid + 1)
        others.add(taken())
    usual.rename(tmp_path / "elsewhere")
    usual.symlink_to(tmp_path / "elsewhere")
    others.add(taken())
    assert len(others) == 4
    assert all(name.startswith(f"{usual.parent}/torchinductor_") and name != str(usual) for name in others)
    assert all(stat.S_IMODE(os.stat(name).st_mode) == 0o700 for name in others)
    monkeypatch.setenv(caches.VARIABLE, "")  # to torch the working directory
    caches.use_private_cache()
    assert os.environ[caches.VARIABLE].startswith(f"{usual.parent}/torchinductor_")
    monkeypatch.setenv(caches.VARIABLE, "mine")
    monkeypatch.delenv(headers)
    caches.use_private_cache()
    assert (os.environ[caches.VARIABLE], os.environ[headers]) == ("mine", "0")


OPEN = """
import os, socket
for number in range(3, 5000):
    try:
        socket.socket(fileno=number).send(b'{"ended": "exit", "code": 0, "failed": null}')
        print("sent")
    except OSError:
        pass
os._exit(5)
"""


@provocation(
    "a program in the sandbox of a trainer that has more than 1,024 files open says itself how it has ended",
    "it has no way to: none of the trainer's or the server's files is open in it",
)
def test_a_program_cannot_speak_for_the_server():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = Limits(seconds=20.0, cpu_seconds=10, memory_mb=256)
    client.close()
    with ExitStack() as stack:
        stack.callback(client.close)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        found = client.run(OPEN, "", limits)
        assert (found.stdout, found.ended, found.code) == ("", "exit", 5)
        assert client.run("print(7)", "", limits).code == 0
