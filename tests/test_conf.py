"""Every choice of every group composes and fits its target; presets and recipes have their published numbers."""

import itertools
import json
import math
import re
import shlex

import datasets
import pytest
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning.config import check_config
from grpo_lightning.config.settings import value_at
from grpo_lightning.run import Run
from tests.support.checkpoints import write_checkpoint, write_reward_model
from tests.support.composed import CONF, ROOT, build, composed, settings, with_directories
from tests.test_readme import FENCE

PARTS_CHOSEN = ("algorithm", "policy")
NEEDS = {
    "policy=hf": ["policy.path=some/model"],
    "reference=another_model": ["reference.path=some/model"],
    "algorithm=distillation": ["reference.path=some/model"],
    "data=mixture": ["data.sources={a: {task: spell_backward}, b: {task: gcd}}"],
    "reference=none": ["loss.kl_coef=0"],
    "reference=adapter_off": ["policy.adapter={r: 4}"],
    "data=jsonl": ["data.path=some.jsonl"],
    "data=hub": ["data.path=some/data"],
    "data=custom": ["data.train._target_=tests.support.rewards.questions"],
    "data=inline": ["data.train.prompts=[a,b]", "data.prompts_per_step=1"],
    "reward=[custom]": ["reward.custom.function._target_=tests.support.rewards.vowels"],
    "reward=[custom_per_completion]": [
        "reward.custom.function.function._target_=grpo_lightning.reward.accuracy.answer_text"
    ],
    "reward=[environment]": ["environment=guess"],
    "reward=[keyword]": ["reward.keyword.function.words=[because]"],
    "reward=[pattern]": ["reward.pattern.function.expression=because"],
    "reward=[json_schema]": ["reward.json_schema.function.schema={type:object}"],
    "reward=[judge]": ["reward.judge.function.base_url=http://localhost/v1", "reward.judge.function.model=some"],
    "reward=[model]": ["reward.model.function.path=some/model"],
    "reward=[live]": ["+reward@reward.mine=live", "reward.mine.function.name=reward.mine", "reward=[]"],
    "rollout=recorded": ["rollout.path=some/run", "mode=validate"],
    "environment=custom": ["environment.function._target_=tests.support.environments.guess"],
    "environment=gymnasium": ["environment.function.id=FrozenLake-v1"],
    "environment=tools": ["environment.function.tools=[tests.support.toolbox.add]"],
    "sampler=vllm": ["mode=export"],  # of the others it says that vLLM is missing
    "sampler=vllm_server": ["sampler.directory=some/weights"],
    "module=sft": ["data=demonstrations"],
}


@pytest.mark.slow
def test_every_choice_composes_and_fits_its_target():
    for path in sorted(CONF.glob("*/*.yaml")):
        group, name = path.parent.name, path.stem
        if name in ("base", "taught") or group in ("experiment", "sweep"):
            continue
        choice = f"{group}=[{name}]" if group in ("reward", "logger") else f"{group}={name}"
        words = NEEDS[choice] if name == "live" and group == "reward" else [choice, *NEEDS.get(choice, [])]
        check_config(composed(*words))


# algorithm -> advantage, surrogate and its bounds, weights, KL estimator and coefficient, reference, tries
PRESETS = {
    "grpo": ("standardized", "clipped", (0.2, 0.2), "completion_mean", "k3", 0.04, "frozen_copy", 1),
    "dr_grpo": ("centered", "clipped", (0.2, 0.2), "constant", "k3", 0.0, "none", 1),
    "dapo": ("standardized", "clipped", (0.2, 0.28), "token_mean", "k3", 0.0, "none", 3),
    "gspo": ("standardized", "gspo", (3e-4, 4e-4), "completion_mean", "k3", 0.0, "none", 1),
    "cispo": ("standardized", "cispo", (5.0,), "token_mean", "k3", 0.0, "none", 1),
    "rloo": ("leave_one_out", "reinforce", (), "completion_sum", "k3", 0.0, "none", 1),
    "sapo": ("standardized", "sapo", (1.0, 1.05), "completion_mean", "k3", 0.0, "none", 1),
    "gmpo": ("standardized", "gmpo", (0.4, 0.4), "completion_mean", "k3", 0.0, "none", 1),
    "distillation": ("none", "clipped", (0.2, 0.28), "token_mean", "k3", 0.0, "another_model", 1),
    "reinforce_pp": ("batch_whitened", "clipped", (0.2, 0.2), "token_mean", "k2", 0.001, "frozen_copy", 1),
}


