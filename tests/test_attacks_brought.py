"""Settings that a command brings along by --config-dir or hydra.searchpath, with files of Python beside them."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import create_config_search_path
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

import grpo_lightning as grpo
from grpo_lightning import start
from grpo_lightning.advantage import centered
from grpo_lightning.composition import CONF
from grpo_lightning.composition.command import _noted
from grpo_lightning.composition.file_rules import hydra_problems
from grpo_lightning.composition.hydra_settings import problems
from grpo_lightning.composition.loader import CheckedLoader, installed, note_sources
from grpo_lightning.composition.recalled import recalled
from grpo_lightning.data.hub import Hub
from grpo_lightning.output.redaction import redacted_words
from grpo_lightning.output.shell import typed
from grpo_lightning.report.records import read_run
from grpo_lightning.settings import ConfigError, _unknown, given, trust
from grpo_lightning.settings.given import is_said, ungiven
from tests.support.composed import ROOT
from tests.support.provocations import provocation
from tests.support.too_long import STEPS, led_away
from tests.test_attacks import begun

TINY = ("steps=1", "data.prompts_per_step=4", "rollout.group_size=4", "data.validation_size=4", "logger=[]")
SCORE = "open('HIT', 'a').close()\n\n\ndef score(completions):\n    return [float(len(text)) for text in completions]\n"
REWARD = (
    "reward:\n  custom:\n    _target_: grpo_lightning.reward.Weighted\n    weight: 1.0\n"
    "    function: {_target_: NAME.score, _partial_: true}\n"
)
THEIRS = f"# @package _global_\n{REWARD}".replace("NAME", "bundle.evil")
OWN = f"defaults: [/train@_global_, _self_]\n{REWARD}".replace("NAME", "bundle.evil")
FOUND = f"hydra.searchpath=[file://{CONF}]"
HYDRA = "# @package _global_\nhydra: {callbacks: {x: {_target_: bundle.evil.score, completions: [a]}}}\n"
EXPERIMENT = "bundle/experiment/theirs.yaml"
RESOLVED = "bundle/${x}/experiment/theirs.yaml"
RESOLVING = f'{THEIRS}x: {"../" * 40}${{oc.select:"hydra.runtime.config_sources[1].path",none}}\n'
CASES = {
    "a directory": (("--config-dir", "bundle", "experiment=theirs"), EXPERIMENT, THEIRS),
    "a search path": (("hydra.searchpath=[file://bundle]", "experiment=theirs"), EXPERIMENT, THEIRS),
    "a file": (("--config-dir", "bundle", "--config-name", "own"), "bundle/own.yaml", OWN),
    "a path": (("--config-path", "HERE/bundle", "--config-name", "own", FOUND), "bundle/own.yaml", OWN),
    "a name that is resolved": (("--config-dir", "bundle/${x}", "experiment=theirs"), RESOLVED, RESOLVING),
    "beside it": (("--config-dir", "bundle/conf", "experiment=theirs"), "bundle/conf/experiment/theirs.yaml", THEIRS),
    "another folder": (("--config-dir", "conf", "experiment=theirs"), "conf/experiment/theirs.yaml", THEIRS),
    "a file elsewhere": (("experiment=BESIDE/bundle/experiment/theirs",), EXPERIMENT, THEIRS),
    "with its ending": (("experiment=BESIDE/bundle/experiment/theirs.yaml",), EXPERIMENT, THEIRS),
    "Hydra's own": (("--config-dir", "bundle", "experiment=theirs"), EXPERIMENT, HYDRA),
}


@provocation(
    "`--config-dir bundle experiment=theirs`, or `experiment=../../bundle/experiment/theirs`: settings that name a "
    "file of Python of the folder they came in, or of another folder; the same for Hydra's own (`hydra.callbacks`)",
    "refused by file and key, nothing ran; `trusted_settings=true` allows it",
)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_settings_brings_no_code(case, tmp_path):
    words, file, lines = CASES[case]
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "evil.py").write_text(SCORE)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(lines)
    (tmp_path / file).with_name("theirs.yaml.yaml").symlink_to(CONF / "train.yaml")  # is read by no one
    places = {"HERE": str(tmp_path), "BESIDE": os.path.relpath(tmp_path, CONF / "experiment")}
    places["ROOT"] = "../" * 40 + places["HERE"][1:]
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    done = begun(tmp_path, *words, *TINY)
    assert done.returncode == 1, done.stderr
    told = "theirs.yaml: hydra.callbacks.x._target_=bundle.evil.score stands in a file; allowed there are hydra.mode"
    named = ".yaml: reward.custom.function._target_=bundle.evil.score"
    assert (told if lines == HYDRA else named) in done.stderr
    assert "stands in a file" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "HIT").exists()
    if lines == HYDRA:
        return
    done = begun(tmp_path, *words, *TINY, "trusted_settings=true")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "HIT").exists()


@provocation(
    "`--config-name ../../…/theirs/own`, or `hydra/env=../../…/theirs` there or in a file's list of defaults, which "
    "Hydra finds from among its own settings",
    "refused in one sentence, nothing ran",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (("--config-name", "PLACE/own"), OWN),
        (("hydra/env=PLACE/own",), THEIRS),
        (("+hydra/env@_global_=PLACE/own",), THEIRS),
        (("hydra/env=PLACE/own",), HYDRA),
        (("--config-dir", "bundle/conf", "experiment=listed"), "# @package hydra\nrun:\n  dir: elsewhere\n"),
    ],
)
def test_hydras_own_settings_lead_nowhere(words, lines, tmp_path):
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "evil.py").write_text(SCORE)
    (tmp_path / "bundle" / "own.yaml").write_text(lines)
    place = "../" * 40 + str(tmp_path / "bundle")[1:]
    listed = tmp_path / "bundle" / "conf" / "experiment" / "listed.yaml"
    listed.parent.mkdir(parents=True)
    listed.write_text(f"defaults:\n  - /hydra/env/{place}/own@hydra\n")
    done = begun(tmp_path, *(word.replace("PLACE", place) for word in words), *TINY)
    assert done.returncode == 1, done.stderr
    told = " ".join(done.stderr.split())
    assert f"own: leads from Hydra's own settings to {tmp_path}/bundle/own.yaml; allowed are settings of conf/" in told
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "HIT").exists()


@provocation(
    "`--config-dir trusted=sympy`: a folder of settings whose name reads as what only the user may say",
    "refused by its key: an option's value is no override",
)
@pytest.mark.slow
def test_the_name_of_a_folder_says_nothing(tmp_path):
    (tmp_path / "trusted=sympy" / "experiment").mkdir(parents=True)
    (tmp_path / "trusted=sympy" / "experiment" / "theirs.yaml").write_text(
        "# @package _global_\ntrusted: [sympy]\n"
        'reward: {format: {function: {_target_: sympy.sympify, _partial_: false, a: \'open("HIT", "w")\'}}}\n'
    )
    done = begun(tmp_path, "--config-dir", "trusted=sympy", "experiment=theirs", *TINY)
    assert done.returncode == 1
    assert "theirs.yaml: 'trusted=[sympy]'; reward.format.function._target_=sympy.sympify" in done.stderr
    assert not (tmp_path / "HIT").exists()


@provocation(
    "settings in a folder `REDACTED`, trusted by a word, whose `token`s are words of commands that a sweep offers, so "
    "that `python -P -m …` would be `python REDACTED -m …`",
    "what stands there is the name of nothing: the command does not run",
)
@pytest.mark.slow
def test_no_token_makes_another_command_of_what_a_sweep_offers(tmp_path):
    (tmp_path / "REDACTED").mkdir()
    (tmp_path / "REDACTED" / "__main__.py").write_text("open('HIT', 'w')\n")
    tokens = "[python -P, such.ckpt, --nproc_per_node=2, hunter22]"
    (tmp_path / "REDACTED" / "theirs.yaml").write_text(
        f"defaults: [train, _self_]\nnote: {{tokens: {{token: {tokens}}}, text: hunter22}}\n"
    )
    words = ("-m", "--config-dir", "REDACTED", "--config-name", "theirs", "seed=0,1", "trusted_settings=true", *TINY)
    done = begun(tmp_path, *words, "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.stderr
    told = re.search(
        r"this table again: (PYTHONPATH=\S+ (REDACTED-\w+) \2 -m grpo_lightning\.report sweep)$", done.stderr.strip()
    )
    assert told, done.stderr
    assert subprocess.run(["bash", "-c", told[1]], cwd=tmp_path, capture_output=True, timeout=60).returncode
    assert not (tmp_path / "HIT").exists()
    assert "hunter22" not in (tmp_path / "sweep" / "seed=0" / ".hydra" / "config.yaml").read_text()
    at_once = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")  # whose jobs are other processes
    failed = begun(tmp_path, *words, *at_once, "checkpoint=missing/such.ckpt", "hydra.sweep.dir=other")
    logs = [log.read_text() for log in (tmp_path / "other").rglob("train.log")]
    assert sum("missing/REDACTED-" in log for log in logs) == 2
    assert not any(re.search("REDACTED(?!-)", text.replace("dir REDACTED", "")) for text in (failed.stderr, *logs))


@provocation(
    "a settings file with `hydra.sweeper.params: {seed: 1, ++seed: 7}`, which Hydra would put after the command's own "
    "`seed=5` (so, too, `policy.path` and a judge's `base_url`)",
    "the command's words come last",
)
@pytest.mark.slow
def test_parameters_of_a_file_come_before_the_command(tmp_path):
    (tmp_path / "bundle" / "experiment").mkdir(parents=True)
    (tmp_path / "bundle" / "experiment" / "theirs.yaml").write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n"
        "  sweeper: {params: {seed: 1, ++seed: 7, optimizer.lr: '1e-3,1e-4'}}\n"
    )
    words = ("--config-dir", "bundle", "experiment=theirs", "seed=5", "hydra.sweep.dir=sweep")
    done = begun(tmp_path, *words, *TINY)
    assert done.returncode == 0, done.stderr
    runs = sorted((tmp_path / "sweep").glob("*/.hydra/config.yaml"))
    assert [OmegaConf.load(run)["seed"] for run in runs] == [5, 5]
    assert sorted(OmegaConf.load(run)["optimizer"]["lr"] for run in runs) == [1e-4, 1e-3]


@provocation(
    "`--config-dir theirs callbacks.export.directory=out/${task_name}`, also as `$\\{task_name\\}`, "
    "whose file says `task_name: mine`",
    "refused by its key",
)
@pytest.mark.slow
@pytest.mark.parametrize("word", ["${task_name}", "$\\{task_name\\}"])
def test_settings_of_others_are_no_part_of_where_an_export_goes(word, tmp_path):
    (tmp_path / "here" / "bundle" / "experiment").mkdir(parents=True)
    (tmp_path / "here" / "bundle" / "experiment" / "theirs.yaml").write_text("# @package _global_\ntask_name: mine\n")
    words = ("--config-dir", "bundle", "experiment=theirs", f"callbacks.export.directory=out/{word}")
    done = begun(tmp_path / "here", *words, *TINY)
    assert done.returncode == 1
    assert "callbacks.export.directory=out/mine stands in a file" in done.stderr
    assert not (tmp_path / "mine").exists()


@provocation(
    "`--config-dir theirs hydra.run.dir='runs/${task_name}'`, whose file says `task_name: mine`",
    "refused in one sentence; without settings of others it is allowed",
)
@pytest.mark.slow
def test_settings_of_others_are_no_part_of_the_run_directory(tmp_path):
    (tmp_path / "here" / "bundle" / "experiment").mkdir(parents=True)
    (tmp_path / "here" / "bundle" / "experiment" / "theirs.yaml").write_text("# @package _global_\ntask_name: mine\n")
    (tmp_path / "mine").mkdir()
    words = ("--config-dir", "bundle", "experiment=theirs", "hydra.run.dir='runs/${task_name}'")
    done = begun(tmp_path / "here", *words, *TINY)
    assert done.returncode == 1
    assert "hydra.run.dir=runs/${task_name}: allowed in ${…} are now:, oc.env:NAME, hydra.job." in done.stderr
    assert list((tmp_path / "mine").iterdir()) == []
    done = begun(tmp_path / "here", "task_name=x", "hydra.run.dir='runs/${task_name}'", *TINY)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "runs" / "x" / "summary.json").exists()


@provocation("a start in a directory `a${x}`", "refused in one sentence: settings would put a value of theirs there")
@pytest.mark.slow
def test_the_directory_of_the_start_has_no_meaning_in_settings(tmp_path):
    (tmp_path / "a${x}").mkdir()
    done = begun(tmp_path / "a${x}", *TINY)
    assert done.returncode == 1
    assert "a${x}: settings give ${ in a name a meaning; allowed is a start elsewhere" in done.stderr
    assert list((tmp_path / "a${x}").iterdir()) == []


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory of the start with settings in a folder, a file, a folder and a package of Python."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for file in ("brought_file.py", "brought_folder/part.py", "brought_package/__init__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(SCORE.partition("\n")[2])
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    yield tmp_path
    start.forget_settings_from()
    for name in [name for name in sys.modules if name.startswith("brought_")]:
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["brought_file", "brought_folder.part", "brought_package"])
def test_files_are_trusted_by_a_word(name, here):
    lines = REWARD.replace("NAME", name)
    (here / "conf" / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{lines}")
    words = (f"hydra.searchpath=[file://{here}/conf]", "experiment=theirs", *TINY)
    told = rf"theirs\.yaml: reward\.custom\.function\._target_={name}\.score stands in a file that the command brings"
    for more in ("trusted_settings=false", f"trusted=[{name.partition('.')[0]}]", "trusted_settings=${oc.decode:true}"):
        with pytest.raises(ConfigCompositionException, match=told):
            grpo.compose(*words, more, run_dir=here / "run")
        assert name not in sys.modules
    run = grpo.compose(*words, "trusted_settings=true", run_dir=here / "run")
    assert "custom" in run.config["reward"]
    assert start.settings_from() == []


OBJECTS = """
import ctypes, functools, operator, subprocess

