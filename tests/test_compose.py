"""``compose``: objects become parts, and a run made of them is the command line's."""

import copy
import functools
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from hydra import initialize_config_dir
from lightning import Callback
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_lightning as grpo
from grpo_lightning.advantage import leave_one_out
from grpo_lightning.composition import continued_overrides
from grpo_lightning.config import ConfigError
from grpo_lightning.data import PromptData
from grpo_lightning.data.files import indexed_rows
from grpo_lightning.loss import token_mean
from grpo_lightning.object_overrides import _METHODS
from grpo_lightning.policy.generic import GenericPolicy
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import load
from grpo_lightning.reward import RewardSpec
from tests.support.checkpoints import write_checkpoint
from tests.support.composed import CONF, ROOT, build
from tests.support.running import letters, same, weights

SMALL = ("steps=2", "data.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=8", "trainer=cpu")
ROWS = [{"prompt": f"Spell {word}", "answer": word} for word in ("sun", "moon", "star", "tree", "lake", "wind")]
TOKENS = ("optimizer.lr=1e-2", "rollout.group_size=8", "rollout.max_new_tokens=8", "data.prompts_per_step=2")


class Model(nn.Module):
    """A language model of one's own: forward(ids) -> logits."""

    def __init__(self, vocabulary=16):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, 24)
        self.layer = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, vocabulary)

    def forward(self, ids):
        return self.head(self.layer(self.embedding(ids))[0])


