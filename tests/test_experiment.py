"""Published recipes: each composes to its own numbers and trains at reduced size on a random model of its kind."""

import json
import math
import re
import shlex
from functools import reduce

import datasets
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning.config import check_config
from grpo_lightning.run import Run
from tests.support.checkpoints import write_checkpoint, write_reward_model
from tests.support.composed import CONF, build, composed, with_directories

# What a published recipe says, whether or not it is a default today.
RECIPES = {
    "open_r1": {
        "policy.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "data.path": "open-r1/OpenR1-Math-220k",
        "data.columns": {"prompt": "problem", "answer": "answer"},
        "steps": 500,
        "rollout.group_size": 16,
        "rollout.temperature": 0.6,
        "rollout.top_p": 0.95,
        "rollout.top_k": 0,
        "rollout.max_new_tokens": 2048,
        "reward.accuracy.weight": 1.0,
        "reward.format.weight": 0.1,
        "advantage._target_": "grpo_lightning.advantage.centered",
        "loss.surrogate.epsilon_low": 0.2,
        "loss.surrogate.epsilon_high": 0.2,
        "loss.kl_coef": 0.01,
        "optimizer.lr": 1e-6,
    },
    "open_r1_exercise": {
        "policy.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "data.path": "./math_100_samples",
        "data.columns": {"prompt": "problem", "answer": "answer"},
        "data.prompts_per_step": 2,  # 100 samples / 50 steps
        "data.validation_size": 20,
        "steps": 50,
        "rollout.group_size": 8,
        "rollout.temperature": 0.6,
        "rollout.top_p": 1.0,
        "rollout.max_new_tokens": 2048,
        "reward.accuracy.weight": 1.0,
        "reward.format.weight": 0.1,
        "advantage._target_": "grpo_lightning.advantage.centered",
        "loss.kl_coef": 0.01,
        "optimizer.lr": 1e-6,
    },
    "grpo_guide": {
        "policy.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "data.path": "openai/gsm8k",
        "data.prompts_per_step": 16,
        "rollout.group_size": 8,
        "rollout.temperature": 1.0,
        "rollout.top_p": 1.0,
        "rollout.max_new_tokens": 256,
        "reward.numeric.weight": 1.0,
        "advantage._target_": "grpo_lightning.advantage.standardized",
        "advantage.correction": 1,
        "advantage.eps": 1e-8,
        "loss.kl._target_": "grpo_lightning.loss.k3",
        "loss.kl_coef": 0.1,
        "loss.surrogate.epsilon_low": 0.2,
        "loss.surrogate.epsilon_high": 0.2,
        "module.ppo_epochs": 4,
        "optimizer.lr": 5e-6,
    },
    "deepseekmath": {
        "policy.path": "deepseek-ai/deepseek-math-7b-instruct",
        "data.path": "openai/gsm8k",
        "data.prompts_per_step": 16,  # 1024 / 64
        "rollout.group_size": 64,
        "rollout.temperature": 0.7,
        "rollout.top_p": 1.0,
        "rollout.max_new_tokens": 1024,
        "reward.numeric.weight": 1.0,
        "advantage._target_": "grpo_lightning.advantage.standardized",
        "loss.weights._target_": "grpo_lightning.loss.completion_mean",
        "loss.kl._target_": "grpo_lightning.loss.k3",
        "loss.kl_coef": 0.04,
        "module.ppo_epochs": 1,
        "module.minibatch_size": None,
        "optimizer.lr": 1e-6,
    },
    "gpt2_notebook": {
        "policy.path": "openai-community/gpt2",
        "reference.path": "distilbert/distilgpt2",
        "data.train.prompts": [
            "The best food in the world is",
            "Corgis are",
            "The meaning of life is",
            "I am",
            "The most important thing in the world is",
        ],
        "data.prompts_per_step": 5,
        "rollout.group_size": 5,
        "rollout.temperature": 1.0,
        "rollout.top_p": 1.0,
        "rollout.top_k": 50,
        "rollout.max_new_tokens": 10,
        "reward.word_variety.weight": 1.0,
        "advantage._target_": "grpo_lightning.advantage.standardized",
        "advantage.correction": 0,
        "advantage.eps": 1e-8,
        "loss.surrogate.epsilon_low": 0.2,
        "loss.surrogate.epsilon_high": 0.2,
        "loss.kl_coef": 0.01,
    },
    "rlox_quickstart": {
        "policy.path": "pkg://grpo_lightning/policy/tiny",
        "data.prompts_per_step": 16,
        "data.train_size": 16,  # every step is one of the three passes over the prompts
        "steps": 3,
        "rollout.group_size": 4,
        "rollout.temperature": 1.0,
        "rollout.max_new_tokens": 8,
        "reward.accuracy.weight": 1.0,
        "reward.tag_count.weight": 0.05,
        "advantage._target_": "grpo_lightning.advantage.standardized",
        "loss.weights._target_": "grpo_lightning.loss.constant",
        "loss.weights.length": 1,
        "loss.kl_coef": 0.1,
        "module.ppo_epochs": 1,
        "module.minibatch_size": None,
        "module.max_grad_norm": 1.0,
        "optimizer.lr": 1e-4,
    },
}
SUPERVISED = ["steps=2", "schedule.warmup_steps=1", "data.prompts_per_step=4", "rollout.max_new_tokens=6"]
SMALL = ("trainer=cpu", "data.validation_size=4", "validation.samples_per_prompt=2", "validation.ks=[1,2]")
SHORT = ("steps=2", "data.prompts_per_step=2", "rollout.max_new_tokens=6")
TINY = ["policy.hidden_size=16", "policy.intermediate_size=32", "policy.num_layers=1", "policy.num_heads=2"]
# How each is reduced, and its optimizer steps: rollouts times updates of each.
REDUCED = {
    "open_r1": ("qwen2", [*SHORT, "rollout.group_size=3"], 2),
    "open_r1_exercise": ("qwen2", ["steps=2", "rollout.max_new_tokens=6", "rollout.group_size=2"], 2),
    "grpo_guide": ("qwen2", [*SHORT, "rollout.group_size=2"], 8),
    "deepseekmath": ("llama", [*SHORT, "rollout.group_size=4"], 2),
    "gpt2_notebook": ("gpt2", ["steps=2"], 2),
    "rlox_quickstart": ("llama", [], 3),
    "annealed": ("llama", [*SHORT, "rollout.group_size=3"], 2),
    "iterative_grpo": ("llama", [*SHORT, "rollout.group_size=3", "callbacks.reference.every=1"], 2),
    "iterative_reward_model": (
        "llama",
        [*SHORT, "rollout.group_size=2", "callbacks.reward_model.every=1", "callbacks.reference.every=1"],
        2,
    ),
    "calculator_taught": ("llama", SUPERVISED, 2),
    "calculator": ("llama", [*SHORT, "rollout.group_size=3"], 2),
    "guess_taught": ("llama", SUPERVISED, 2),
    "guess": ("llama", [*SHORT, "rollout.group_size=3"], 2),
    "sft_tiny": (None, [*SUPERVISED, *TINY], 2),
    "sft_tiny_flawed": ("llama", SUPERVISED, 2),
}