from lightning.pytorch import callbacks, loggers

from grpo_lightning.loss import PolicyLoss

lib = ctypes.CDLL(None)
absolute = lib.abs
called = operator.methodcaller("run")
partial = functools.partial(operator.attrgetter("run"))


def score(completions, weight=1.0):
    return [weight for _ in completions]


half = functools.partial(score, weight=0.5)
hiding = functools.update_wrapper(functools.partial(operator.attrgetter("run")), score)
wrapping = functools.update_wrapper(functools.partial(score, weight=0.5), score)


class Scorer:
    inner = operator.methodcaller("run")

    def __call__(self, completions):
        return score(completions)


scorer = Scorer()


class Logger(loggers.CSVLogger):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)


made = functools.partial(Logger, version="")
cached = functools.cache(Logger)
kept = functools.cache(score)


class Loss(PolicyLoss):
    pass


class Program(subprocess.Popen):
    pass


class Own(callbacks.Callback):
    def __init__(self, place):
        self.place = place
"""


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        ("lib.system", False),
        ("Scorer.inner", False),
        ("scorer.inner", False),
        *((name, True) for name in ("absolute", "called", "partial", "hiding", "Logger", "made", "Program", "cached")),
        *((name, True) for name in ("score", "half", "wrapping", "kept", "Scorer", "scorer", "Own", "Loss")),
    ],
)
def test_objects_that_files_of_the_users_make_are_the_users(name, is_own, here):
    (here / "brought_objects.py").write_text(OBJECTS)
    with nullcontext() if is_own else pytest.raises(trust.Elsewhere, match="allowed are parts of this package"):
        assert callable(trust.resolved(f"brought_objects.{name}"))
    start.note_settings_from([str(here / "conf")])
    for trusted in ((), ("brought_objects",)):
        with pytest.raises(trust.Elsewhere, match=r"this code may be given what settings of .*/conf say"):
            trust.resolved(f"brought_objects.{name}", trusted)


def test_a_command_without_such_settings_needs_no_word(here):
    reward = ("reward=custom", "reward.custom.function._target_=brought_folder.part.score")
    assert "custom" in grpo.compose(*reward, *TINY, run_dir=here / "run").config["reward"]
    assert start.settings_from() == []


def test_what_is_said_of_another_mistake_stays(here):
    start.note_settings_from(["conf"])
    assert trust.problems({"x": {"_target_": "os.system"}}) == [f"x._target_=os.system: allowed are {trust.ALLOWED}"]


@provocation(
    "Hydra's settings as a whole in another place: `hydra: {job_logging: '${x}'}`, `launcher`, `sweeper`, `callbacks`",
    "refused by its key",
)
@pytest.mark.parametrize("part", ["job_logging", "hydra_logging", "launcher", "sweeper", "callbacks"])
def test_parts_of_hydra_stand_where_they_are_read(part):
    variables = "" if part.endswith("_logging") else ", oc.env:NAME"
    assert problems({part: "${x}"}) == [
        f"hydra.{part}=${{x}}: allowed are now:{variables} and plain texts of hydra. in ${{…}}"
    ]
    if part.endswith("_logging"):
        assert len(problems({part: {"handlers": "${x}"}})) == 1


@provocation(
    "a data set in a folder that is called as a package which the user's own file imports if it is there (`orjson`)",
    "not found, nothing ran; `trusted=[orjson]` allows it, and files are found",
)
@pytest.mark.slow
def test_a_folder_of_data_is_not_imported_by_the_user_s_own_files(tmp_path):
    (tmp_path / "orjson").mkdir()
    (tmp_path / "orjson" / "__init__.py").write_text(SCORE)
    (tmp_path / "own_words.py").write_text("HERE = 1\n")
    (tmp_path / "orjson" / "train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(9)))
    lines = "try:\n    import orjson\nexcept ImportError as error:\n    open('WHY', 'w').write(str(error))\n"
    lines = f"import own_words\n{lines}"
    (tmp_path / "my_rewards.py").write_text(lines + SCORE.partition("\n")[2])
    words = ["data=jsonl", "data.path=orjson/train.jsonl", "reward=custom"]
    words += ["reward.custom.function._target_=my_rewards.score"]
    done = begun(tmp_path, *words, *TINY)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "HIT").exists()
    assert (
        (tmp_path / "WHY").read_text().startswith("orjson is a folder that no setting names, and may be a stranger's")
    )
    assert begun(tmp_path, *words, *TINY, "trusted=[my_rewards,orjson]").returncode == 0
    assert (tmp_path / "HIT").exists()


@provocation(
    "a settings file that says of Hydra where it writes, what it logs or calls back, or what jobs of a sweep are told "
    "of it; also by files of this project and of plug-ins that its defaults list puts below `hydra`",
    "refused by file and key; on the command line the same is checked by its value",
)
@pytest.mark.grid
@pytest.mark.parametrize(
    "lines",
    [
        "hydra: {run: {dir: there}}",
        "hydra: {sweep: {dir: there}}",
        "hydra: {verbose: true}",
        "hydra: {job: {name: x}}",
        "hydra: {callbacks: null}",
        "hydra: ${x}\nx: {callbacks: {y: {_target_: brought_file.score}}}",
        "hydra: {sweeper: '${x}'}",
        "hydra: {sweeper: {params: '${x}'}}",
        "hydra: {sweeper: {params: {hydra.run.dir: x}}}",
        "hydra: {sweeper: {params: {+hydra.callbacks.x: y}}}",
        "hydra: {sweeper: {params: {hydra: {run: {dir: x}}}}}",
        'hydra: {sweeper: {params: {"a=1 hydra.run.dir": x}}}',
        'hydra: {sweeper: {params: {"trusted=[theirs]": []}}}',
        "hydra: {sweeper: {params: {hydra.run.dir: []}}}",
        "hydra: {job_logging: {}}",
        'hydra: {sweeper: {params: {seed: "1\\n2"}}}',
        'hydra: {sweeper: {params: {seed: "1\\e[2J"}}}',
        "hydra: {sweeper: {params: {task_name: '${oc.env:HOME}'}}}",
        "hydra: {launcher: {comment: x}}",
        "hydra: {launcher: {nodes: '${x}'}}",
        "hydra: {launcher: {partition: 'a b'}}",
        "defaults: [/callbacks@hydra.callbacks: default]",
        "defaults: [/hydra/sweeper@hydra.callbacks.x: optuna]",
        "defaults: [/hydra/job_logging@hydra.hydra_logging: default]",
        "defaults: [/train@hydra.callbacks]",
        "defaults: [/other@hydra.run]",
        "defaults: [override /hydra/launcher: own]",
    ],
)
def test_files_say_next_to_nothing_of_hydra(lines, here):
    (here / "conf" / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{lines}\n")
    (here / "conf" / "other.yaml").write_text("dir: there\n")
    (here / "conf" / "hydra" / "launcher").mkdir(parents=True)
    (here / "conf" / "hydra" / "launcher" / "own.yaml").write_text("_target_: brought_file.score\n")
    with pytest.raises(ConfigCompositionException) as caught:
        grpo.compose(f"hydra.searchpath=[file://{here}/conf]", "experiment=theirs", run_dir=here / "run")
    told = str(caught.value)
    assert re.search(r"\S+\.yaml: \$?'?hydra\S*=.* stands in a file; allowed there are hydra\.mode", told), told


def test_files_may_say_what_a_sweep_is(here):
    lines = (
        "defaults: [override /hydra/sweeper: optuna, override /hydra/launcher: submitit_slurm]\n"
        "hydra:\n  mode: MULTIRUN\n"
        "  launcher: {timeout_min: 60, gpus_per_node: 1, cpus_per_task: 8, mem_gb: 32, partition: gpu-a.100}\n"
        "  sweeper: {n_trials: 3, n_jobs: 1, direction: maximize, max_failure_rate: 0.5, sampler: {seed: 1},"
        " params: {+optimizer.lr: 'tag(log, interval(1e-4, 2e-3))', seed: '0,1'}}\n"
    )
    (here / "conf" / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{lines}")
    words = (f"hydra.searchpath=[file://{here}/conf]", "experiment=theirs", *TINY)
    assert grpo.compose(*words, run_dir=here / "run").config["steps"] == 1


@provocation(
    "a settings file that the command brings along (`--config-dir`, `hydra.searchpath`) says where something is "
    "written, or by which logger, callback or profiler of Lightning's or this package's",
    "refused by file and key; on the command line the same is checked by its value",
)
@pytest.mark.parametrize(
    "lines, key",
    [
        ("run_dir: .", "run_dir=."),
        ("logger: {tensorboard: {save_dir: .}}", "logger.tensorboard.save_dir=."),
        ("logger: {a: {_target_: lightning.pytorch.loggers.CSVLogger}}", "logger.a._target_=lightning"),
        ("logger: ${x}", "logger=${x}"),
        (
            "logger: {csv: {version: {_target_: grpo_lightning.varying.Piecewise, values: [a]}}}",
            "logger.csv.version.values",
        ),
        ("trainer: {strategy: {_target_: brought_file.clean, text: deepspeed}}", "trainer.strategy._target_=brought"),
        ("policy: {_convert_: none}", "policy._convert_=none"),
        ("policy: {_convert_: null}", "policy._convert_=None"),
        ("policy: {template_kwargs: {box: {_convert_: null}}}", "policy.template_kwargs.box._convert_=None"),
        ("reward: {accuracy: {_convert_: ALL}}", "reward.accuracy._convert_=ALL"),
        ("logger: {mlflow: {tracking_uri: 'sqlite:///bundle/x.db'}}", "logger.mlflow.tracking_uri=sqlite"),
        ("logger: {tensorboard: {name: bundle}}", "logger.tensorboard.name=bundle"),
        ("logger: {wandb: {settings: {disable_git: false}}}", "logger.wandb.settings.disable_git=False"),
        ("logger: {wandb: {settings: null}}", "logger.wandb.settings=None"),
        (
            "hydra: {sweeper: {params: {logger.wandb.settings.disable_git: false}}}",
            "hydra.sweeper.params.logger.wandb.settings.disable_git=False",
        ),
        ("callbacks: {samples: '${x}'}", "callbacks.samples=${x}"),
        ("callbacks: {samples: {directory: x}}", "callbacks.samples.directory=x"),
        (
            "callbacks: {stop: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: '${x}'}}",
            "callbacks.stop.monitor=${x}",
        ),
        ("callbacks: {stop: {_target_: '${x}', monitor: a}}", "callbacks.stop._target_=${x}"),
        ("callbacks: {m: {_target_: lightning.pytorch.callbacks.ModelCheckpoint}}", "callbacks.m._target_=lightning"),
        ("callbacks: {a: {_target_: brought_file.score, x: 1}, b: {_args_: [x]}}", "callbacks.b._args_"),
        (
            "logger: {a: {_target_: brought_file.score, x: [{_target_: lightning.pytorch.loggers.CSVLogger}]}}",
            "logger.a.x",
        ),
        ("callbacks: {a: {_target_: brought_file.score, x: {_target_: '${b}'}}}", "callbacks.a.x._target_=${b}"),
        ("logger: {a: {_target_: brought_file.score, x: ['${preflight.x}']}}", "logger.a.x"),
        ("logger: {a: {_target_: brought_file.score, x: '${oc.select:b}'}}", "logger.a.x=${oc.select:b}"),
        ("trainer: {default_root_dir: x}", "trainer.default_root_dir=x"),
        ("trainer: {profiler: simple}", "trainer.profiler=simple"),
        ("trainer: {plugins: [{_target_: grpo_lightning.checkpoint.io.AtomicCheckpointIO, x: 1}]}", "trainer.plugins"),
        ("hydra: {sweeper: {params: {run_dir: .}}}", "hydra.sweeper.params.run_dir=."),
        ("hydra: {sweeper: {params: {data.verifier: a_1}}}", "hydra.sweeper.params.data.verifier=a_1"),
        ("hydra: {sweeper: {params: {++seed.trusted: a}}}", "hydra.sweeper.params.++seed.trusted=a"),
        ("hydra: {sweeper: {params: {++trusted: a}}}", "hydra.sweeper.params.++trusted=a"),
        ("hydra: {sweeper: {params: {environment.tools: '[a]'}}}", "hydra.sweeper.params.environment.tools=[a]"),
        ("hydra: {sweeper: {params: {data.task: 'b,bundle.e'}}}", "hydra.sweeper.params.data.task=b,bundle.e"),
        ("hydra: {sweeper: {params: {data.task: é.e}}}", "hydra.sweeper.params.data.task=é.e"),
        ("hydra: {sweeper: {params: {+logger.csv.name: x}}}", "hydra.sweeper.params.+logger.csv.name=x"),
        *(
            (
                f"hydra: {{sweeper: {{params: {{{key}: {value}}}}}}}",
                f"hydra.sweeper.params.{key}={value.strip(chr(39))}",
            )
            for key, value in (
                ("trusted", "x"),
                ("policy.path", "x"),
                ("++policy.trust_remote_code", "x"),
                ("reward.judge.function.cache", "x"),
                ("reward.custom.function._target_", "x"),
                ("+reward.custom.function", "'{a: b}'"),
                ("policy.system_prompt", "a/b"),
            )
        ),
        ("hydra: {sweeper: {params: {seed: '${x}'}}}", "hydra.sweeper.params.seed=${x}"),
        (
            "hydra: {sweeper: {params: {trusted: '$\\{x.$\\{c\\}\\}'}}}",
            "hydra.sweeper.params.trusted=$\\{x.$\\{c\\}\\}",
        ),
    ],
)
@pytest.mark.grid
def test_files_that_are_brought_along_say_not_where_to_write(lines, key, here):
    (here / "conf" / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{lines}\n")
    with pytest.raises(ConfigCompositionException) as caught:
        grpo.compose(f"hydra.searchpath=[file://{here}/conf]", "experiment=theirs", run_dir=here / "run")
    name, sign, value = key.partition("=")
    told = str(caught.value)
    assert (typed(name, value) if sign else key) in told[told.index("experiment/theirs.yaml: ") :]
    assert "stands in a file" in told


@provocation(
    "a run whose directory is the home directory, and settings that the command brings along with a judge whose "
    "`cache` lies there in `.bashrc.d`, where a shell would run the answers that the judge's name is written to",
    "refused by its key",
)
def test_a_stranger_hides_no_file_in_the_run_directory(here):
    node = {"_target_": "grpo_lightning.reward.judge.ChatJudge", "cache": f"{here}/run/.bashrc.d/judge.jsonl"}
    config = {"run_dir": str(here / "run"), "reward": {"judge": {"function": node}}}
    assert given.ungiven(config, []) == []  # of one's own
    start.note_settings_from([str(here / "conf")])
    (told,) = given.ungiven(config, [])
    assert told.startswith(f"reward.judge.function.cache={node['cache']} stands in a file")
    for plain in ("judge.jsonl", "asked/judge.jsonl"):
        node["cache"] = f"{here}/run/{plain}"
        assert given.ungiven(config, []) == []


@provocation(
    "settings that the command brings along with keys that are called much like what only the user may say (`truste: "
    "mine`, `run_dirs: ~`)",
    "`trusted=mine` is not offered",
)
@pytest.mark.parametrize(("key", "meant"), [("truste", "trusted"), ("run_dirs", "run_dir")])
def test_nothing_that_only_the_user_says_is_offered(key, meant, here, monkeypatch):
    monkeypatch.setenv("GRPO_LIGHTNING_GIVEN", "[]")
    (told,) = _unknown({key: "mine"})
    assert told == f"{key}=mine: unknown; the nearest is {meant}=mine"  # of one's own
    start.note_settings_from([str(here / "conf")])
    assert not any(meant in told for told in _unknown({key: "mine"}))
    assert list(_unknown({"stepps": 8})) == ["stepps=8: unknown; the nearest is steps=8"]
    start.note_words([f"+{key}=mine"])
    assert list(_unknown({key: "mine"})) == [told]


@provocation(
    "a command whose run directory is named by Hydra's words for a job, `hydra.run.dir=runs/${hydra.job.id} "
    "hydra.job.id=${task_name}` or `${hydra.job.override_dirname}` beside `a=${task_name}`, and settings that it "
    "brings along with a `task_name` of `../../.bashrc.d`",
    "refused by its key; of overrides `${` is left out there",
)
@pytest.mark.slow
def test_no_stranger_says_what_hydras_words_for_a_job_are(here, monkeypatch):
    (here / "conf" / "experiment" / "theirs.yaml").write_text("# @package _global_\ntask_name: elsewhere\n")
    words = [f"hydra.searchpath=[file://{here}/conf]", "experiment=theirs"]
    with installed(), initialize_config_dir(str(CONF), version_base="1.3"):
        for key in ("id", "name"):
            with pytest.raises(ConfigCompositionException, match=rf"hydra.job.{key}=\$\{{task_name\}}: allowed in"):
                compose("train", [*words, f"hydra.job.{key}=${{task_name}}"], return_hydra_config=True)
        job = compose("train", [*words, "+names=${task_name}"], return_hydra_config=True).hydra.job
        assert "names={task_name}" in job.override_dirname
    with installed(), initialize_config_dir(str(CONF), version_base="1.3"):  # of one's own
        job = compose("train", ["+names=${task_name}"], return_hydra_config=True).hydra.job
        assert "names=${task_name}" in OmegaConf.to_container(job, resolve=False)["override_dirname"]


@provocation(
    "`compose('hydra.run.dir=runs/${task_name}')` with settings that a program brings along, whose `task_name` is "
    "`../../.bashrc.d`",
    "refused by its key, as on the command line; `${oc.env:NAME}` is allowed",
)
@pytest.mark.slow
@pytest.mark.parametrize("key", ["hydra.run.dir", "run_dir", "++run_dir"])
def test_no_stranger_says_a_part_of_the_run_directory(key, here, monkeypatch):
    (here / "conf" / "experiment" / "theirs.yaml").write_text("# @package _global_\ntask_name: elsewhere\n")
    words = (f"hydra.searchpath=[file://{here}/conf]", "experiment=theirs")
    with pytest.raises(
        ConfigError, match=r"run_dir=runs/\$\{task_name\}: allowed in \$\{…\} are now:, oc.env:NAME and"
    ):
        grpo.compose(*words, f"{key}=runs/${{task_name}}")
    monkeypatch.setenv("JOB", "7")
    assert grpo.compose(*words, f"{key}=runs/${{oc.env:JOB}}").config["run_dir"] == "runs/7"
    assert grpo.compose("task_name=x", f"{key}=runs/${{task_name}}").config["run_dir"] == "runs/x"


@pytest.mark.parametrize("word", ["${tags}", "$\\{tags\\}", "[$\\{tags.0\\}]"])
def test_no_file_has_references_in_a_sweep(word):
    (told,) = hydra_problems("own.yaml", {"sweeper": {"params": {"seed": word}}})
    assert told.startswith(f"own.yaml: {typed('hydra.sweeper.params.seed', word)} stands in a file")
    assert hydra_problems("own.yaml", {"sweeper": {"params": {"policy.path": "a/b,c/d"}}}) == []


@provocation(
    "`--config-dir theirs trusted=$\\{tags\\}`, whose file says `tags: [tags]`, or such a word in a command that a "
    "message offers",
    "counts as the file's word",
)
@pytest.mark.parametrize("word", ["${tags}", "$\\{tags\\}", "[$\\{tags.0\\}]"])
def test_a_reference_is_no_word_of_the_users(word, here, monkeypatch):
    told = ["trusted stands in a file; allowed is to give it on the command line, or to compose"]
    assert ungiven({"trusted": ["tags"]}, [f"trusted={word}"]) == []
    start.note_settings_from([str(here / "conf")])
    assert ungiven({"trusted": ["tags"]}, [f"trusted={word}"]) == told
    assert ungiven({"trusted": ["tags"]}, ["trusted=[tags]"]) == []


@provocation(
    "`--config-dir theirs logger.mlflow.tracking_uri='http://me:${task_name}@host'`, of which a part is hidden where "
    "the command is noted, and whose file says `task_name: x@evil.com`",
    "counts as the file's word",
)
def test_what_is_hidden_of_a_word_has_a_reference_all_the_same(here, monkeypatch):
    key = "logger.mlflow.tracking_uri"
    for word, is_own in (
        (f"{key}=http://me:${{task_name}}@host", False),
        (f"{key}=http://me:$\\{{task_name\\}}@host", False),
        (f"{key}=http://me:pass@host", True),
        (f"{key}=http://me:${{oc.env:PASSWORD}}@host", True),
        (f"{key}=http://host", True),
        (f"{key}=http://${{task_name}}", False),
    ):
        (redacted,) = redacted_words([word])
        noted = _noted(word, redacted)
        assert "pass" not in noted.lower().replace("oc.env:pass", "")
        start.note_words([noted])
        start.note_settings_from([str(here / "conf")])
        assert is_said(key) == is_own, word
        start.forget_settings_from()
        assert is_said(key)
    monkeypatch.delenv("GRPO_LIGHTNING_GIVEN")


@provocation(
    "a folder of settings that is a link to this project's own conf/ for the operating system, and to itself for Hydra",
    "refused in one sentence; counts as brought along",
)
def test_a_folder_of_settings_is_what_hydra_takes_it_for(here):
    theirs = here / "their" / str(CONF).lstrip("/")
    (theirs / "experiment").mkdir(parents=True)
    (theirs / "experiment" / "theirs.yaml").write_text("# @package _global_\nrun_dir: x\n")
    link = here / "theirs"
    link.symlink_to(f"their/{led_away(here / 'their', Path('/'))}{'/..' * STEPS}{CONF}")
    assert link.samefile(CONF)
    with pytest.raises(
        ConfigCompositionException, match=r"experiment/theirs: is by a link \S+/theirs\.yaml, which may"
    ):
        grpo.compose(f"hydra.searchpath=[file://{link}]", "experiment=theirs", run_dir=here / "run")
    note_sources(OmegaConf.create({"runtime": {"config_sources": [{"schema": "file", "path": str(link)}]}}))
    assert start.settings_from() == [str(link)]


WRITES = """
def note(text: str, directory: str = "notes") -> str:
    \"\"\"Keep a text.

    Args:
        text: What to keep.
        directory: Where.
    \"\"\"
    return text