def pinned(config):
    loss = config["loss"]
    name = {part: loss[part]["_target_"].rsplit(".")[-1] for part in ("surrogate", "weights", "kl")}
    return (
        config["advantage"]["_target_"].rsplit(".")[-1],
        name["surrogate"],
        tuple(value for value in loss["surrogate"].values() if isinstance(value, float)),
        *(name["weights"], name["kl"], loss["kl_coef"]),
        config["reference"]["_target_"].rsplit(".")[-1],
        config["rollout"]["max_tries"],
    )


def test_a_preset_pins_every_coupled_choice_and_names_its_paper():
    files = {path.stem: path.read_text(encoding="utf-8") for path in (CONF / "algorithm").glob("*.yaml")}
    assert {name: pinned(composed(choice := f"algorithm={name}", *NEEDS.get(choice, []))) for name in files} == PRESETS
    assert all("arXiv:" in text.splitlines()[1] for text in files.values())
    config = composed("algorithm=dapo", "reward=[exact]")  # its penalty is added to whatever rewards are chosen
    assert list(config["reward"]) == ["exact", "soft_overlong"]
    assert config["reward"]["soft_overlong"]["function"]["max_length"] == config["rollout"]["max_new_tokens"] == 36
    assert config["rollout"]["group_filter"]["_target_"] == "grpo_lightning.rollout.mixed"
    assert composed("algorithm=dr_grpo")["loss"]["weights"]["length"] == 36


