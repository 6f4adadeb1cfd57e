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
    timeout: 60
    function:
      _target_: own_reward.score
  length:
    _target_: grpo_lightning.reward.RewardSpec
    weight: 1.0
    function: {_target_: theirs.length, _partial_: true}
"""
REWARD = """from own_words import count
from theirs import scale


def score(completions, output, **columns):
    assert output[0].startswith("answer"), output
    return [scale(count(text)) for text in completions]
"""
THEIRS = """def scale(number):
    return number / 10


def length(completions, **_):
    return [1.0] * len(completions)
"""


def run(command, place, **environment):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([*map(str, command)], cwd=place, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_an_experiment_of_ones_own_names_a_reward_beside_it_and_a_trusted_package(tmp_path):
    write(tmp_path / "conf" / "experiment" / "mine.yaml", RECIPE)
    write(tmp_path / "conf" / "own_reward.py", REWARD)
    write(tmp_path / "own_words.py", "def count(text):\n    return len(text.split())\n")
    write(tmp_path / "site-packages" / "theirs.py", THEIRS)
    rows = [{"prompt": f"Say {number}", "output": f"answer {number}"} for number in range(8)]
    write(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch")  # a run directory may be a link
    words = [word for word in FAST if not word.startswith("data")]
    command = [*TRAIN, "--config-dir", "conf", "experiment=mine", *words, "hydra.run.dir=run", "data.validation_size=2"]
    run(command, tmp_path, PYTHONPATH=str(tmp_path / "site-packages"))
    metrics = json.loads((tmp_path / "scratch" / "summary.json").read_text())["metrics"]
    assert metrics["reward/length"] == 1.0
    assert metrics["reward/custom"] > 0
    assert {"checkpoints", "export", ".hydra"} <= {path.name for path in (tmp_path / "scratch").iterdir()}


def test_a_launcher_a_search_in_a_database_and_completion_are_hydras(tmp_path):
    words = ["hydra/launcher=submitit_slurm", "hydra.launcher.setup=[module load cuda]"]
    shown = run([*TRAIN, *words, "--cfg", "hydra", "--package", "hydra.launcher"], tmp_path).stdout
    assert OmegaConf.create(shown).setup == ["module load cuda"]
    asked = {"COMP_LINE": "train.py algorithm=dap", "COMP_POINT": "22"}
    assert "algorithm=dapo" in run([*TRAIN, "--shell-completion", "query=bash"], tmp_path, **asked).stdout
    words = ["sweep=optuna", "hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=mine"]
    words += ["hydra.sweeper.n_trials=2", "sweep_metric=reward/format", "hydra.sweep.dir=sweep", "logger=none"]
    run([*TRAIN, "-m", *words, *FAST, "reward=[format]"], tmp_path)
    import optuna

    study = optuna.load_study(study_name="mine", storage=f"sqlite:///{tmp_path}/study.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE"]


AS_BEFORE = """
import builtins, os, subprocess, sys
import torch.utils.tensorboard
import datasets, hydra, lightning.pytorch, pyarrow.parquet, torch, transformers
import transformers.models.llama.modeling_llama, transformers.models.auto.modeling_auto, hydra._internal.hydra
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast


def state():
    path = [place for place in sys.path if place not in ("", os.getcwd())]
    found = {"Popen": subprocess.Popen.__init__, "import": builtins.__import__, "path": path}
    found |= {"finders": [finder for finder in sys.meta_path if "grpo" in repr(finder)], "load": torch.load}
    for name in known:
        found |= {f"{name}.{key}": value for key, value in vars(sys.modules[name]).items() if callable(value)}
    return found


known = [name for name in sys.modules if name.partition(".")[0] in ("transformers", "datasets", "hydra", "pyarrow")]
before = state()
import grpo_lightning as grpo

grpo.compose(*sys.argv[1:], run_dir="run").fit()
after = state()
changed = [key for key in before if before[key] is not after.get(key) and before[key] != after.get(key)]
assert not changed, changed[:20]
print(len(before), "looked at")
"""


def test_python_and_the_libraries_are_as_they_were(tmp_path):
    write(tmp_path / "script.py", AS_BEFORE)
    done = run([sys.executable, "script.py", *FAST, "reward=[format]"], tmp_path, PYTHONPATH=str(ROOT))
    assert int(done.stdout.split()[-3]) > 500
