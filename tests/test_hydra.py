"""All that Hydra can do is there, and neither Python nor a library behaves otherwise than without this package."""

import json
import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from tests.support.composed import ROOT
from tests.support.running import SMALL

pytestmark = pytest.mark.slow
FAST = [word for word in SMALL if not word.startswith("reward")]
TRAIN = [sys.executable, str(ROOT / "train.py")]
RECIPE = """# @package _global_
defaults:
  - override /reward: [custom, format]
  - override /data: jsonl

trusted: [theirs]
data:
  path: rows.jsonl
  prompts_per_step: 2
reward:
  custom:
    function:
      _target_: own_reward.score
  length:
    _target_: grpo_lightning.reward.RewardSpec
    weight: 1.0
    clip: null
    timeout: null
    max_failed: 0.5
    failed_score: 0.0
    retries: 0
    concurrency: 16
    messages: false
    function: {_target_: theirs.length, _partial_: true}
"""
REWARD = """from own_words import count
from theirs import scale


def score(completions, output, **columns):
    assert output[0].startswith("answer"), output
    return [scale(count(text)) for text in completions]
"""


def run(command, place, **environment):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=place,
        env=variables | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A run of an experiment file of one's own, in a directory that is a link, with a reward that lies beside it."""
    place = tmp_path_factory.mktemp("recipe")
    (place / "conf" / "experiment").mkdir(parents=True)
    (place / "conf" / "experiment" / "mine.yaml").write_text(RECIPE)
    (place / "conf" / "own_reward.py").write_text(REWARD)
    (place / "own_words.py").write_text("def count(text):\n    return len(text.split())\n")
    (place / "site-packages").mkdir()
    (place / "site-packages" / "theirs.py").write_text(
        "def scale(number):\n    return number / 10\n\n\n"
        "def length(completions, **_):\n    return [1.0] * len(completions)\n"
    )
    rows = [{"prompt": f"Say {number}", "output": f"answer {number}"} for number in range(8)]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (place / "scratch").mkdir()
    (place / "run").symlink_to(place / "scratch")
    words = [word for word in FAST if not word.startswith("data")]
    words += [
        "reward.length.function._target_=theirs.length",
        "reward.custom.timeout=60",
    ]
    command = [*TRAIN, "--config-dir", "conf", "experiment=mine", *words, "hydra.run.dir=run", "data.validation_size=2"]
    run(command, place, PYTHONPATH=str(place / "site-packages"))
    return place


def test_an_experiment_of_ones_own_names_a_reward_beside_it_and_a_trusted_package(recipe):
    metrics = json.loads((recipe / "run" / "summary.json").read_text())["metrics"]
    assert metrics["reward/length"] == 1.0
    assert metrics.get("failure/custom", 0) == 0


def test_a_run_directory_may_be_a_link(recipe):
    assert (recipe / "run").is_symlink()
    assert {"checkpoints", "export", "summary.json", ".hydra"} <= {path.name for path in (recipe / "scratch").iterdir()}


def test_a_reward_may_ask_for_a_column_called_output(recipe):
    assert json.loads((recipe / "run" / "summary.json").read_text())["metrics"]["reward/custom"] > 0


def test_the_setup_of_a_slurm_launcher_is_the_users(tmp_path):
    words = ["hydra/launcher=submitit_slurm", "hydra.launcher.setup=[module load cuda]"]
    shown = run([*TRAIN, *words, "--cfg", "hydra", "--package", "hydra.launcher"], tmp_path).stdout
    launcher = OmegaConf.create(shown)
    assert launcher.setup == ["module load cuda"]
    assert launcher._target_.endswith("SlurmLauncher")


def test_a_search_is_kept_in_a_database(tmp_path):
    words = ["sweep=optuna", "hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=mine"]
    words += ["hydra.sweeper.n_trials=2", "sweep_metric=reward/format", "hydra.sweep.dir=sweep", "logger=none"]
    run([*TRAIN, "-m", *words, *FAST, "reward=[format]"], tmp_path)
    import optuna

    study = optuna.load_study(study_name="mine", storage=f"sqlite:///{tmp_path}/study.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE"]


