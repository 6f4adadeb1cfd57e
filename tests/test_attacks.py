"""Commands of someone who controls settings and wants to run code, and settings with secrets: real processes."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException

import grpo_lightning as grpo
from grpo_lightning.composition.resolvers import resolver_problems
from tests.support import prepared
from tests.support.composed import ROOT
from tests.support.provocations import provocation
from tests.support.running import SMALL

pytestmark = pytest.mark.slow
REFUSED = "refused by its key, nothing ran, exit 1"
MINE = "import os\nfrom joblib import load\nfrom sympy import S, sympify\n"


def start(place: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """train.py, started in a directory of one's own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more
    command = [sys.executable, str(ROOT / "train.py"), *words]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)


def begun(place: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The same where it does not matter what Python finds and imports first."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more
    return prepared.run([str(ROOT / "train.py"), *words], cwd=place, env=environment)


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=provocation("`" + "` `".join(words) + "`", REFUSED))
        for words in (
            ("+reward.format.function.loss={_target_: numpy.load, file: x.npy, allow_pickle: true}",),
            ("+reward.format.function.trainer={_target_: torch.load, f: x.npy, weights_only: false}",),
            ('+module.schedule.x={_target_: sympy.sympify, a: \'open("HIT","w")\'}',),
            ("loss.kl._target_=torch.hub.load",),
            ("loss.kl._target_=torch.os.system",),
            (
                "loss.kl._target_=torch.utils.collect_env.run",
                "+loss.kl.command=touch HIT",
            ),
            ("+hydra.callbacks={x: {_target_: os.system, command: touch HIT}}",),
            ("+evil={_target_: os.system, command: touch HIT}", "+hydra.callbacks.x=${evil}"),
            ("+hydra.hydra_logging.handlers.x={class: os.system, command: touch HIT}",),
            ("+hydra.job_logging.formatters.x.format='${oc.env:HF_TOKEN} %(message)s'",),
            ("hydra.launcher._target_=os.system",),
            ("+hydra.job.env_set.LD_PRELOAD=./x.so",),
            ("+hydra.job.env_copy=[PYTHONPATH]",),
            ("hydra.searchpath=[pkg://antigravity]",),
            ("hydra.output_subdir=.hydra",),
            (
                "+hydra.env.e={name: a, id: a, num: 0, chdir: false, config_name: a, override_dirname: '', "
                "env_set: {LD_PRELOAD: ./x.so}, env_copy: [], "
                "config: {override_dirname: {kv_sep: '=', item_sep: ',', exclude_keys: []}}}",
                "hydra.job=${hydra.env.e}",
            ),
            (
                '+evil={dir: HIT, subdir: {_target_: sympy.sympify, a: \'open("HIT","w")\'}}',
                "hydra.sweep=${evil}",
                "+hydra.callbacks.x=${hydra.sweep.subdir}",
            ),
            ("--experimental-rerun=x.npy",),
            ("--exp", "x.npy"),
            ("-sc", "query=bash"),
            ("--shell", "install=bash"),
            ("-cp", "pkg://mine"),
            ("--config-path=structured://mine",),
            ("hydra.searchpath=[structured://mine]",),
            ("+hydra.callbacks.a={_target_: hydra.experimental.callbacks.logging.io.open, file: HIT, mode: w}",),
            ("+hydra.callbacks.a={_target_: mine.os.system, command: touch HIT}",),
            ("+hydra.job.env_set.NCCL_NET_PLUGIN=./x.so",),
            ("trusted=[os]", "loss.kl._target_=os.system"),
            ("reward.format.function._target_=mine.os.system", "+reward.format.function.command=touch HIT"),
            ("reward.format.function._target_=mine.sympify", '+reward.format.function.a=\'open("HIT","w")\''),
            ("reward.format.function._target_=mine.S", '+reward.format.function.a=\'open("HIT","w")\''),
            ("reward.format.function._target_=mine.load", "+reward.format.function.filename=x.npy"),
        )
    ],
)
def test_settings_run_no_code(words, tmp_path):
    with (tmp_path / "x.npy").open("wb") as file:
        pickle.dump(Touch(tmp_path / "HIT"), file)
    (tmp_path / "mine.py").write_text(MINE if "=mine." in words[0] else "import os\n")
    done = begun(tmp_path, *SMALL[:11], "reward=[format]", *words)
    assert done.returncode == 1
    assert "allowed" in done.stderr or "from directories" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "HIT").exists()


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(lines, marks=provocation(f"a settings file with `{lines}`", REFUSED))
        for lines in (
            "hydra: {callbacks: {x: {_target_: os.system, command: touch HIT}}}",
            "hydra: {job_logging: {formatters: {x: {(): os.system, command: touch HIT}}}}",
            "hydra: {job_logging: {filters: {x: '${evil}'}}}\nevil: {(): os.system, command: touch HIT}",
            "hydra: {hydra_logging: {handlers: {x: {class: logging.StreamHandler, stream: 'ext://os.environ'}}}}",
            "hydra: {hydra_logging: {handlers: {x: {class: logging.FileHandler, filename: HIT, mode: w}}}}",
            "hydra: {runtime: {choices: {e: '${evil}'}}, callbacks: {x: '${hydra.runtime.choices.e}'}}\n"
            "evil: {_target_: os.system, command: touch HIT}",
            "reward: {format: {function: {x: '\\${oc.create:\"{_target_: os.system, command: touch HIT}\"}'}}}",
            'trusted: [sympy]\nreward: {format: {function: {_target_: sympy.sympify, a: \'open("HIT","w")\'}}}',
            "policy: {trust_remote_code: true}",
            "policy: {trust_remote_code: {x: 1}}",
            "reference: {trust_remote_code: '${policy.share_prompts}'}",
            "hydra: {mode: MULTIRUN, sweeper: {params: {trusted: '[sympy]'}}}",
            "hydra: {mode: MULTIRUN, sweeper: {params: {'trusted=[torch],[\"b.c': '\"]'}}}",
            "hydra: {mode: MULTIRUN, overrides: {task: ['trusted=[torch]']}}",
            "hydra: {mode: MULTIRUN, sweeper: {params: {policy: 'choice({trust_${oc.env:NO,remote}_code:true},{})'}}}",
            "policy: '${oc.create:{trust_remote_code: true}}'",
            "hydra: {job_logging: {handlers: {file: {'.': {baseFilename: HIT}}}}}",
            "hydra: {job_logging: {handlers: {file: {stream: '${now:ext://mine}'}}}}",
            "hydra: {run: {dir: '${evil}'}, job_logging: {handlers: {x: {class: logging.StreamHandler, "
            "stream: '${hydra.run.dir}'}}}}\nevil: ext://antigravity.x",
            "hydra: {run: {dir: '${evil}'}, job_logging: {handlers: {file: {filename: '${hydra.run.dir}/x.log'}}}}\n"
            "evil: ext://antigravity.x",
            "hydra: {job: {chdir: true}}",
            'hydra: {job: {name: "x\\ntouch HIT"}}',
        )
    ],
)
def test_settings_files_run_no_code(lines, tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "evil.yaml").write_text(f"# @package _global_\n{lines}\n")
    (tmp_path / "mine.py").write_text("open('HIT', 'w')\n")
    done = begun(tmp_path, "--config-dir", "conf", "experiment=evil")
    assert done.returncode == 1
    assert "allowed" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "HIT").exists()