# What a published recipe says, whether or not it is a default today.
COLUMNS = (
    *("rollout.group_size", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.max_new_tokens"),
    *("data.prompts_per_step", "module.ppo_epochs", "loss.kl_coef", "optimizer.lr", "advantage._target_"),
)
RECIPES = {
    "open_r1": (16, 0.6, 0.95, 0, 2048, 16, 1, 0.01, 1e-6, "centered", {"accuracy": 1.0, "format": 0.1}),
    "open_r1_exercise": (8, 0.6, 1.0, 0, 2048, 2, 1, 0.01, 1e-6, "centered", {"accuracy": 1.0, "format": 0.1}),
    "grpo_guide": (8, 1.0, 1.0, 0, 256, 16, 4, 0.1, 5e-6, "standardized", {"numeric": 1.0}),
    "deepseekmath": (64, 0.7, 1.0, 0, 1024, 16, 1, 0.04, 1e-6, "standardized", {"numeric": 1.0}),
    "gpt2_notebook": (5, 1.0, 1.0, 50, 10, 5, 1, 0.01, 1e-6, "standardized", {"word_variety": 1.0}),
    "rlox_quickstart": (4, 1.0, 1.0, 0, 8, 16, 1, 0.1, 1e-4, "standardized", {"accuracy": 1.0, "tag_count": 0.05}),
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
    "smollm2_reasoning_taught": ("llama", SUPERVISED, 2),
    "smollm2_reasoning": (
        "llama",
        [*SHORT, "rollout.group_size=3", "rollout.downsample.size=2", "schedule.warmup_steps=0"],
        2,
    ),
    "smollm2_arithmetic": ("llama", [*SHORT, "rollout.group_size=3", "rollout.downsample.size=2"], 2),
}


def test_a_recipe_composes_to_its_published_numbers():
    for name, numbers in RECIPES.items():
        config = composed(f"experiment={name}")
        values = [value_at(config, key) for key in COLUMNS]
        values[-1] = values[-1].rpartition(".")[2]
        weights = {reward: node["weight"] for reward, node in config["reward"].items()}
        assert (*values, weights) == numbers, name
        bounds = [config["loss"]["surrogate"][key] for key in ("epsilon_low", "epsilon_high")]
        assert bounds == [0.2, 0.2], name


@pytest.mark.slow
def test_the_commands_in_the_headers_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = sorted((CONF / "experiment").glob("*.yaml"))
    assert {path.stem for path in files} == set(REDUCED) > set(RECIPES)
    for path in files:
        (command,) = re.findall(r"^# Command +python train\.py (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        arguments = shlex.split(command)
        assert f"experiment={path.stem}" in arguments
        check_config(with_directories(composed(*arguments), tmp_path))


def leaves_of(node, key=""):
    """Dotted key -> value, without what a file leaves open."""
    if isinstance(node, dict):
        return {k: v for name, value in node.items() for k, v in leaves_of(value, f"{key}.{name}").items()}
    return {} if node in (None, "???") else {key: node}


@pytest.mark.slow
def test_what_a_command_chooses_wins_over_an_experiment():
    def raw(*words):
        return OmegaConf.to_container(settings(*words), resolve=False)

    algorithms, policies = (sorted(path.stem for path in (CONF / part).glob("*.yaml")) for part in PARTS_CHOSEN)
    policies.remove("base")
    experiments = sorted((CONF / "experiment").glob("*.yaml"))
    for number, (algorithm, policy) in enumerate(zip(algorithms, itertools.cycle(policies))):
        choices = (f"algorithm={algorithm}", f"policy={policy}")
        alone = raw(*choices)
        for path in experiments[number % 5 :: 5]:  # each with two algorithms
            config = raw(*choices, f"experiment={path.stem}")
            for part in ("loss", "advantage", "reference", "policy"):
                own, found = leaves_of(alone[part]), leaves_of(config[part])
                assert {key: found.get(key) for key in own} == own, (path.stem, *choices, part)
                assert found.keys() - own.keys() <= {".system_prompt", ".path"}, (path.stem, *choices, part)
            for key in ("_target_", "group_filter", "max_tries"):
                assert config["rollout"][key] == alone["rollout"][key], (path.stem, algorithm, key)


def test_who_wins():
    """Keys of the command over parts that it chooses, those over an experiment, and that over the sizes of a policy."""
    config = composed("experiment=deepseekmath", "policy=qwen2_5_1_5b")
    assert (config["policy"]["path"], config["rollout"]["group_size"]) == ("Qwen/Qwen2.5-1.5B-Instruct", 64)
    assert composed("experiment=open_r1", "algorithm=reinforce_pp")["advantage"]["_target_"].endswith("batch_whitened")
    config = composed("experiment=grpo_guide", "algorithm=gspo", "loss.surrogate.epsilon_low=0.1")
    bounds = [config["loss"]["surrogate"][key] for key in ("epsilon_low", "epsilon_high")]
    assert (bounds, config["loss"]["kl_coef"], config["module"]["ppo_epochs"]) == ([0.1, 4e-4], 0.0, 4)
    config = composed("experiment=open_r1", "policy=hf", "policy.path=some/model", "optimizer=adamw_8bit")
    assert config["policy"]["system_prompt"].startswith("Think before you answer.")
    config = composed("experiment=grpo_guide", "policy=gpt2", "optimizer=adamw_8bit", "schedule=cosine")
    assert (config["optimizer"]["lr"], config["rollout"]["max_new_tokens"]) == (5e-6, 256)
    assert config["validation"]["max_new_tokens"] == 256
    config = composed("experiment=open_r1_exercise", "data=jsonl", "data.path=my.jsonl")
    assert (config["data"]["path"], config["data"]["prompts_per_step"]) == ("my.jsonl", 2)
    assert config["data"].get("columns") is None
    assert list(composed("experiment=annealed", "reward=[accuracy]")["reward"]) == ["accuracy"]
    config = composed("experiment=annealed", "algorithm=gspo", "rollout.temperature.end=0.9", "rollout.group_size=4")
    assert (config["rollout"]["temperature"]["end"], config["rollout"]["group_size"]) == (0.9, 4)
    assert "reference" not in composed("experiment=iterative_grpo", "callbacks=default")["callbacks"]
    assert composed("experiment=calculator", "environment=none", "policy=tiny")["environment"] is None


@pytest.fixture(scope="module")
def local_data(tmp_path_factory):
    """Data sets with the columns of the published ones, as save_to_disk leaves them."""
    directory = tmp_path_factory.mktemp("data")
    sums = [(f"What is {a} + {b}?", str(a + b)) for a in range(10) for b in range(10)]
    columns = {"problem": [question for question, _ in sums], "answer": [answer for _, answer in sums]}
    math = datasets.Dataset.from_dict(columns | {"solution": ["Add them."] * 100, "source": ["olympiads"] * 100})
    math.save_to_disk(directory / "math")
    answers = [f"It is <<{answer}={answer}>>{answer}.\n#### {answer}" for _, answer in sums]
    grade_school = datasets.Dataset.from_dict({"question": columns["problem"], "answer": answers})
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
        # Random text earns nothing by the recipe's own rewards, and a gradient of 0 would show nothing.
        overrides.append(f"reward=[{','.join([*published['reward'], 'custom'])}]")
        overrides.append("reward.custom.function._target_=tests.support.rewards.vowels")
        chat = architecture != "gpt2"
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


# docs/coming_from.md: its blocks run, and its commands are the recipes.
PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
BLOCKS = [block for language, block in FENCE.findall(PAGE) if language == "python"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_page_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], f"block {number}", "exec"), {"__name__": "__main__"})
