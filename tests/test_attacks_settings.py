"""Settings of a stranger's that put together what no text of theirs says, or have it said by data, links and git"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

import grpo_lightning as grpo
from grpo_lightning import start
from grpo_lightning.checkpoint import lock
from grpo_lightning.composition.hydra_settings import problems, script_problems
from grpo_lightning.composition.recalled import recalled
from grpo_lightning.logger.wandb import WandbLogger
from grpo_lightning.policy import hf
from grpo_lightning.recording import files
from grpo_lightning.settings import ConfigError, check
from grpo_lightning.settings.places import entry_problem, link_problem
from grpo_lightning.settings.reach import reach_problems
from tests.support.composed import ROOT, composed
from tests.support.provocations import provocation
from tests.test_attacks import REFUSED, begun

OPTUNA = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
NAMING = {"_target_": OPTUNA, "custom_search_space": "theirs.x", "direction": "maximize"}
NAMING |= dict.fromkeys(("sampler", "storage", "study_name", "search_space", "params"))
NAMING |= {"n_trials": 1, "n_jobs": 1, "max_failure_rate": 0.0}
TINY = ROOT / "grpo_lightning" / "policy" / "tiny"
LOADED = {"path": "./bundle/model", "dtype": "float32", "attn_implementation": "sdpa"}
STEP = ("steps=1", "data.prompts_per_step=4", "rollout.group_size=4", "data.validation_size=4", "logger=[]")


def started(place: Path, lines: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A run with a stranger's experiment, where a stranger's module is on Python's path."""
    (place / "bundle" / "experiment").mkdir(parents=True, exist_ok=True)
    (place / "bundle" / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{lines}\n")
    (place / "theirs.py").write_text(f"open({str(place / 'HIT')!r}, 'w')\n")
    more = {"PYTHONPATH": f"{ROOT}{os.pathsep}{place}"} | more
    return begun(place, "--config-dir", "bundle", "experiment=theirs", *words, **more)


def refused(place: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert not (place / "HIT").exists()
    assert done.returncode == 1
    assert "allowed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(lines, marks=provocation(f"a settings file with `{lines}`", REFUSED))
        for lines in (
            f"hydra: {{callbacks: {{x: {json.dumps(NAMING)}}}}}",
            "hydra: {runtime: {output_dir: '${evil}'}, hydra_logging: {handlers: {x: {class: logging.StreamHandler, "
            "stream: '${hydra.runtime.output_dir}'}}}}\nevil: ext://theirs.x",
            "hydra: {job_logging: {handlers: {x: {class: logging.StreamHandler, stream: '${now:ext:}//theirs.x'}}}}",
            "hydra: {job_logging: {handlers: {x: {class: logging.StreamHandler, stream: 'e${now:xt:}//theirs.x'}}}}",
            "hydra: {job_logging: {handlers: {x: {class: logging.StreamHandler, stream: 'ext:${now:%Z}//theirs.x'}}}}",
        )
    ],
)
def test_hydra_imports_nothing_for_them(lines, tmp_path):
    refused(tmp_path, started(tmp_path, lines, "steps=0"))


@pytest.mark.parametrize(
    "hydra",
    [
        {"sweeper": {"_target_": OPTUNA, "sampler": NAMING}},
        {"sweeper": {"_target_": "hydra_plugins.hydra_optuna_sweeper._impl.OptunaSweeperImpl"}},
        {"sweeper": {"_args_": [1]}},
        {"callbacks": {"x": {"_target_": "optuna.samplers.RandomSampler"}}},
        {"launcher": {"temp_folder": "${hydra.verbose}"}},  # which may be a mapping
        {"hydra_logging": {"formatters": {"x": {"format": "time ${now:%S}"}}}},
        {"hydra_logging": {"handlers": {"x": {"stream": "${hydra.runtime.output_dir}/x.log"}}}},
        {"hydra_logging": {"handlers": {"x": {"filename": "${hydra.runtime.output_dir}/x.log", "delay": True}}}},
    ],
)
def test_what_hydra_makes_stands_where_it_is_looked_at(hydra):
    assert len(problems(hydra)) == 1