@provocation("a primary settings file with `hydra.searchpath: [pkg://mine]`", REFUSED)
def test_a_primary_file_imports_no_package(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "own.yaml").write_text(
        "defaults:\n  - train\n  - _self_\nhydra:\n  searchpath: ['pkg://mine']\n"
    )
    (tmp_path / "mine.py").write_text("open('HIT', 'w')\n")
    done = start(tmp_path, "--config-dir", "conf", "--config-name", "own")
    assert done.returncode == 1
    assert "hydra.searchpath=pkg://mine: allowed are directories" in done.stderr
    assert not (tmp_path / "HIT").exists()


@provocation(
    "files named `hydra.py`, `torch.py` or `hydra_plugins/x.py` in the directory of the start", "they are not run"
)
def test_files_that_nobody_names_are_not_run(tmp_path):
    for name in ("hydra.py", "torch.py", "omegaconf.py", "sitecustomize.py", "hydra_plugins/own.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"open({str(tmp_path / 'HIT')!r}, 'w')\n")
    done = start(tmp_path, "steps=0")
    assert "steps=0" in done.stderr
    assert not (tmp_path / "HIT").exists()


def test_a_program_composes_with_the_same_checks(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'HIT')!r}, 'w')\n")
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "evil.yaml").write_text("# @package _global_\ntrusted: [mine]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigCompositionException, match="allowed are directories"):
        grpo.compose("hydra.searchpath=[pkg://mine]")
    told = r"evil\.yaml: 'trusted=\[mine\]' stands in a file that the command brings along"
    with pytest.raises(ConfigCompositionException, match=told):
        grpo.compose(f"hydra.searchpath=[{tmp_path}/conf]", "experiment=evil")
    assert not (tmp_path / "HIT").exists()


SECRETS = (
    "k-logger1",
    "k-private2",
    "k-listed3",
    "k-environment4",
    "sk-pattern567890",
    "k-bearer5",
    "k-quoted6",
    "k-named7",
    "k-mapped8",
    "9081726354",
)


@provocation(
    "secrets by key (`auth`, `private_key`), in lists, by their look (`sk-…`) and from `${oc.env:…}`",
    "stand in no file of the run and not on the terminal",
)
@pytest.mark.parametrize("mode", [(), ("-m",)], ids=["run", "sweep"])
def test_secrets_are_written_nowhere(mode, tmp_path):
    words = (
        "+wandb.auth=k-logger1",
        "+wandb.private_key=k-private2",
        "+wandb.tokens=[x,k-listed3]",
        "+wandb.env=${oc.env:MINE}",
        "+wandb.header='Bearer ${oc.env:BEARER}'",
        "+wandb.quoted=\"${oc.env:'QUOTED'}\"",
        "+wandb.name=NAMED",
        '+wandb.far="${oc.env:${wandb.name}}"',
        "+wandb.arguments=[with/sk-pattern567890]",
        "+wandb.more={a: {api_key: 9081726354}, b: {password: k-mapped8}}",
    )
    (tmp_path / "mine.py").write_text(
        "def fails(completions, **columns):\n"
        "    print('k-environment4')\n"
        "    raise OSError('no entry with k-environment4 and k-private2')\n"
    )
    own = ("reward=[custom]", "reward.custom.function._target_=mine.fails")
    for number, reward in enumerate([("reward=[format]",), own]):
        place = tmp_path / f"run{number}"
        where = f"hydra.{'sweep' if mode else 'run'}.dir={place}"
        environment = {"MINE": "k-environment4", "BEARER": "k-bearer5", "QUOTED": "k-quoted6", "NAMED": "k-named7"}
        done = begun(tmp_path, *mode, *SMALL[:11], "trainer=cpu", "steps=1", *words, *reward, where, **environment)
        assert done.returncode == (reward == own), done.stderr[-3000:]
        assert "REDACTED" in done.stderr
        files = [path for path in place.rglob("*") if path.is_file()]
        assert any(path.name == "overrides.yaml" for path in files)
        shown = {"stdout": done.stdout, "stderr": done.stderr}
        for name, text in shown.items() | {(str(path), path.read_bytes().decode("latin1")) for path in files}:
            for secret in SECRETS:
                assert secret not in text, (name, secret)
            if Path(name).name not in ("stdout", "stderr", "train.log", "summary.json"):  # which hold messages
                assert "REDACTED-" not in text, name


@provocation(
    "a reward in a worker, or in a job that joblib starts, that warns and logs with a secret, which stands by its key "
    "in a mapping of the command or is a variable of the environment",
    "the secret is not on the terminal, nor in the variables that a job's script takes along",
)
@pytest.mark.slow
@pytest.mark.parametrize("words", [("reward.custom.timeout=60",), ("-m", "hydra/launcher=joblib", "seed=0,1")], ids=str)
def test_workers_and_jobs_show_no_secret(words, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import logging, os, sys, warnings\n\n\n"
        "def warns(completions, api_key, url):\n"
        "    open('given', 'w').write(os.environ['GRPO_LIGHTNING_GIVEN'])\n"
        "    print('printed', api_key, file=sys.stderr)\n"
        "    logging.getLogger('mine').warning('logged %s', url)\n"
        "    warnings.warn(f'warned {api_key} {url}')\n"
        "    return [0.0 for _ in completions]\n"
    )
    named = (
        "reward.custom.function={_target_: mine.warns, _partial_: true, api_key: k-mapped8, url: 'x/${oc.env:MINE}'}"
    )
    options, rest = words[:1] if words[0] == "-m" else (), [word for word in words if word != "-m"]
    where = "hydra.sweep.dir=runs" if options else "hydra.run.dir=runs"
    own = ("reward=[custom]", f"++{named}", where)
    done = begun(tmp_path, *options, *SMALL[:11], "trainer=cpu", "steps=1", *own, *rest, MINE="k-environment4")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "printed REDACTED" in done.stderr
    assert "warned REDACTED" in done.stderr
    assert "reward.custom.function=" in (tmp_path / "given").read_text()
    for text in (done.stdout, done.stderr, (tmp_path / "given").read_text()):
        assert "k-mapped8" not in text
        assert "k-environment4" not in text


@provocation(
    "`--cfg job --resolve` with `+note.password=${oc.env:NAME}`, of a few letters, which stand elsewhere, too",
    "they are not shown",
)
def test_settings_that_are_shown_with_their_values_hide_secrets(tmp_path):
    words = ("--cfg", "job", "--resolve", "+note.password=${oc.env:MINE}", "task_name='${oc.env:MINE}'", "+gone=${no}")
    for asked in (words, (*words[:2], *words[3:])):
        done = start(tmp_path, *asked[:-1], MINE="kqzx7")
        assert done.returncode == 0
        assert "  password: " in done.stdout
        assert "kqzx7" not in done.stdout + done.stderr
    done = start(tmp_path, *words, MINE="kqzx7")
    assert done.returncode == 1
    assert "kqzx7" not in done.stdout + done.stderr


@provocation(
    "an exception's text with escape sequences", "they are escaped on the terminal, in train.log and summary.json"
)
def test_escape_sequences_do_not_reach_the_terminal(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Odd(Exception):\n    def __str__(self):\n        return '\\x1b[2Jgone\\x9b'\n\n\n"
        "def fails(completions, **columns):\n    raise Odd\n"
    )
    own = ("reward=[custom]", "reward.custom.function._target_=mine.fails")
    for more in ((), ("reward.custom.timeout=20", "reward.custom.max_failed=0")):
        place = tmp_path / f"run{len(more)}"
        done = begun(tmp_path, *SMALL[:11], "trainer=cpu", "steps=1", *own, *more, f"hydra.run.dir={place}")
        assert done.returncode == 1
        for text in (done.stdout, done.stderr, (place / "train.log").read_text(), (place / "summary.json").read_text()):
            assert "\x1b[2J" not in text
            assert "\x9b" not in text
        assert "\\x1b[2Jgone" in done.stderr


@provocation(
    "a run directory whose train.log is a link to a file of the user's, and `hydra.job.name=../mine`",
    "refused in one sentence, exit 1; the file is as before, and nothing else was written",
)
def test_the_log_is_written_through_no_link(tmp_path):
    mine, run = tmp_path / "mine.log", tmp_path / "run"
    mine.write_text("mine")
    run.mkdir()
    (run / "train.log").symlink_to(mine)
    (tmp_path / "seed=0").mkdir()
    (tmp_path / "seed=0" / "train.log").symlink_to(mine)
    for words, told in (
        ([f"hydra.run.dir={run}"], "train.log in it is a link to"),
        (["-m", f"hydra.sweep.dir={tmp_path}", "seed=0"], "train.log in it is a link to"),
        ([f"hydra.run.dir={run}", "hydra.job.name=../mine"], "hydra.job.name=../mine: allowed are letters, digits"),
    ):
        done = begun(tmp_path, *words)
        assert done.returncode == 1
        assert told in done.stderr
        assert "Traceback" not in done.stderr
        assert mine.read_text() == "mine"
    assert [path.name for path in run.iterdir()] == ["train.log"]


@provocation(
    "the same link in a sweep by joblib with `hydra.verbose=true`, or by `submitit_local`, whose processes log more "
    "after a job",
    "its jobs are refused, the file is as before",
)
@pytest.mark.slow
@pytest.mark.parametrize("words", [("joblib", "hydra.verbose=true"), ("submitit_local",)], ids=lambda words: words[0])
def test_what_is_logged_after_a_refused_job_is_written_through_no_link(words, tmp_path):
    mine = tmp_path / "mine.log"
    mine.write_text("mine")
    (tmp_path / "sweep" / "run").mkdir(parents=True)
    (tmp_path / "sweep" / "run" / "train.log").symlink_to(mine)
    (tmp_path / "matplotlibrc").write_text("")
    places = (f"hydra.sweep.dir={tmp_path}/sweep", "hydra.sweep.subdir=run")
    done = begun(tmp_path, "-m", f"hydra/launcher={words[0]}", *words[1:], *places, "seed=0,1")
    assert done.returncode == 1
    assert "train.log in it is a link to" in done.stderr
    assert mine.read_text() == "mine"


@provocation(
    "a sweep's directory whose multirun.yaml, or what else a plug-in writes, is a link", "refused in one sentence"
)
@pytest.mark.parametrize("name", ["multirun.yaml", "optimization_results.yaml", "own.log"])
def test_a_sweep_is_written_through_no_link(name, tmp_path):
    mine, place = tmp_path / "mine", tmp_path / "sweep"
    mine.write_text("mine")
    place.mkdir()
    (place / name).symlink_to(mine)
    done = begun(tmp_path, "-m", f"hydra.sweep.dir={place}", "seed=0,1", "steps=0")
    assert done.returncode == 1
    assert f"hydra.sweep.dir={place}: {name} in it is a link to {mine}" in done.stderr
    assert mine.read_text() == "mine"
    assert [path.name for path in place.iterdir()] == [name]


@provocation(
    "a log of one's own name in `hydra.job_logging`, which is a link in the run directory", "refused, as above"
)
def test_other_logs_are_written_through_no_link(tmp_path):
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.write_text("mine")
    run.mkdir()
    (run / "own.log").symlink_to(mine)
    own = "{class: logging.FileHandler, delay: true, filename: '${hydra.runtime.output_dir}/own.log'}"
    words = (f"+hydra.job_logging.handlers.own={own}", "hydra.job_logging.root.handlers=[own]")
    done = begun(tmp_path, *SMALL[:11], "trainer=cpu", "steps=1", "reward=[format]", f"hydra.run.dir={run}", *words)
    assert done.returncode == 1
    assert "own.log in it is a link to" in done.stderr
    assert mine.read_text() == "mine"


@provocation(
    "a sweep of which a job cannot be composed, with a secret among its settings", "the secret stands in no file"
)
def test_a_sweep_that_does_not_begin_has_written_no_secret(tmp_path):
    words = ("-m", "seed=0,1", "+wandb.auth=k-logger1", "reward=[format],[formt]", f"hydra.sweep.dir={tmp_path}/sweep")
    done = begun(tmp_path, *words)
    assert done.returncode == 1
    assert "formt" in done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "multirun.yaml" in [path.name for path in written]
    assert [path for path in written if "k-logger1" in path.read_text(encoding="utf-8")] == []
    assert "k-logger1" not in done.stdout + done.stderr


@provocation(
    "a text whose value is `${oc.create:…}` or `${oc.decode:…}`, which makes a part of it, in a file or pasted",
    "refused by its key",
)
@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("${oc.create:{a: 1}}", True),
        ('${oc.create:"{\\"\\x5f\\x74arget\\x5f\\": 1}"}', True),
        ("x ${ oc.create : [1] }", True),
        ("${oc.${name}:{a: 1}}", True),
        ("${oc.env:NO,${oc.create:{a: 1}}}", True),
        ("${oc.select:\"a${oc.decode:'1'}\"}", True),
        ("${oc.decode:${oc.env:SURELY,'{a: 1}'}}", True),
        ("${oc.decode:'{a: 1}'}", True),
        ("${oc.decode:${oc.env:MINE}}", False),
        ("${oc.dict.values:callbacks}", False),
        ("${now:%Y} ${steps} ${oc.env:MINE}", False),
        ("${${name}}", False),
        ("oc.create:", False),
    ],
)
def test_no_resolver_makes_parts_of_a_text(text, is_refused):
    told = resolver_problems({"policy": {"system_prompt": [text]}})
    assert bool(told) is is_refused
    assert all(one.startswith(f"policy.system_prompt.0={text}: makes parts of a text; allowed in ") for one in told)