def test_a_script_finds_the_modules_beside_it(tmp_path):
    (tmp_path / "folder" / "helpers").mkdir(parents=True)
    (tmp_path / "folder" / "helpers" / "__init__.py").write_text("from helpers.words import count\n")
    (tmp_path / "folder" / "helpers" / "words.py").write_text("def count(text):\n    return len(text.split())\n")
    (tmp_path / "folder" / "script.py").write_text(
        "import grpo_lightning as grpo\nfrom helpers import count\n\n\n"
        "def words(completions, **columns):\n    return [float(count(text)) for text in completions]\n\n\n"
        f"if __name__ == '__main__':\n    run = grpo.compose(*{FAST!r}, reward=words, run_dir='run')\n"
        "    print(run.fit().metrics['reward/words'])\n"
    )
    done = run([sys.executable, "folder/script.py"], tmp_path, PYTHONPATH=str(ROOT))
    assert float(done.stdout.split()[-1]) > 0


def test_a_shell_completes_settings(tmp_path):
    told = run([*TRAIN, "--shell-completion", "install=bash"], tmp_path).stdout
    assert "hydra_bash_completion" in told
    asked = {"COMP_LINE": "train.py algorithm=dap", "COMP_POINT": "22"}
    assert "algorithm=dapo" in run([*TRAIN, "--shell-completion", "query=bash"], tmp_path, **asked).stdout


AS_BEFORE = """
import builtins, inspect, os, subprocess, sys
import torch.utils.tensorboard
import datasets, hydra, lightning.pytorch, omegaconf, pyarrow, pyarrow.parquet, torch, transformers
import transformers.models.llama.modeling_llama, transformers.models.auto.modeling_auto, hydra._internal.hydra
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from omegaconf import OmegaConf


def looked_at():
    found = {
        "Popen": subprocess.Popen.__init__,
        "import": builtins.__import__,
        "meta_path": list(sys.meta_path),
        "path": [place for place in sys.path if place not in ("", os.getcwd())],
        "PATH": os.environ["PATH"],
        "resolvers": dict(omegaconf.basecontainer.BaseContainer._resolvers),
        "loader": hydra._internal.hydra.ConfigLoaderImpl,
        "torch.load": torch.load,
    }
    for name in KNOWN:
        for attribute, value in list(vars(sys.modules[name]).items()):
            if attribute.startswith("_") or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            found[f"{name}.{attribute}"] = value
            if inspect.isclass(value):
                members = {key: one for key, one in vars(value).items() if callable(one) and key != "__doc__"}
                found.update({f"{name}.{attribute}.{key}": one for key, one in members.items()})
    return found


TOPS = ("transformers", "datasets", "pyarrow")
KNOWN = sorted(name for name, one in sys.modules.items() if name.partition(".")[0] in TOPS and one is not None)
before = looked_at()
import grpo_lightning as grpo

imported = looked_at()
run = grpo.compose(*sys.argv[1:], run_dir="run")
composed = looked_at()
run.fit()
assert run.module.completed_steps == 2
fitted = looked_at()
for name, after in (("imported", imported), ("composed", composed), ("fitted", fitted)):
    changed = {key for key in before if before[key] is not after.get(key) and before[key] != after.get(key)}
    assert not changed, (name, sorted(changed)[:20])
print(len(before), "looked at")
"""


def test_python_and_the_libraries_are_as_they_were(tmp_path):
    (tmp_path / "script.py").write_text(AS_BEFORE)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"Say {n}", "answer": n}) for n in range(9)))
    words = [word for word in FAST if not word.startswith(("data", "steps", "policy"))]
    words += ["steps=2", "data=jsonl", "data.path=rows.jsonl", "data.prompts_per_step=2", "data.validation_size=2"]
    done = run([sys.executable, "script.py", *words, "reward=[format]"], tmp_path, PYTHONPATH=str(ROOT))
    assert int(done.stdout.split()[-3]) > 1000