def kept(completions, save_dir):
    return [0.0] * len(completions)


class Kept:
    def __init__(self, other=None):
        self.other = other
"""


@provocation(
    "settings that the command brings along which name a function of the user's own: as a reward, a tool, a callback",
    "refused by file and key before anything is imported; allowed is `trusted_settings=true`",
)
@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            "defaults: [override /environment: tools]\nenvironment: {function: {tools: [brought_notes.note]}}\n",
            "'environment.function.tools=[brought_notes.note]'",
        ),
        (REWARD.replace("NAME.score", "brought_notes.kept"), "reward.custom.function._target_=brought_notes.kept"),
        ("callbacks: {mine: {_target_: brought_notes.Kept}}\n", "callbacks.mine._target_=brought_notes.Kept"),
        ("optimizer: {_target_: brought_notes.Kept}\n", "optimizer._target_=brought_notes.Kept"),
        ("data: {map_row: {_target_: brought_notes.note}}\n", "data.map_row._target_=brought_notes.note"),
    ],
)
def test_the_users_code_is_named_by_no_file(lines, told, here):
    (here / "brought_notes.py").write_text(WRITES)
    (here / "conf" / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{lines}")
    words = (f"hydra.searchpath=[file://{here}/conf]", "experiment=theirs", *TINY)
    for more in ("trusted=[brought_notes]", "trusted_settings=no"):
        with pytest.raises(ConfigCompositionException) as caught:
            grpo.compose(*words, more, run_dir=here / "run")
        assert f"theirs.yaml: {told} stands in a file that the command brings along; allowed there are" in str(
            caught.value
        )
        assert "brought_notes" not in sys.modules


def test_all_of_composing_is_without_a_programs_resolvers():
    OmegaConf.register_new_resolver("noted", str)
    try:
        with installed():  # where lists of defaults are looked at more than once
            assert not OmegaConf.has_resolver("noted")
            assert OmegaConf.has_resolver("oc.env")
        assert OmegaConf.has_resolver("noted")
    finally:
        OmegaConf.clear_resolver("noted")


@provocation(
    "a file of the user's that registers a resolver such as `eval`: named by the command (a callback of Hydra's; a "
    "reward, in a sweep whose jobs run in one process), or a plug-in of Hydra's; and settings that the command brings "
    "along, which call it, in a value or in a list of defaults",
    "refused by its key, nothing ran; without such settings the command's own words may call it",
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["callback", "sweep", "plug-in", "plug-in, in defaults"])
def test_the_users_own_resolvers_are_not_a_strangers(kind, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from hydra.experimental.callback import Callback\nfrom omegaconf import OmegaConf\n\n\n"
        "OmegaConf.register_new_resolver('noted', lambda text: open('HIT', 'a').write(str(text)), replace=True)\n\n\n"
        "class Told(Callback):\n    pass\n\n\n"
        "def short(completions):\n    return [-len(one) for one in completions]\n"
    )
    (tmp_path / "theirs" / "experiment").mkdir(parents=True)
    lines = "task_name: ${noted:1}" if "defaults" not in kind else "defaults: ['${noted:1}']"
    (tmp_path / "theirs" / "experiment" / "two.yaml").write_text(f"# @package _global_\n{lines}\n")
    if "plug-in" in kind:
        (tmp_path / "site" / "hydra_plugins" / "mine").mkdir(parents=True)
        (tmp_path / "mine.py").rename(tmp_path / "site" / "hydra_plugins" / "mine" / "__init__.py")
        words, more = [], {"PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}"}
    elif kind == "callback":
        words, more = ["+hydra.callbacks.told._target_=mine.Told"], {}
    else:
        (tmp_path / "theirs" / "experiment" / "one.yaml").write_text("# @package _global_\ntags: [a]\n")
        words = ["reward=[custom]", "reward.custom.function._target_=mine.short", "hydra.sweep.dir=swept"]
        more = {"SLURM_PROCID": "0"}  # which has all jobs run in one process
    brought = ["--config-dir", "theirs", *words, f"experiment={'one,' if kind == 'sweep' else ''}two"]
    done = begun(tmp_path, *(["-m"] if kind == "sweep" else []), *brought, *TINY, **more)
    told = (
        "Error resolving interpolation 'experiment/${noted:1}'" if "defaults" in kind else "stands in a file that the"
    )
    assert told in done.stderr
    assert not (tmp_path / "HIT").exists()
    if kind != "sweep":
        done = begun(tmp_path, *words, "task_name=x${noted:1}", *TINY, **more)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "HIT").exists()


@pytest.mark.parametrize(
    "word",
    [
        "reward.accuracy.weight=${noted:1}",
        "tags=[a,'b ${oc.select:${noted:1}}']",
        "+x={y: '${${oc.select:task_name}:1}'}",
    ],
)
def test_a_run_that_is_scored_anew_calls_no_resolver_of_a_programs(word, tmp_path):
    called = []
    OmegaConf.register_new_resolver("noted", lambda text: called.append(text) or "dr_grpo")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps(["steps=1", word]))
    try:
        with pytest.raises(ConfigError, match=r"stands in the run's settings; allowed there are"):
            recalled(tmp_path, [], ("reward", "advantage"))
    finally:
        OmegaConf.clear_resolver("noted")
    assert not called


@provocation(
    "a stranger's run directory is replayed with a reward whose file registers a resolver such as `eval`, which a "
    "verifier of reasoning_gym would call when it compares a recorded completion with what settings say",
    "it is not called",
)
def test_nor_do_the_rewards_that_score_it(tmp_path):
    code = (
        "import runpy, sys\nfrom omegaconf import OmegaConf\nfrom grpo_lightning import start\n"
        "OmegaConf.register_new_resolver('noted', str)\n"
        "try:\n    runpy.run_module('grpo_lightning.replay', run_name='__main__')\nexcept SystemExit:\n    pass\n"
        "for places in ([], ['theirs']):\n    start.note_settings_from(places)\n"
        "    print(OmegaConf.create(['${noted:1}']) == ['1'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr


@provocation(
    "settings that are brought along to a program and hand a function that it has given to `compose` to something "
    "else, which calls it with arguments of theirs",
    "refused by its key",
)
@pytest.mark.slow
def test_a_programs_objects_stand_in_their_own_places(here):
    called = []

    def compiles(completions, compiler="cc", **columns):
        called.append(compiler)
        return [0.0] * len(completions)

    words = (f"hydra.searchpath=[file://{here}/conf]", "experiment=theirs", *TINY)
    part = "{_target_: grpo_lightning.composition.part, name: reward.compiles}"
    environment = (
        "environment: {_target_: grpo_lightning.environment.Environment, max_turns: 2, function: {_target_: "
        f"grpo_lightning.environment.gymnasium.Gymnasium, make: {part}, kwargs: {{completions: [x], compiler: evil}}, "
        "actions: {left: 0}}}"
    )
    for lines, key in (
        (environment, "environment.function.make"),
        (f"reward: {{other: {{_target_: grpo_lightning.reward.Weighted, function: {part}}}}}", "reward.other.function"),
        (f"callbacks: {{other: {part}}}", "callbacks.other"),
        ("callbacks: {other: '${reward.compiles.function}'}", "callbacks.other"),
    ):
        (here / "conf" / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{lines}\n")
        with pytest.raises(ConfigCompositionException, match="stands in a file that the command brings along"):
            grpo.compose(*words, reward={"compiles": compiles}, run_dir=here / "run")
        with pytest.raises(ConfigError) as error:  # nor in settings of the user's own
            grpo.compose(*words, "trusted_settings=true", reward={"compiles": compiles}, run_dir=here / "run").fit()
        assert f"{key}._target_=grpo_lightning.composition.part" in str(error.value)
    (here / "conf" / "experiment" / "theirs.yaml").write_text("# @package _global_\nsteps: 1\n")
    grpo.compose(*words, "trusted_settings=true", reward={"compiles": compiles}, run_dir=here / "run").fit()
    assert set(called) == {"cc"}


@provocation(
    "settings that are brought along to a program with a resolver of its own, such as `eval`, and call it: in a value, "
    "in an argument, by a name that is put together, among the defaults",
    "refused by its key; its own words may call it",
)
@pytest.mark.grid
@pytest.mark.parametrize(
    "lines",
    [
        "task_name: ${noted:1}",
        "policy: {system_prompt: [a, 'b ${oc.select:${noted:1}}']}",
        "tags: ['${${oc.select:task_name}:1}']",
        "defaults: ['${noted:1}']",
        "defaults: [{override /loss: '${noted:1}'}]",
        "defaults: [{override /reward: [accuracy, '${noted:1}']}]",
        "defaults: [{override /loss: '${${oc.select:seed}:1}'}]",
        "names: {'x}${noted:1': 1}\ntags: ${oc.dict.values:names}",
        "names: {'${noted:1}': 1}\ntags: ${oc.dict.keys:names}",
        "callbacks: {'x}${noted:1': {a: 1}}",
        "noted: {'x:1': 1}\ntags: ${oc.dict.values:noted}",
        "empty: ''\nvalidation: {every: '\\${noted:1}${empty}'}",
        "empty: ''\ndata: {verifier: '\\${noted:1}${empty}'}",
        "empty: ''\nadvantage: {note: '\\${noted:1}${empty}'}",
        "defaults: [{'/names/q}${noted:1}${steps/../../advantage': centered}, _self_]\nnames: {q: a}\n"
        "tags: ${oc.dict.values:names}",
        "defaults: '${noted:1}'",
        "hydra: '${noted:1}'",
    ],
)
def test_a_programs_own_resolvers_are_its_own(lines, here):
    called: list[str] = []
    parts = {"data": [{"prompt": one} for one in "abcd"], "advantage": centered} if "empty" in lines else {}
    OmegaConf.register_new_resolver("noted", lambda text: called.append(text) or "dr_grpo")
    (here / "conf" / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{lines}\n")
    try:
        with pytest.raises((ConfigCompositionException, ConfigError)) as error:
            grpo.compose(
                f"hydra.searchpath=[file://{here}/conf]", "experiment=theirs", **parts, run_dir=here / "run"
            ).fit()
        assert not called
        grpo.compose("task_name=${noted:1}", *TINY, run_dir=here / "run")
    finally:
        OmegaConf.clear_resolver("noted")
    assert called
    if lines.startswith("task_name"):
        assert "'task_name=\"$…{noted:1}\"' stands in a file that the command brings along" in str(error.value)


@provocation(
    "settings that the command brings along with `trainer.num_nodes=2` or `trainer.devices=2`: a process would listen "
    "for another one, which could be anybody's on the network, and read its pickles",
    "refused by its key; allowed on the command line, as by `trainer=ddp`",
)
def test_how_many_processes_there_are_is_said_by_the_user(here):
    config = {"run_dir": "run", "trainer": {"devices": "auto"}}
    assert given.ungiven(config, []) == []
    start.note_settings_from([str(here / "conf")])
    told = "trainer.devices stands in a file; allowed is to give it on the command line, or to compose"
    assert given.ungiven(config, []) == [told]
    assert given.ungiven(config, ["trainer=cpu"]) == given.ungiven(config, ["trainer=auto"]) == [told]
    for word in ("trainer.devices=2", "trainer=ddp", "trainer={devices: 2}", "trainer="):
        assert given.ungiven(config, [word]) == []
    assert given.ungiven({"run_dir": "run", "trainer": {"devices": 1}}, []) == []
    start.forget_settings_from()
    config = {"run_dir": "run", "trainer": {"num_nodes": 2}}
    assert given.ungiven(config, []) == []
    start.note_settings_from([str(here / "conf")])
    told = "trainer.num_nodes stands in a file; allowed is to give it on the command line, or to compose"
    assert given.ungiven(config, []) == [told]
    assert given.ungiven(config, ["+trainer.num_nodes=2"]) == []
    assert given.ungiven(config, ["trainer=ddp"]) == [told]
    assert given.ungiven({"run_dir": "run", "trainer": {"num_nodes": 1}}, []) == []


def test_groups_that_are_brought_along_say_no_more(here):
    (here / "conf" / "logger").mkdir()
    (here / "conf" / "logger" / "own.yaml").write_text("own: {_target_: lightning.pytorch.loggers.CSVLogger}\n")
    with pytest.raises(ConfigCompositionException, match=r"logger/own\.yaml: logger\.own\._target_=lightning"):
        grpo.compose(f"hydra.searchpath=[file://{here}/conf]", "logger=own", run_dir=here / "run")


def test_what_is_learned_and_how_may_be_brought_along(here):
    lines = (
        "defaults: [override /logger: [csv], override /trainer: cpu, override /algorithm: dapo]\n"
        "steps: 3\nloss: {kl_coef: 0.0}\ntrainer: {precision: 32-true, devices: 1, gradient_clip_val: null}\n"
        "callbacks:\n  samples: null\n  progress: {every: 2}\n"
        "  stop: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/pass@1, mode: max, patience: 3}\n"
        "logger: {csv: {flush_logs_every_n_steps: 5}}\n"
    )
    (here / "conf" / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{lines}")
    words = (f"hydra.searchpath=[file://{here}/conf]", "experiment=theirs")
    config = grpo.compose(*words, run_dir=here / "run").config
    assert (config["steps"], config["trainer"]["precision"], list(config["logger"])) == (3, "32-true", ["csv"])


@pytest.mark.grid
@pytest.mark.parametrize(
    "file", [*CONF.glob("experiment/*.yaml"), *CONF.glob("sweep/*.yaml")], ids=lambda one: one.stem
)
def test_the_files_of_this_project_could_be_brought_along(file, here):
    (here / "conf" / file.parent.name).mkdir(exist_ok=True)
    (here / "conf" / file.parent.name / "theirs.yaml").write_text(file.read_text())
    with installed(), initialize_config_dir(str(CONF), version_base="1.3"):
        compose("train", [f"hydra.searchpath=[file://{here}/conf]", f"{file.parent.name}=theirs"])
    assert start.settings_from() == [str(here / "conf")]


@provocation(
    "settings that the command brings along with a folder called as a setting is that the command gives, such as "
    "`policy.path/` or `trusted/`: Hydra takes `policy.path=mine` for the choice of a file there, or of none",
    "refused, whatever is in the folder",
)
@pytest.mark.parametrize("content", ["a file that is chosen", "a file that is optional", "nothing"])
@pytest.mark.parametrize("key", ["policy.path", "trusted", "checkpoint", "reward.judge.function.cache", "task_name"])
def test_no_folder_is_called_as_a_setting(key, content, here):
    folder = here / "conf" / key
    folder.mkdir(parents=True)
    listed = {"a file that is chosen": f"/{key}: mine", "a file that is optional": f"optional /{key}: none"}
    if content in listed:
        (folder / "mine.yaml").write_text("# @package _global_\npolicy: {system_prompt: theirs}\n")
    theirs = f"defaults: [{{{listed[content]}}}]\n" if content in listed else "steps: 3\n"
    (here / "conf" / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{theirs}")
    given = (f"hydra.searchpath=[file://{here}/conf]", "experiment=theirs")
    told = rf"{re.escape(key)}=mine: {re.escape(key)} is a setting, and where settings are looked for"
    for sign in ("", "+", "++") if content == "nothing" else ("",):
        with pytest.raises((ConfigCompositionException, ConfigError), match=told):
            grpo.compose(*given, f"{sign}{key}=mine", run_dir=here / "run")


def test_folders_of_ones_own_are_chosen_from(here):
    (here / "conf" / "mine").mkdir()
    (here / "conf" / "mine" / "a.yaml").write_text("# @package _global_\nseed: 7\n")
    (here / "conf" / "experiment" / "theirs.yaml").write_text("# @package _global_\ndefaults: [{/mine: a}]\n")
    run = grpo.compose(f"hydra.searchpath=[file://{here}/conf]", "experiment=theirs", run_dir=here / "run")
    assert run.config["seed"] == 7
    run = grpo.compose(f"hydra.searchpath=[file://{here}/conf]", "+mine=a", "steps=2", run_dir=here / "run")
    assert (run.config["seed"], run.config["steps"]) == (7, 2)


@provocation(
    "`--config-dir theirs -m 'policy=glob(*)'` with a file called `{system_prompt: \"${oc.env:HF_TOKEN}\"}.yaml`, "
    "which would be a mapping that the command says",
    "it is no choice",
)
def test_what_glob_finds_are_names(tmp_path):
    (tmp_path / "policy").mkdir()
    for name in (
        '{system_prompt: "${oc.env:HF_TOKEN}"}',
        "{_target_: os.system}",
        "${x}",
        "a b",
        "a,b",
        "mine",
        "mine-2.5",
    ):
        (tmp_path / "policy" / f"{name}.yaml").write_text("path: x\n")
    loader = CheckedLoader(create_config_search_path(str(tmp_path)))
    assert loader.get_group_options("policy") == ["mine", "mine-2.5"]
    [glob] = OverridesParser.create(loader).parse_overrides(["policy=glob(*)"])
    assert list(glob.sweep_string_iterator()) == ["mine", "mine-2.5"]


@provocation(
    "brought settings, a stranger's run or a README with a tag of YAML that a program has registered, such as `!env` "
    "or `!eval`",
    "the tag is unknown; it is not called",
)
def test_tags_of_yaml_that_a_program_has_registered(tmp_path, monkeypatch):
    heard = []
    for kind in (yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        monkeypatch.setattr(kind, "yaml_constructors", dict(kind.yaml_constructors))
        kind.add_constructor("!eval", lambda loader, node: heard.append(node.value))
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "theirs.yaml").write_text("# @package _global_\ntask_name: !eval MY_KEY\n")
    with installed(), initialize_config_dir(str(CONF), version_base="1.3"), pytest.raises(ConfigCompositionException):
        compose("train", overrides=[f"hydra.searchpath=[file://{tmp_path}]", "experiment=theirs"])
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- !eval MY_KEY\n")
    with pytest.raises(ValueError, match=r"overrides\.yaml is damaged"):
        recalled(tmp_path, [], ["loss"])
    (tmp_path / "summary.json").write_text("{}")
    assert list(read_run(tmp_path).overrides) == []
    (tmp_path / "README.md").write_text("---\nconfigs: !eval MY_KEY\n---\n")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="could not determine a constructor for the tag '!eval'"):
        Hub(str(tmp_path), "train")
    assert heard == []
    assert yaml.safe_load("!eval x") is None
    assert heard == ["x"]  # it still is the program's