def test_what_users_need_of_plug_ins_and_logs_is_allowed():
    sampler = {"_target_": "optuna.samplers.TPESampler", "seed": 0}
    assert problems({"sweeper": {"_target_": OPTUNA, "sampler": sampler}}) == []
    file = {"class": "logging.FileHandler", "filename": "${hydra.runtime.output_dir}/x.log", "delay": True}
    logs = {"formatters": {"x": {"format": "[${hydra.job.name}] %(message)s"}}, "handlers": {"x": file}}
    assert problems({"job_logging": logs}) == []


@provocation(
    "`hydra/launcher=submitit_slurm` of a settings file whose `hydra.sweep.dir`, or another text that is put into the "
    "script of a job, holds the end of a line and a command, also by `${now:%En}`",
    "refused by its key; nothing is handed to SLURM",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "more", ['sweep: {dir: "a\\nHIT\\nb"}', "launcher: {comment: 'a${now:%En}HIT'}", 'run: {dir: "a\\nHIT"}, launcher: '
             "{comment: '${hydra.run.dir}'}"], ids=["sweep", "time", "run"]
)  # fmt: skip
def test_no_lines_are_added_to_the_script_of_a_job(more, tmp_path):
    programs = {"sbatch": f"touch {tmp_path}/HIT; echo Submitted batch job 1", "srun": "exit 1", "sacct": "exit 1"}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    lines = (
        "defaults: [override /hydra/launcher: submitit_slurm]\n"
        f"hydra: {{mode: MULTIRUN, sweeper: {{params: {{seed: '0,1'}}}}, {more}}}"
    )
    done = started(tmp_path, lines, "steps=1", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    refused(tmp_path, done)
    assert "stands in a file; allowed there are hydra.mode" in done.stderr


@provocation(
    "`hydra/launcher=submitit_slurm` on a cluster that hands jobs no variables, beside a `socket.py`",
    "the script of a job says where Python does not look, and what the command line says",
)
@pytest.mark.slow
def test_the_script_of_a_job_keeps_python_out_of_the_directory(tmp_path):
    programs = {"sbatch": f"cat ${{@: -1}} > {tmp_path}/script; exit 1", "srun": "exit 1", "sacct": "exit 1"}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    words = ("trusted=[trl]", "+note='a b ${seed}'")
    begun(tmp_path, "-m", "hydra/launcher=submitit_slurm", "seed=0,1", "steps=1", *words, PATH=path)
    lines = (tmp_path / "script").read_text().splitlines()
    [said] = [line for line in lines if line.startswith("export PYTHONSAFEPATH=grpo_lightning PYTHONPATH=")]
    assert f"{ROOT}/grpo_lightning/distributed/alone:" in said
    assert lines.index(said) < next(n for n, line in enumerate(lines) if "submitit.core._submit" in line)
    command = ["bash", "-c", f"{said}; exec env -0"]
    told = subprocess.run(command, env={}, capture_output=True, text=True, check=True).stdout.split("\0")
    [given] = [line for line in told if line.startswith("GRPO_LIGHTNING_GIVEN=")]
    assert json.loads(given.partition("=")[2])[-2:] == list(words)


def test_no_texts_are_put_together_to_lines_of_a_script():
    hydra = OmegaConf.create({"sweep": {"dir": "a\ntouch HIT"}, "launcher": {"comment": "x ${sweep.dir}", "nodes": 1}})
    told = "hydra.launcher.comment: allowed are texts of one line, which cannot add to a script"
    assert script_problems(hydra.launcher) == [told]
    hydra.sweep.dir = "a b"
    assert script_problems(hydra.launcher) == []
    hydra.launcher.setup = None  # of SLURM
    assert script_problems(hydra.launcher) == []
    for sign in (*"\n\r\"'\\", "PackJob"):
        hydra.sweep.dir = f"a{sign}b"
        told = "hydra.launcher.comment: allowed are texts of one line, without quotes, backslashes and 'packjob', which"
        assert script_problems(hydra.launcher) == [f"{told} cannot add to a script"]


@provocation(
    "a sweep with `hydra/launcher=submitit_slurm` that is started in a folder whose name has several lines, of which "
    "the scripts of its jobs would have commands, or quotes and backslashes, of which they would have options, or "
    "`packjob`, at which SLURM's parser writes beyond its memory",
    "refused in one sentence",
)
@pytest.mark.parametrize("end", ["\n", "\r", "'", '"', "\\", "packjob"])
def test_the_name_of_the_directory_adds_no_lines_to_a_script(end, tmp_path, monkeypatch):
    here = tmp_path / f"data{end}touch HIT{end}#"
    here.mkdir()
    monkeypatch.chdir(here)
    launcher = OmegaConf.create({"setup": None, "nodes": 1})
    [told] = script_problems(launcher)
    shown = str(here.resolve()).replace("\n", "\\n").replace("\r", "\\r")
    without = "one line, without quotes, backslashes and 'packjob'"
    assert told == f"{shown}: SLURM's scripts hold this name; allowed is a start where it has {without}"
    assert script_problems(OmegaConf.create({"nodes": 1})) == []
    monkeypatch.chdir(tmp_path)
    assert script_problems(launcher) == []


def with_code(place: Path, *, of: str = "") -> Path:
    """A model whose directory, or a repository of the hub, has code of its own, which leaves a mark."""
    model = place / "bundle" / "model"
    shutil.copytree(TINY, model)
    (model / "evil.py").write_text(
        f"open({str(place / 'HIT')!r}, 'w')\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    )
    config = json.loads((model / "config.json").read_text())
    own = {"AutoConfig": f"{of}evil.C", "AutoModelForCausalLM": f"{of}evil.M"}
    config |= {"auto_map": own} | ({} if of else {"model_type": "evil"})
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.slow
@provocation(
    "rows with a column `trust_remote_code`, and a settings file whose reward of single completions is "
    "`grpo_lightning.reference.another_model` with a path",
    REFUSED,
)
def test_a_column_gives_no_trust(tmp_path):
    with_code(tmp_path)
    rows = [{"prompt": f"say {number}", "answer": "x", "trust_remote_code": True} for number in range(40)]
    (tmp_path / "bundle" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    function = {"_target_": "grpo_lightning.reference.another_model", "_partial_": True, **LOADED}
    own = {"_target_": "grpo_lightning.reward.PerCompletion", "function": function}
    reward = {"_target_": "grpo_lightning.reward.Weighted", "weight": 1.0, "function": own}
    lines = (
        "defaults: [override /data: jsonl, override /reward: [format]]\n"
        f"data: {{path: bundle/rows.jsonl}}\nreward: {json.dumps({'own': reward})}"
    )
    done = started(tmp_path, lines, "trusted_settings=true", *STEP)
    refused(tmp_path, done)
    assert (
        "reward.own.function.function._target_=grpo_lightning.reference.another_model: allowed below reference"
        in done.stderr
    )


@provocation(
    "`environment.function`, a tool or a reward that is `grpo_lightning.policy.hf.load`, to which columns or the model "
    "would say `trust_remote_code` and `path`",
    "refused by its key, wherever it comes from",
)
@pytest.mark.parametrize(
    "key",
    [
        "environment.function",
        "environment.function.tools.0",
        "reward.format.function",
        "reward.format.function.x",
    ],
)
@pytest.mark.parametrize("copied", [False, True])
def test_what_loads_weights_is_called_by_nobody_else(key, copied):
    node = {"_target_": "grpo_lightning.policy.hf.load", "_partial_": True, **LOADED}
    config = composed("reward=[format]")
    config["environment"] = {"function": {"tools": [None]}}
    put(config, key, node)
    if copied:  # from the top, where rules look at it that need not know of its other places
        config[key.rpartition(".")[2]] = node
    with pytest.raises(ConfigError) as caught:
        check(config)
    told = f"{key}._target_={node['_target_']}: allowed below policy"
    assert told in caught.value.problems


def put(config: Any, key: str, value: Any) -> None:
    """Set what stands at a dotted key."""
    *above, last = key.split(".")
    for name in above:
        config = config[name]
    config[int(last) if isinstance(config, list) else last] = value


def test_a_model_among_arguments_of_ones_own_is_allowed():
    check(composed("reference=another_model", "reference.path=x/y"))
    node = "{_target_: grpo_lightning.policy.hf.load, path: x/y, dtype: float32, attn_implementation: sdpa, "
    check(composed("trusted=[tests]", f"+mine={node}trust_remote_code: false}}"))


@provocation("a stranger's run directory is replayed whose rewards and recorded rows are such", "refused by its key")
def test_a_replay_gives_no_trust_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    node = "{_target_: grpo_lightning.reference.another_model, _partial_: true, path: ./bundle/model, dtype: float32}"
    own = f"{{_target_: grpo_lightning.reward.PerCompletion, function: {node}}}"
    words = ["reward=[format]", f"+reward.own={{_target_: grpo_lightning.reward.Weighted, weight: 1, function: {own}}}"]
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match=r"\+reward\.own=.* stands in the run's settings; allowed there are choices"):
        recalled(tmp_path, [], ["reward"])
    with pytest.raises(ConfigError, match=r"reward\.own\.function\.function\._target_=.*: allowed below reference"):
        recalled(tmp_path, ["trusted_settings=true"], ["reward"])


CSV = "{_target_: lightning.pytorch.loggers.CSVLogger, save_dir: '${run_dir}', name: l, version: v}"
BOARD = (
    "{_target_: lightning.pytorch.loggers.TensorBoardLogger, save_dir: '${run_dir}', name: '', version: 3, sub_dir: s}"
)
PROFILER = "{_target_: lightning.pytorch.profilers.SimpleProfiler, dirpath: '${run_dir}/p', filename: x}"


@provocation(
    "links to files of the user's where Lightning's loggers and profilers write in a stranger's run directory, in "
    "folders of any names",
    "refused in one sentence",
)
@pytest.mark.parametrize(
    ("words", "link", "key"),
    [
        (("logger=[]", f"+logger.x={CSV}"), "l/v/hparams.yaml", "logger.x"),
        (("logger=[]", f"+logger.x={CSV}"), "l", "logger.x"),
        (("logger=[]", f"+logger.x={BOARD}"), "version_3/s/hparams.yaml", "logger.x"),
        ((f"+trainer.profiler={PROFILER}",), "p/fit-x.txt", "trainer.profiler"),
    ],
)
def test_lightning_writes_through_no_link(words, link, key, tmp_path):
    run = tmp_path / "run"
    words = [*words, f"run_dir={run}"]
    (run / link).parent.mkdir(parents=True)
    (run / link).with_name("inside").mkdir()
    (run / link).symlink_to("inside")  # one that stays inside leads nowhere else
    check(composed(*words))
    (run / link).unlink()
    (run / link).symlink_to(tmp_path)
    with pytest.raises(ConfigError) as told:
        check(composed(*words))
    assert len(told.value.problems) == 1
    assert told.value.problems[0].startswith(key)
    assert "is a link" in told.value.problems[0]


@provocation("`hydra.run.dir=.`, and in it a link of a stranger's to a file of the user's beside it", REFUSED)
def test_lightning_writes_through_no_link_inside(tmp_path):
    (tmp_path / "l" / "v").mkdir(parents=True)
    (tmp_path / "l" / "v" / "hparams.yaml").symlink_to("../../mine")
    with pytest.raises(ConfigError, match=r"logger\.x: .*hparams\.yaml is a link that leads elsewhere"):
        check(composed("logger=[]", f"+logger.x={CSV}", f"run_dir={tmp_path}"))


@provocation(
    "`hydra.run.dir=~/.bashrc.d`, whose files shells run, or a hidden directory in it, or one of Python's packages",
    "refused in one sentence before a file is written, if files of others lie there",
)
@pytest.mark.parametrize("name", [".bashrc.d", ".config/bash.d", "lib/site-packages", "lib/dist-packages/x"])
def test_nothing_is_put_beside_files_that_programs_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / name
    is_python = "packages" in name
    assert (entry_problem(place) is None) == (not is_python)
    place.mkdir(parents=True)
    assert (entry_problem(place) is None) == (not is_python)
    (place / "mine.sh").write_text("")
    told = f"hydra.run.dir={place}: a hidden directory with files that are no run's, or of the home, or one of "
    assert str(entry_problem(place)).startswith(told)
    (tmp_path / "link").symlink_to(place)
    assert str(entry_problem(tmp_path / "link")).startswith(told.replace(str(place), str(tmp_path / "link")))
    assert (entry_problem(place / "run") is None) == (not is_python)
    (place / ".hydra").mkdir()  # of a run
    assert (entry_problem(place) is None) == (not is_python)
    monkeypatch.setattr(start, "START", place)
    (place / ".hydra").rmdir()
    assert (entry_problem(place) is None) == (not is_python)  # whoever starts there means it


@provocation(
    "`hydra.run.dir=~/.bashrc.d`, `callbacks.export.directory=~/.docker` or "
    "`reward.judge.function.cache=~/.bashrc.d/x`, which there are not yet: a shell would run what stands in train.log, "
    "docker what a config.json says",
    "refused in one sentence; `~/.cache`, and what the start lies in, are the user's to name",
)
def test_nothing_is_put_into_hidden_directories_of_the_home(tmp_path, monkeypatch):
    home, run = tmp_path / "me", tmp_path / "runs" / "x"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")
    monkeypatch.setattr(start, "START", home / "work")
    for place in (home / ".bashrc.d", home / ".config" / "x" / "y", home / "other" / ".hidden"):
        assert "a hidden directory with files that are no run's, or of the home, or" in str(entry_problem(place))
    for place in (home / "none" / ".." / ".bashrc.d", home / "none" / ".." / "runs"):
        assert "or that cannot be told; programs may run" in str(entry_problem(place))
    (home / ".used" / "checkpoints").mkdir(parents=True)  # as Hydra may have made it by checkpoints/..
    assert "or of the home, or" in str(entry_problem(home / ".used"))
    for place in (Path("/etc/none/x"), Path("/usr/none"), Path("/etc")):
        assert "or one of the system, " in str(entry_problem(place))
    named = (home / ".cache" / "runs", home / "work" / "runs", home / "work" / ".." / "runs", home / "work" / ".runs")
    for place in (*named, tmp_path / ".hidden"):
        assert entry_problem(place) is None
    for above in (home, tmp_path, Path("/")):
        monkeypatch.setattr(start, "START", above)
        assert entry_problem(home / ".runs") is not None
    monkeypatch.setattr(start, "START", home / ".work" / "x")
    assert entry_problem(home / ".work" / "x" / "runs") is None
    assert entry_problem(home / ".work" / "runs") is None
    assert entry_problem(home / ".config" / "runs") is not None
    export = {"_target_": "grpo_lightning.callbacks.Export", "directory": None}
    judge = {"_target_": "grpo_lightning.reward.judge.ChatJudge", "cache": None}
    refused = ("/etc/cron.d/x", "~/.docker", f"{home}/.bashrc.d/x", "~/none/../.bashrc.d")
    for place in (*refused, "~/.cache/x", None):
        settings = {"run_dir": str(run), "callbacks": {"export": export | {"directory": place}}}
        settings["reward"] = {"judge": {"function": judge | {"cache": place}}}
        told = [one for one in reach_problems(settings) if "leads into a hidden directory of the home or" in one]
        assert len(told) == 2 * (place in refused)
    used = tmp_path / ".linked" / "etc"  # with files that shells run
    used.mkdir(parents=True)
    (used / "mine.sh").touch()
    settings["callbacks"]["export"]["directory"] = str(used)
    settings["reward"]["judge"]["function"]["cache"] = f"{used}/answers.jsonl"
    assert len([one for one in reach_problems(settings) if "with files that are no run's" in one]) == 2


@provocation("`run_dir=.bashrc.d`, a hidden directory with files of the user's", "refused before a file is written")
@pytest.mark.slow
def test_no_run_is_put_beside_files_that_programs_run(tmp_path):
    (tmp_path / ".bashrc.d").mkdir()
    (tmp_path / ".bashrc.d" / "mine").write_text("")
    for word in ("run_dir=.bashrc.d", "hydra.run.dir=.bashrc.d"):
        done = begun(tmp_path, word, "debug=default")
        assert done.returncode == 1
        assert "bashrc.d: a hidden directory with files that are no run's" in done.stderr
        assert [path.name for path in (tmp_path / ".bashrc.d").iterdir()] == ["mine"]


@provocation("pipes in place of `train.log` and other files of a run, which nobody reads", "refused in one sentence")
@pytest.mark.parametrize("name", ["train.log", "summary.json", "tensorboard/events.out.tfevents.9999999999.x", ".lock"])
def test_no_pipe_is_waited_for(name, tmp_path):
    (tmp_path / "tensorboard").mkdir()
    os.mkfifo(tmp_path / name)
    if name == ".lock":
        assert not lock.is_held(tmp_path)
    else:
        told = f"{name} in it is neither a file nor a directory, and would be waited for; allowed is"
        assert str(link_problem(tmp_path)).startswith(f"hydra.run.dir={tmp_path}: {told}")


@provocation("W&B's folders of a stranger's run directory, in which a link leads out of it", "refused in one sentence")
def test_wandb_writes_through_no_link(tmp_path):
    kept = tmp_path / "run" / "wandb" / "run-1" / "logs" / "debug-core.log"
    kept.parent.mkdir(parents=True)
    kept.symlink_to(tmp_path / "cache")  # W&B's own
    assert link_problem(tmp_path / "run") is None
    (tmp_path / "run" / ".wandb").symlink_to(tmp_path)
    assert ": .wandb in it is a link to" in str(link_problem(tmp_path / "run"))
    (tmp_path / "run" / ".wandb").unlink()
    kept.with_name("debug.log").symlink_to(tmp_path / "mine")
    assert "wandb/run-1/logs/debug.log in it is a link to" in str(link_problem(tmp_path / "run"))


@provocation(
    "`trainer.logger=null` or `true`, with which Lightning makes a logger of its own in lightning_logs/", REFUSED
)
def test_lightning_makes_no_logger_by_itself(tmp_path):
    for value in ("null", "true"):
        with pytest.raises(ConfigError, match=rf"trainer\.logger={value}: allowed is a list or false"):
            check(composed(f"trainer.logger={value}"))
    check(composed("trainer.logger=false"))
    (tmp_path / "run" / "lightning_logs" / "version_1").mkdir(parents=True)
    (tmp_path / "run" / "lightning_logs" / "version_1" / "hparams.yaml").symlink_to(tmp_path / "mine")
    assert "lightning_logs/version_1/hparams.yaml in it is a link to" in str(link_problem(tmp_path / "run"))


VARYING = "{_target_: grpo_lightning.varying.Piecewise, values: [/../../bundle/], borders: [], _convert_: '/../../x'}"


@provocation(
    "an object in the place of a text, whose `repr` is a path: `logger.x.version={_target_: …Piecewise, values: "
    "[/../../bundle/], …}`",
    REFUSED,
)
@pytest.mark.parametrize("part", ["version", "name", "save_dir"])
@pytest.mark.parametrize("kind", ["CSVLogger", "TensorBoardLogger"])
def test_an_object_is_no_part_of_a_path(part, kind, tmp_path):
    config = composed("logger=[]", f"+logger.x={CSV.replace('CSVLogger', kind)}", f"run_dir={tmp_path}")
    check(config)
    for node in (config["logger"]["x"], config["trainer"]["logger"][0]):
        node[part] = OmegaConf.to_container(OmegaConf.create(VARYING))
    with pytest.raises(ConfigError, match=rf"logger\.x\.{part}=.*: allowed is text"):
        check(config)


@pytest.mark.slow
@provocation("a settings file with `run_dir: .`, in which every file would count as the run's own", REFUSED)
@pytest.mark.parametrize("lines", ["run_dir: .", "hydra: {mode: MULTIRUN, sweeper: {params: {run_dir: .}}}"])
def test_the_run_directory_is_hydras(lines, tmp_path):
    done = started(tmp_path, lines, *STEP)
    assert done.returncode == 1
    assert "run_dir=. stands in a file" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "theirs.py"}
    if lines == "run_dir: .":
        assert started(tmp_path, "steps: 1", *STEP, "run_dir=mine").returncode == 0
        assert (tmp_path / "mine" / "summary.json").exists()


@pytest.mark.slow
@provocation("a sweep's directory in which `.sweep.json` is a link to a file of the user's", "the file is as before")
def test_the_list_of_jobs_is_written_through_no_link(tmp_path):
    mine, place = tmp_path / "mine", tmp_path / "sweep"
    mine.write_text("mine")
    place.mkdir()
    (place / ".sweep.json").symlink_to(mine)
    begun(tmp_path, "-m", f"hydra.sweep.dir={place}", "seed=0,1", "steps=0")
    assert mine.read_text() == "mine"
    assert json.loads((place / "sweep.json").read_text())["jobs"] == [["seed=0", "steps=0"], ["seed=1", "steps=0"]]


def test_rollouts_are_written_through_no_link(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / f".1.jsonl.gz.{os.getpid()}").symlink_to(mine)
    files.write(tmp_path / "1.jsonl.gz", [{"a": 1}])
    assert mine.read_text() == "mine"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["1.jsonl.gz", "mine"]


@pytest.mark.parametrize("place", ["~/x", "$HOME/x", "a/${HOME}"])
def test_names_of_the_shell_are_no_places(place, tmp_path, monkeypatch):
    """TensorBoardLogger would put the user's home in their place."""
    monkeypatch.chdir(tmp_path)
    config = composed("logger=[tensorboard]", f"run_dir={tmp_path}")
    config["logger"]["tensorboard"]["save_dir"] = config["trainer"]["logger"][0]["save_dir"] = place
    with pytest.raises(ConfigError, match=r"logger\.tensorboard\.save_dir=.* nor '~' and '\$'"):
        check(config)


@provocation(
    "a settings file with a path as a tag of YAML's, `!!python/object/apply:pathlib.PosixPath [/elsewhere]`, which "
    "rules for texts would not see",
    REFUSED,
)
def test_paths_are_texts(tmp_path):
    (tmp_path / "experiment").mkdir()
    lines = "callbacks: {x: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: TAG [/elsewhere]}}"
    lines = lines.replace("TAG", "!!python/object/apply:pathlib.PosixPath")
    (tmp_path / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{lines}\n")
    words = (f"hydra.searchpath=[file://{tmp_path}]", "experiment=theirs", *STEP)
    with pytest.raises(ConfigCompositionException, match=r"callbacks\.x\.monitor=/elsewhere stands in a file that the"):
        grpo.compose(*words, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"callbacks\.x\.monitor: allowed are texts and numbers, .* PosixPath"):
        grpo.compose(*words, "trusted_settings=true", run_dir=tmp_path / "run")
    config = composed()
    config["reward"]["format"]["function"]["x"] = [PurePosixPath("x")]
    with pytest.raises(ConfigError, match=r"reward\.format\.function\.x\.0: allowed are texts and numbers, .*Posix"):
        check(config)


@pytest.mark.slow
@provocation(
    "`logger=wandb` in a stranger's run directory, below which `.git/config` names a command, with code to be saved",
    "git is not asked there; `save_code` in settings is refused by its key",
)
def test_wandb_asks_no_git(tmp_path, monkeypatch):
    place = tmp_path / "theirs"
    (place / "run" / ".wandb").mkdir(parents=True)  # where W&B would write in place of wandb, if it may choose
    (place / "file").write_text("a")
    for words in (
        ["init", "-q"],
        ["add", "file"],
        ["-c", "user.email=a@b", "-c", "user.name=a", "commit", "-qm", "x"],
        ["config", "core.fsmonitor", f"touch {tmp_path}/HIT; false"],
    ):
        subprocess.run(["git", *words], cwd=place, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SAVE_CODE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")  # which Lightning sets, and nobody takes back
    logger = WandbLogger(str(place / "run"), project="x", offline=True, settings={"silent": True, "console": "off"})
    logger.log_metrics({"a": 1.0}, 1)
    logger.finalize("success")
    assert list(place.glob("run/wandb/offline-run-*"))
    assert not list(place.glob("run/.wandb/*"))
    assert not (tmp_path / "HIT").exists()


@pytest.mark.slow
def test_wandb_does_not_start_git(tmp_path):
    (tmp_path / "git").write_text(f"#!/bin/sh\necho asked >> {tmp_path}/HIT\n")
    (tmp_path / "git").chmod(0o755)
    code = (
        "import os; from grpo_lightning.logger.wandb import WandbLogger\n"
        "logger = WandbLogger('.', project='x', offline=True, settings={'silent': True, 'console': 'off'})\n"
        "logger.log_metrics({'a': 1.0}, 1); logger.finalize('success'); print(os.environ.get('WANDB_DISABLE_GIT'))\n"
    )
    (tmp_path / "program.py").write_text(code)
    more = {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=os.environ | more, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == ["None"], done.stderr
    assert list(tmp_path.glob("wandb/offline-run-*"))
    assert not (tmp_path / "HIT").exists()


def test_wandb_is_not_told_to_save_code():
    with pytest.raises(ConfigError, match=r"logger\.wandb\.save_code: allowed are entity, group, job_type"):
        check(composed("logger=[wandb]", "+logger.wandb.save_code=true"))
    with pytest.raises(ConfigError, match=r"logger\.wandb\.sync_tensorboard: allowed are entity, group, job_type"):
        check(composed("logger=[wandb]", "+logger.wandb.sync_tensorboard=true"))
    check(composed("logger=[wandb]", "+logger.wandb.group=a", "+logger.wandb.tags=[b]"))
    check(composed("logger=[wandb]", "logger.wandb.settings=null"))


@provocation(
    "a model directory whose `auto_map` names code in a repository of the hub is trained and exported",
    "the export names no code: it was not run, and nobody is to trust it as the user's own",
)
def test_an_export_names_no_code_of_a_strangers(tmp_path):
    model = with_code(tmp_path, of="stranger/repo--")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(
        json.dumps(tokenizer | {"auto_map": {"AutoTokenizer": ["evil.T", None]}})
    )
    policy = hf.load(str(model), dtype="float32", attn_implementation="sdpa", trust_remote_code=False)
    policy.export(tmp_path / "export")
    written = {path.name: path.read_text() for path in (tmp_path / "export").glob("*.json")}
    assert {"config.json", "tokenizer_config.json"} <= written.keys()
    assert [name for name, text in written.items() if "auto_map" in text] == []
    assert not (tmp_path / "HIT").exists()