def low(completions, prompts, completion_ids):
    """The fraction of the tokens that are below 4."""
    return [sum(number < 4 for number in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama", chat=True)


def test_the_run_directory_may_be_an_override(tmp_path, monkeypatch):
    for key in ("run_dir", "++run_dir", "hydra.run.dir"):
        run = grpo.compose(*SMALL, f"{key}={tmp_path}/x", reward={"letters": letters}, data=ROWS)
        assert (run.directory, run.config["run_dir"]) == (tmp_path / "x", f"{tmp_path}/x")
    monkeypatch.chdir(tmp_path)  # a process of several, where no other one has chosen a directory
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("GRPO_LIGHTNING_RUN_DIRECTORIES", raising=False)
    assert grpo.compose(reward=letters, data=ROWS * 3).directory.parts[0] == "runs"


def test_a_continued_run_keeps_its_overrides_and_those_of_the_command_are_changes(tmp_path):
    words = ("algorithm=dr_grpo", "seed=3", "loss.entropy_coef=0.01", "+callbacks.stop={_target_: x.Y}", "steps=2")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([*words, "mode=fit", "data.api_key=REDACTED"]))
    assert continued_overrides(["steps=4"], tmp_path) == ["steps=4"]
    assert continued_overrides(["checkpoint=last"], tmp_path / "none") == ["checkpoint=last"]
    more = ["checkpoint=last", "steps=4", "~callbacks.stop", "algorithm=dapo"]  # whose loss begins afresh
    assert continued_overrides(more, tmp_path) == ["seed=3", "checkpoint=last", "steps=4", "algorithm=dapo"]
    same = ["checkpoint=last", "algorithm=dr_grpo", "steps=2"]
    assert continued_overrides(same, tmp_path) == [*words[1:4], *same]
    run = grpo.compose("checkpoint=last", "~callbacks.stop", run_dir=tmp_path)
    assert (run.config["seed"], run.config["loss"]["entropy_coef"]) == (3, 0.01)
    assert run.config["loss"]["weights"]["_target_"] == "grpo_lightning.loss.constant"
    assert run.overrides == [*words[:3], "steps=2", "checkpoint=last"]
    numbered = grpo.compose("data=jsonl", "data.path=2024", run_dir=tmp_path / "new")
    assert numbered.config["data"]["path"] == "2024"


@pytest.mark.slow
def test_a_run_of_objects_writes_what_the_command_line_does(tmp_path):
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen.append(module.completed_steps)

    run = grpo.compose(
        *SMALL,
        "callbacks.samples=null",  # switches it off
        run_dir=tmp_path,
        advantage=leave_one_out,
        reward={"letters": RewardSpec(letters, 2.0)},
        data={"train": ROWS[:4], "validation": ROWS[4:]},
        callbacks=[Watch()],
        logger=False,
    )
    assert run.metrics == {}
    assert run.fit() is run
    assert run.module.rollout.advantage is leave_one_out
    assert seen == [1, 2]
    assert [len(run.data.train), len(run.data.validation)] == [4, 2]
    assert run.metrics["reward/total"] == pytest.approx(2 * run.metrics["reward/letters"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["overrides"] == [*SMALL, "callbacks.samples=null"]
    assert (summary["choices"]["reward"], summary["choices"]["data"]) == (["letters"], "rows")
    assert "advantage" not in summary["choices"]  # an object that no file of conf/ describes
    assert (tmp_path / ".hydra" / "config.yaml").exists()
    assert (tmp_path / "export" / "model.safetensors").exists()
    assert not (tmp_path / "tensorboard").exists()


def test_arguments_of_a_function_reach_it_or_are_refused(tmp_path):
    more = {"run_dir": tmp_path, "data": ROWS}
    word = "+reward.scaled.function.factor=3"
    reward = {"scaled": lambda completions, factor=1.0: [factor] * len(completions)}
    run = grpo.compose(*SMALL, word, reward=reward, **more)
    assert run.module.train_step(["one", "two"])["reward/scaled"] == 3.0
    with pytest.raises(ValueError, match=r"\+reward.low.function.factor=3: the function takes no factor"):
        grpo.compose(*SMALL, word.replace("scaled", "low"), reward=low, **more)


def improved(log_ratio, advantages, mask):
    return 2 * log_ratio.exp() * advantages, torch.zeros_like(mask)


def test_a_function_is_the_surrogate_of_the_loss_that_settings_have(tmp_path):
    run = grpo.compose(*SMALL, "loss=dapo", loss=improved, reward=letters, data=ROWS, run_dir=tmp_path)
    assert run.module.loss.surrogate is improved
    assert run.module.loss.weights.func is token_mean
    assert run.module.train_step(["one", "two"])["policy/clip_fraction"] == 0.0


def test_rewards_stand_beside_those_that_are_named_only(tmp_path):
    words = ("reward=[format]", "reward.letters.weight=0.5")
    rewards = grpo.compose(
        *SMALL, *words, run_dir=tmp_path, reward={"letters": letters}, data=ROWS
    ).module.rollout.reward
    assert sorted(rewards) == ["format", "letters"]
    assert rewards["letters"].weight == 0.5
    assert rewards["letters"].function is letters
    listed = [letters, functools.partial(low)]
    assert list(grpo.compose(*SMALL, run_dir=tmp_path, reward=listed, data=ROWS).config["reward"]) == ["letters", "low"]
    with pytest.raises(ValueError, match=r"several functions are called alike \(letters, letters\)"):
        grpo.compose(*SMALL, reward=[letters, letters], data=ROWS)
    for words, names in (
        (("algorithm=dapo",), ["letters", "soft_overlong"]),
        (("experiment=annealed", *SMALL), ["letters"]),  # an experiment's give way
    ):
        assert sorted(grpo.compose(*words, run_dir=tmp_path, reward=letters, data=ROWS * 2).config["reward"]) == names


@pytest.mark.slow
def test_models_go_in_as_objects_and_as_paths(checkpoint, tmp_path):
    settings = {"attention_dropout": 0.3, "dtype": torch.float32}  # dropout is switched off
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **settings)
    more = {"reward": letters, "data": ROWS}
    policy = (model, AutoTokenizer.from_pretrained(checkpoint))
    live = grpo.compose(*SMALL, "optimizer.lr=1e-3", run_dir=tmp_path / "live", policy=policy, **more).fit()
    path = grpo.compose(*SMALL, "optimizer.lr=1e-3", run_dir=tmp_path / "path", policy=checkpoint, **more).fit()
    assert isinstance(live.module.policy, HFPolicy)
    assert live.module.policy.model is model
    assert live.module.policy.share_prompts
    assert same(weights(live.module), weights(path.module))
    assert live.config["rollout"]["max_new_tokens"] == 8
    assert live.config["optimizer"]["lr"] == 1e-3
    policy = load(str(checkpoint), dtype="float32", attn_implementation="sdpa", trust_remote_code=False)
    assert grpo.compose(*SMALL, policy=policy, **more).module.policy is policy
    with pytest.raises(ValueError, match="a transformers model needs its tokenizer"):
        grpo.compose(policy=model)


@pytest.mark.slow
def test_rows_take_the_place_of_an_experiments_data(checkpoint):
    sizes = ("data.prompts_per_step=5", "rollout.group_size=4", "rollout.max_new_tokens=8", "trainer=cpu")
    sizes += ("reference=none", "loss.kl_coef=0")
    for experiment in ("rlox_quickstart", "open_r1_exercise", "gpt2_notebook", "open_r1"):
        run = grpo.compose(f"experiment={experiment}", *sizes, policy=checkpoint, reward=letters, data=ROWS[:5])
        assert [len(run.data.train), len(run.data.validation)] == [5, 5]
        assert run.module.policy.model.config.model_type == "llama"
        assert list(run.module.rollout.reward) == ["letters"]


def test_data_sets_and_files_are_the_same_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    runs = [
        grpo.compose(*SMALL, run_dir=tmp_path / name, reward=letters, data=data)
        for name, data in (("rows", ROWS), ("set", Dataset.from_list(ROWS)), ("file", str(tmp_path / "rows.jsonl")))
    ]
    for run in runs:
        assert [run.data.train[i] for i in range(5)] == [runs[0].data.train[i] for i in range(5)]
        assert run.data.columns == ("answer",)
    assert len(runs[0].data.validation) == 1  # held out
    for name in ("test", "validation"):
        splits = DatasetDict({"train": Dataset.from_list(ROWS), name: Dataset.from_list(ROWS[1:3])})
        data = grpo.compose(*SMALL, reward=letters, data=splits).data
        assert [len(data.train), len(data.validation), data.validation[0][0]] == [6, 2, "Spell moon"]
    few = grpo.compose(*SMALL, reward=letters, data=["a", "b"])
    assert [len(few.data.train), len(few.data.validation)] == [2, 2]
    pairs = ({"prompt": (1, 2)}, {"prompt": torch.tensor([3, 4])})
    data = grpo.compose(*TOKENS, policy=Model(), reward=low, data=pairs).data
    assert [data.train[i][0] for i in range(2)] == [[1, 2], [3, 4]]


def test_what_cannot_be_a_part_is_refused():
    for parts, message in (
        ({"reward_fn": letters}, r"reward_fn: no such part; compose\(reward=FUNCTION\)"),
        ({"tokenizer": 1, "group_size": 8}, r"'KEY=VALUE'\)\ntokenizer: .* compose\(policy=\(MODEL, TOKENIZER\)\)"),
        ({"group_size": 8}, "group_size=8: is called rollout.group_size=8 here"),
        ({"nonsense": 8}, r"nonsense: no such part; there are reward, policy, .* compose\('nonsense=8'\)"),
        ({"policy": 3}, r"policy=3: needs \(model, tokenizer\)"),
        ({"reward": {"short": 1.0}}, r"reward\['short'\]=1.0: needs a function"),
        ({"reward": []}, r"reward=\[\]: needs a function, a list of functions, or a mapping"),
        ({"reward": {"a b": letters}}, r"reward\['a b'\]: a name needs to be like that of a variable"),
        ({"data": 7}, "data=7: needs rows"),
        ({"data": {"prompt": ["a", "b"]}}, "data=.*: needs rows, a data set, a path, a PromptData"),
        *(({name: 3.0}, f"{name}=3.0: needs .*'{name}=NAME'") for name in _METHODS),
        ({"callbacks": [Callback]}, "callbacks.type_0=.*: needs an object of one of Lightning's callbacks"),
        ({"logger": ["csv", 3]}, "logger.int_1=3: needs an object of one of Lightning's callbacks or loggers"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, r"(?s)optimizer=SGD.*: needs a function or functools"),
    ):
        with pytest.raises(ValueError, match=message):
            grpo.compose(*SMALL, **parts)
    with pytest.raises(ValueError, match=r"^{'steps': 3}: an override needs to be a text, such as 'steps=20'"):
        grpo.compose({"steps": 3})
    for word, parts in (
        ("advantage.eps=1", {"advantage": leave_one_out}),
        ("policy=tiny", {"policy": Model()}),
        ("data=gsm8k", {"data": ROWS}),
        ("data.task=gcd", {"data": PromptData.__new__(PromptData)}),
        ("reference=none", {"reference": Model()}),
        ("data.path=b.csv", {"data": "a.csv"}),
        ("reward.letters.function._target_=a.b", {"reward": letters}),
        ("+reward.letters.weight=0.5", {"reward": {"letters": RewardSpec(letters, 2.0)}}),
        ("+callbacks.mine.every=3", {"callbacks": {"mine": Callback()}}),
        ("loss.surrogate.epsilon_low=0.1", {"loss": improved}),
    ):
        with pytest.raises(ValueError, match=f"{re.escape(word)}: .* is given as an object, too; choose one of the"):
            grpo.compose(word, **parts)
    with pytest.raises(ConfigError, match="steps=-1"):
        grpo.compose("steps=-1", reward=letters, data=ROWS)


@pytest.mark.slow
def test_what_an_advantage_returns_is_checked(tmp_path):
    settings, more = (*SMALL, "logger=none"), {"reward": letters, "data": ROWS}
    with pytest.raises(ValueError, match="advantage: its parameter 'r' is none of rewards, scores, weights, steps"):
        _ = grpo.compose(*settings, **more, advantage=lambda r: r, run_dir=tmp_path / "unknown").module
    for name, wrong, told in (
        ("number", lambda rewards: 1, "int"),
        ("turned", lambda rewards: rewards.T.contiguous(), r"\(\d+, 2\)"),
    ):
        with pytest.raises(ValueError, match=f"advantage: returned {told}"):
            grpo.compose(*settings, **more, advantage=wrong, run_dir=tmp_path / name).fit()
    centered = lambda rewards, scale=1.0, **more: rewards - rewards.mean(-1, keepdim=True)  # noqa: E731
    grpo.compose(*settings, **more, advantage=centered, callbacks=Callback(), run_dir=tmp_path / "fine").fit()


@pytest.mark.slow
def test_odd_names_of_paths_and_other_users_of_hydra(checkpoint, tmp_path):
    model, place = tmp_path / "a $ {b} = 'c' ${d} e", tmp_path / "${oc.env:HOME} $ {b} ="
    shutil.copytree(checkpoint, model)
    with initialize_config_dir(str(CONF), version_base="1.3"):  # a program that uses Hydra itself
        run = grpo.compose(*SMALL, run_dir=place, policy=model, reward=letters, data=ROWS)
        assert run.module.policy.tokenizer.name_or_path == str(model)
    assert run.fit().metrics["reward/total"] > 0
    assert {"checkpoints", "export", "summary.json"} <= {path.name for path in place.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {model.name, place.name}


@pytest.mark.slow
def test_compose_has_bitwise_the_weights_of_the_command_line(tmp_path):
    settings = [*SMALL, "algorithm=dapo", "module.ppo_epochs=2", "module.minibatch_size=4", "seed=3", "logger=none"]
    settings += ["data.validation_size=8", "rollout.max_new_tokens=36"]
    run = grpo.compose(*settings, run_dir=tmp_path / "python").fit()
    command = [sys.executable, str(ROOT / "train.py"), *settings, f"hydra.run.dir={tmp_path / 'line'}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env=environment)
    written = torch.load(tmp_path / "line" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert same(weights(run.module), {name.removeprefix("policy."): value for name, value in written.items()})


@pytest.mark.slow
def test_any_part_may_be_what_its_settings_would_build(tmp_path):
    """Objects that the command line's settings build, handed in one by one: the same weights."""
    settings = [*SMALL, "data.validation_size=4", "rollout.max_new_tokens=36"]
    expected = weights(grpo.compose(*settings, run_dir=tmp_path / "all").fit().module)
    names = ("data", "advantage", "loss", "rollout", "reference", "validation", "optimizer", "schedule", "trainer")
    for name in (*names, "logger"):
        built = build(*settings, f"run_dir={tmp_path / name}")(name)
        words = [word for word in settings if not word.startswith((f"{name}.", f"{name}="))]
        run = grpo.compose(*words, run_dir=tmp_path / name, **{name: built}).fit()
        assert same(weights(run.module), expected), name


@pytest.mark.slow
def test_a_reference_that_is_not_used_or_is_the_policy_is_said(caplog):
    model = Model()
    with pytest.raises(ValueError, match="reference: the policy's own model would be trained"):
        _ = grpo.compose(*TOKENS, policy=model, reference=model, reward=low, data=[[1], [2]]).module
    grpo.compose(*TOKENS, "loss.kl_coef=0", policy=model, reference=Model(), reward=low, data=[[1], [2]])
    assert (
        "reference is given, and not used: loss.kl_coef, rollout.kl_penalty, rollout.teacher_coef are 0" in caplog.text
    )


@pytest.mark.slow
def test_a_plain_module_learns_from_prompts_of_token_ids(tmp_path):
    model, prompts = Model(), [[1, 2, 3], [4, 5], [6], [7, 8]]
    run = grpo.compose(*TOKENS, "steps=40", run_dir=tmp_path, policy=(model, None), reward=low, data=prompts)
    assert isinstance(run.module.policy, GenericPolicy)
    assert run.module.train_step([[1, 2, 3], [4, 5]])["reward/total"] < 0.5
    run = grpo.compose(*TOKENS, "steps=40", run_dir=tmp_path / "fit", policy=model, reward=low, data=prompts).fit()
    assert run.metrics["reward/total"] > 0.9
    written = Model()
    written.load_state_dict(torch.load(tmp_path / "fit" / "export" / "model.pt", weights_only=True))
    assert torch.equal(written.head.weight, model.head.weight)


def test_a_plain_module_may_have_a_tokenizer_of_transformers_and_a_reference(checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = Model(len(tokenizer))
    reference = copy.deepcopy(model)
    settings, more = (*SMALL, "optimizer.lr=1e-2"), {"reward": letters, "data": ROWS}
    run = grpo.compose(*settings, run_dir=tmp_path, policy=(model, tokenizer), reference=reference, **more)
    assert run.module.train_step(["one", "two"])["policy/kl_divergence"] == 0.0
    assert run.module.train_step(["one", "two"])["policy/kl_divergence"] > 0.0
    assert run.module.reference.model is reference
    assert run.module.policy.chat.uses_template


def test_a_module_that_gives_something_else_than_logits_is_named():
    class Pooled(Model):
        def forward(self, ids):
            return super().forward(ids).mean(1)

    run = grpo.compose(*TOKENS, policy=Pooled(), reward=low, data=[[1], [2]])
    for prompts, message in (([[1], [2]], r"Pooled .*\(16, 16\)"), (["words", "more"], "tokenizer")):
        with pytest.raises(ValueError, match=message):
            run.module.train_step(prompts)


def test_importing_the_package_needs_no_torch():
    code = "import sys, grpo_lightning, grpo_lightning.reward; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_torch_dataset_is_read_up_to_its_length():
    class Questions(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):  # without an IndexError, so that iterating would never end
            return {"prompt": "What is 1 + 1?", "answer": str(index)}

    assert [row["answer"] for row in indexed_rows(Questions())] == ["0", "1"]