def value(config, key):
    return reduce(lambda node, part: node[part], key.split("."), config)


def names(folder):
    return {path.stem for path in (CONF / folder).glob("*.yaml")}


def test_every_recipe_has_its_run_here():
    assert names("experiment") == set(REDUCED) > set(RECIPES)


@pytest.mark.slow
def test_a_recipe_composes_to_its_published_numbers():
    for name, numbers in RECIPES.items():
        config = composed(f"experiment={name}")
        assert {key: value(config, key) for key in numbers} == numbers, name
        weighted = {key.split(".")[1] for key in numbers if key.startswith("reward.")}
        assert not weighted or set(config["reward"]) == weighted, name


@pytest.mark.slow
def test_the_commands_in_the_headers_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in sorted(names("experiment")):
        text = (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
        (command,) = re.findall(r"^# Command +python train\.py (.+)$", text, re.MULTILINE)
        arguments = shlex.split(command)
        assert f"experiment={name}" in arguments
        check_config(with_directories(composed(*arguments), tmp_path))


def test_a_recipe_wins_over_the_sizes_that_a_policy_sets():
    config = composed("experiment=grpo_guide", "policy=gpt2")
    assert config["optimizer"]["lr"] == 5e-6
    assert config["rollout"]["max_new_tokens"] == 256
    assert config["validation"]["max_new_tokens"] == 256


def test_the_command_line_wins_over_a_recipe():
    config = composed(
        "experiment=open_r1_exercise",
        "policy=gpt2",
        "advantage=leave_one_out",
        "reward=[numeric,format]",
        "optimizer.lr=3e-6",
        "rollout.top_p=0.9",
        "steps=7",
    )
    assert config["policy"]["path"] == "openai-community/gpt2"
    assert config["advantage"]["_target_"] == "grpo_lightning.advantage.leave_one_out"
    assert list(config["reward"]) == ["numeric", "format"]
    assert (config["optimizer"]["lr"], config["rollout"]["top_p"], config["steps"]) == (3e-6, 0.9, 7)
    assert config["rollout"]["group_size"] == 8  # what is not overridden stays
    config = composed("experiment=deepseekmath", "algorithm=dr_grpo")
    assert config["advantage"]["_target_"] == "grpo_lightning.advantage.centered"
    assert config["loss"]["weights"]["_target_"] == "grpo_lightning.loss.constant"


@pytest.fixture(scope="module")
def local_data(tmp_path_factory):
    """Data sets with the columns of the published ones, as save_to_disk leaves them."""
    directory = tmp_path_factory.mktemp("data")
    sums = [(f"What is {a} + {b}?", str(a + b)) for a in range(10) for b in range(10)]
    math = datasets.Dataset.from_dict(
        {
            "problem": [question for question, _ in sums],
            "solution": ["Add them."] * 100,
            "answer": [answer for _, answer in sums],
            "source": ["olympiads"] * 100,
        }
    )
    math.save_to_disk(directory / "math")
    grade_school = datasets.Dataset.from_dict(
        {
            "question": [question for question, _ in sums],
            "answer": [f"It is <<{answer}={answer}>>{answer}.\n#### {answer}" for _, answer in sums],
        }
    )
    datasets.DatasetDict(train=grade_school, test=grade_school.select(range(8))).save_to_disk(directory / "gsm8k")
    paths = {"openai/gsm8k": "gsm8k", "open-r1/OpenR1-Math-220k": "math", "./math_100_samples": "math"}
    return {published: directory / name for published, name in paths.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCED)
def test_a_recipe_trains_at_reduced_size(name, local_data, tmp_path):
    architecture, reduced, updates = REDUCED[name]
    published = composed(f"experiment={name}")
    overrides = [f"experiment={name}", *SMALL, *reduced, f"run_dir={tmp_path / 'run'}"]
    if architecture:
        chat = architecture != "gpt2"
        # Random text earns nothing by the recipe's own rewards, and a gradient of 0 would show nothing.
        overrides.append(f"reward=[{','.join([*published['reward'], 'custom'])}]")
        overrides.append("reward.custom.function._target_=tests.support.rewards.vowels")
        overrides.append(f"policy.path={write_checkpoint(tmp_path / 'policy', architecture, chat=chat)}")
    if "path" in published["reference"]:
        overrides.append(f"reference.path={write_checkpoint(tmp_path / 'other', 'gpt2', chat=False, seed=1)}")
    if "model" in published["reward"]:
        scorer = write_reward_model(tmp_path / "reward_model", "qwen3", chat=True)
        overrides += [f"reward.model.function.path={scorer}", "reward.model.function.max_length=256"]
    if published["data"].get("path"):
        overrides.append(f"data.path={local_data[published['data']['path']]}")

    config = composed(*overrides)
    run = Run(config, build(*overrides), overrides=overrides, directory_given=True)
    returned = run.execute()

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    metrics = summary["metrics"]
    assert (summary["status"], summary["steps"]) == ("finished", config["steps"])
    assert all(math.isfinite(number) for number in metrics.values())
    assert returned == metrics["val/pass@1"]
    assert {f"val/reward/{reward}" for reward in published["reward"]} <= set(metrics)
    assert run.trainer.global_step == updates
    assert metrics["optim/grad_norm"] > 1e-3
    assert metrics["optim/skipped"] == 0
    if "rollout" in config["module"]:
        last = {"constant": 1.0, "linear": 1 / config["steps"]}[config["schedule"]["_target_"].rpartition(".")[2]]
        assert metrics["optim/lr"] == pytest.approx(last * published["optimizer"]["lr"])
        assert metrics["completion/length_max"] <= config["validation"]["max_new_tokens"]
    export = tmp_path / "run" / "export"
    trained, words = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    assert trained.config.vocab_size == len(words) == len(run.module.policy.tokenizer)
