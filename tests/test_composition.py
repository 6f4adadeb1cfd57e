"""The Python door: live objects become parts, and a run made of them is the command line's."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
from datasets import Dataset
from hydra import initialize_config_dir
from lightning import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_lightning as grpo
from grpo_lightning.advantage import leave_one_out
from grpo_lightning.config import ConfigError
from grpo_lightning.data import PromptData
from grpo_lightning.policy.generic import GenericPolicy
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import load
from grpo_lightning.reward import RewardSpec
from tests.support.checkpoints import write_checkpoint
from tests.support.composed import CONF, ROOT, build
from tests.support.sampling import generate

SMALL = ("steps=2", "data.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=8", "trainer=cpu")
ROWS = [{"prompt": f"Spell {word}", "answer": word} for word in ("sun", "moon", "star", "tree", "lake", "wind")]


def letters(completions, **columns):
    return [float(len(set(text))) for text in completions]


class Own(nn.Module):
    """A language model of one's own: forward(ids) -> logits."""

    def __init__(self, vocabulary=16):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, 24)
        self.layer = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, vocabulary)

    def forward(self, ids):
        return self.head(self.layer(self.embedding(ids))[0])


def weights(module):
    return {name: value.clone() for name, value in module.policy.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama", chat=True)


@pytest.mark.parametrize("key", ["run_dir", "++run_dir", "hydra.run.dir"])
def test_the_run_directory_may_be_an_override(key, tmp_path):
    run = grpo.compose(*SMALL, f"{key}={tmp_path}/x", reward={"letters": letters}, data=ROWS)
    assert (run.directory, run.config["run_dir"]) == (tmp_path / "x", f"{tmp_path}/x")


@pytest.mark.slow
def test_a_run_of_functions_and_rows_learns_from_them(tmp_path):
    run = grpo.compose(*SMALL, run_dir=tmp_path, reward={"letters": letters}, data=ROWS)
    assert run.metrics == {}
    assert run.fit() is run
    assert run.metrics["reward/letters"] == run.metrics["reward/total"] > 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["overrides"] == list(SMALL)
    assert (tmp_path / ".hydra" / "config.yaml").exists()
    assert (tmp_path / "export" / "model.safetensors").exists()
    assert list(run.module.rollout.reward) == ["letters"]


@pytest.mark.slow
def test_overrides_reach_what_live_objects_leave_open(tmp_path):
    run = grpo.compose(
        *SMALL, "reward=[format]", "reward.letters.weight=0.5", run_dir=tmp_path, reward={"letters": letters}, data=ROWS
    )
    rewards = run.module.rollout.reward
    assert sorted(rewards) == ["format", "letters"]
    assert rewards["letters"].weight == 0.5
    assert rewards["letters"].function is letters
    assert list(grpo.compose("algorithm=dapo", reward=letters, data=ROWS * 2).module.rollout.reward) == [
        "soft_overlong",
        "letters",
    ]


@pytest.mark.slow
def test_parts_are_replaced_whole(tmp_path):
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen.append(module.completed_steps)

    run = grpo.compose(
        *SMALL,
        run_dir=tmp_path,
        advantage=leave_one_out,
        reward={"letters": RewardSpec(letters, 2.0)},
        data={"train": ROWS[:4], "validation": ROWS[4:]},
        callbacks=[Watch()],
        logger=False,
    )
    run.fit()
    assert run.module.rollout.advantage is leave_one_out
    assert seen == [1, 2]
    assert [len(run.data.train), len(run.data.validation)] == [4, 2]
    assert run.metrics["reward/total"] == pytest.approx(2 * run.metrics["reward/letters"])
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.slow
def test_models_go_in_as_objects_and_as_paths(checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    live = grpo.compose(
        *SMALL,
        "optimizer.lr=1e-3",
        run_dir=tmp_path / "live",
        policy=(model, AutoTokenizer.from_pretrained(checkpoint)),
        reward=letters,
        data=ROWS,
    ).fit()
    path = grpo.compose(
        *SMALL, "optimizer.lr=1e-3", run_dir=tmp_path / "path", policy=checkpoint, reward=letters, data=ROWS
    ).fit()
    assert isinstance(live.module.policy, HFPolicy)
    assert live.module.policy.model is model
    assert same(weights(live.module), weights(path.module))
    assert live.config["rollout"]["max_new_tokens"] == 8
    assert live.config["optimizer"]["lr"] == 1e-3
    policy = load(str(checkpoint), dtype="float32", attn_implementation="sdpa", trust_remote_code=False)
    assert grpo.compose(*SMALL, policy=policy, reward=letters, data=ROWS).module.policy is policy


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["rlox_quickstart", "open_r1_exercise", "gpt2_notebook", "open_r1"])
def test_rows_take_the_place_of_an_experiments_data(experiment, checkpoint):
    sizes = ("data.prompts_per_step=5", "rollout.group_size=4", "trainer=cpu", "reference=none", "loss.kl_coef=0")
    run = grpo.compose(f"experiment={experiment}", *sizes, policy=checkpoint, reward=letters, data=ROWS[:5])
    assert [len(run.data.train), len(run.data.validation)] == [5, 5]
    assert run.module.policy.model.config.model_type == "llama"
    assert list(run.module.rollout.reward) == ["letters"]


@pytest.mark.slow
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
    few = grpo.compose(*SMALL, reward=letters, data=["a", "b"])
    assert [len(few.data.train), len(few.data.validation)] == [2, 2]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"rewards": letters}, "rewards: allowed parts are policy, data, reward"),
        ({"policy": 3}, r"policy=3: allowed are \(model, tokenizer\)"),
        ({"policy": (3, 4)}, r"policy=\(3, 4\): allowed are"),
        ({"reward": {"short": 1.0}}, r"reward\['short'\]=1.0: allowed are functions"),
        ({"reward": []}, r"reward=\[\]: allowed are a function and a mapping"),
        ({"data": 7}, "data=7: allowed are rows"),
        ({"callbacks": [3]}, r"callbacks\['int_0'\]=3: allowed are Lightning callbacks"),
        ({"reward": {"a b": letters}}, r"reward\['a b'\]: allowed are names like those of variables"),
        ({"data": {"prompt": ["a", "b"]}}, "data=.*: allowed are rows, a data set, a path, a PromptData"),
        ({"data": {"train": ROWS, "test": ROWS}}, "data=.*: allowed are rows"),
        ({"module": 3}, "module: allowed parts are policy, data"),
        ({"steps": 3}, r"steps: allowed parts .*; anything else is set by a text, as in compose\('steps=20'\)"),
        ({"loss": "dapo"}, "loss='dapo': allowed are objects; the text 'loss=dapo' makes a choice"),
        ({"trainer": {"max_epochs": 3}}, "trainer=.*: allowed is a lightning.Trainer; trainer.KEY=VALUE changes a"),
        ({"optimizer": 3}, "optimizer=3: allowed is a function of the parameters, such as functools.partial"),
        ({"advantage": 3}, "advantage=3: allowed is a function of some of rewards, scores, weights and steps"),
        ({"callbacks": 3}, r"callbacks\['int_0'\]=3: allowed are Lightning callbacks"),
    ],
)
def test_what_cannot_be_a_part_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        grpo.compose(*SMALL, **parts)


@pytest.mark.slow
def test_an_advantage_is_looked_at(tmp_path):
    with pytest.raises(ValueError, match=r"^{'steps': 3}: allowed are texts, such as 'steps=20'"):
        grpo.compose({"steps": 3})
    settings = (*SMALL, "logger=none")
    more = {"reward": letters, "data": ROWS}
    with pytest.raises(ValueError, match="advantage: its parameter 'r' is none of rewards, scores, weights, steps"):
        _ = grpo.compose(*settings, **more, advantage=lambda r: r, run_dir=tmp_path / "unknown").module
    for name, wrong, told in (
        ("number", lambda rewards: 1, "int"),
        ("turned", lambda rewards: rewards.T.contiguous(), r"\(\d+, 2\)"),
        ("flat", lambda rewards: rewards.flatten(), r"\(\d+,\)"),
    ):
        with pytest.raises(ValueError, match=f"advantage: returned {told}; allowed are tensors of shape"):
            grpo.compose(*settings, **more, advantage=wrong, run_dir=tmp_path / name).fit()
    centered = lambda rewards, scale=1.0, **more: rewards - rewards.mean(-1, keepdim=True)  # noqa: E731
    grpo.compose(*settings, **more, advantage=centered, callbacks=Callback(), run_dir=tmp_path / "fine").fit()


@pytest.mark.slow
def test_names_of_directories_are_not_resolved(tmp_path):
    place = tmp_path / "${oc.env:HOME} $ {b} ${"
    grpo.compose(*SMALL, reward=letters, data=ROWS, run_dir=place).fit()
    assert {"checkpoints", "export", "summary.json"} <= {path.name for path in place.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == [place.name]


def test_one_of_object_and_setting(checkpoint):
    with pytest.raises(ValueError, match=r"advantage.eps=1: advantage is given as an object; allowed is one"):
        grpo.compose("advantage.eps=1", advantage=leave_one_out)
    for word, parts in (
        ("policy=tiny", {"policy": Own()}),
        ("data=gsm8k", {"data": ROWS}),
        ("data.task=gcd", {"data": PromptData.__new__(PromptData)}),
        ("reference=none", {"reference": Own()}),
    ):
        with pytest.raises(ValueError, match=f"{word}: .* is given as an object; allowed is one of the two"):
            grpo.compose(word, **parts)
    with pytest.raises(ValueError, match=r"reward\['format'\]: allowed are names"):
        grpo.compose("reward=[format]", reward={"format": letters})
    with pytest.raises(ConfigError, match="steps=0: allowed is an integer >= 1"):
        grpo.compose("steps=0", reward=letters, data=ROWS)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(ValueError, match="a transformers model needs its tokenizer"):
        grpo.compose(policy=model)


@pytest.mark.slow
def test_compose_has_bitwise_the_weights_of_the_command_line(tmp_path):
    settings = [*SMALL, "algorithm=dapo", "module.ppo_epochs=2", "module.minibatch_size=4", "seed=3", "logger=none"]
    settings += ["data.validation_size=8", "rollout.max_new_tokens=36"]
    run = grpo.compose(*settings, run_dir=tmp_path / "python").fit()
    command = [sys.executable, str(ROOT / "train.py"), *settings, f"hydra.run.dir={tmp_path / 'line'}"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env=_environment())
    written = torch.load(tmp_path / "line" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert same(weights(run.module), {name.removeprefix("policy."): value for name, value in written.items()})


@pytest.mark.slow
def test_runs_continue_from_python(tmp_path):
    more = {"reward": letters, "data": ROWS}
    settings = [*SMALL[1:], "steps=4", "schedule=constant", "callbacks.checkpoint.every=1", "validation.every=4"]
    whole = grpo.compose(*settings, run_dir=tmp_path / "whole", **more).fit()
    grpo.compose(*settings, "steps=2", run_dir=tmp_path / "parts", **more).fit()
    with pytest.raises(ValueError, match="already holds a run"):
        grpo.compose(*settings, run_dir=tmp_path / "parts", **more).fit()
    continued = grpo.compose(*settings, "checkpoint=last", run_dir=tmp_path / "parts", **more).fit()
    assert same(weights(whole.module), weights(continued.module))
    metrics = grpo.compose(*settings, "checkpoint=last", run_dir=tmp_path / "parts", **more).validate()
    assert metrics["val/reward/total"] == continued.metrics["val/reward/total"]
    measured = continued.validate()  # the policy as it is now
    assert measured["val/reward/total"] == metrics["val/reward/total"]
    assert continued.export() == tmp_path / "parts" / "export"


@pytest.mark.slow
def test_any_part_may_be_what_its_settings_would_build(tmp_path):
    """Objects that the command line's settings build, handed in one by one: the same weights."""
    settings = [*SMALL, "data.validation_size=4", "rollout.max_new_tokens=36"]
    expected = weights(grpo.compose(*settings, run_dir=tmp_path / "all").fit().module)
    names = (
        "data",
        "advantage",
        "loss",
        "rollout",
        "reference",
        "validation",
        "optimizer",
        "schedule",
        "trainer",
        "logger",
    )
    for name in names:
        built = build(*settings, f"run_dir={tmp_path / name}")(name)
        words = [word for word in settings if not word.startswith((f"{name}.", f"{name}="))]
        run = grpo.compose(*words, run_dir=tmp_path / name, **{name: built}).fit()
        assert same(weights(run.module), expected), name
    callbacks = build(*settings)("callbacks")
    run = grpo.compose(*settings, run_dir=tmp_path / "more", callbacks={"again": callbacks["hparams"]}).fit()
    assert same(weights(run.module), expected)


@pytest.mark.slow
def test_paths_and_tables_and_other_users_of_hydra(checkpoint, tmp_path):
    odd = tmp_path / "a $ {b} = 'c' ${d} e"
    shutil.copytree(checkpoint, odd)
    with initialize_config_dir(str(CONF), version_base="1.3"):  # a program that uses Hydra itself
        run = grpo.compose(*SMALL, run_dir=tmp_path / "x = y", policy=odd, reward=letters, data=ROWS)
        assert run.module.policy.tokenizer.name_or_path == str(odd)
    assert run.fit().metrics["reward/total"] > 0
    pairs = ({"prompt": (1, 2)}, {"prompt": torch.tensor([3, 4])})
    assert [grpo.compose(*PLAIN, policy=Own(), reward=early, data=pairs).data.train[i][0] for i in range(2)] == [
        [1, 2],
        [3, 4],
    ]


def test_an_experiments_rewards_give_way_to_live_ones(tmp_path):
    run = grpo.compose("experiment=annealed", *SMALL, run_dir=tmp_path, reward=letters, data=ROWS)
    assert list(run.config["reward"]) == ["letters"]


@pytest.mark.slow
def test_a_reference_that_is_not_used_or_is_the_policy_is_said(caplog):
    model = Own()
    with pytest.raises(ValueError, match=r"reference: the policy's own model, which trains; allowed is a copy of it"):
        _ = grpo.compose(*PLAIN, policy=model, reference=model, reward=early, data=[[1], [2]]).module
    grpo.compose(*PLAIN, "loss.kl_coef=0", policy=model, reference=Own(), reward=early, data=[[1], [2]])
    assert "reference is given, and not used: loss.kl_coef and rollout.kl_penalty are 0" in caplog.text


@pytest.mark.slow
def test_a_live_models_dropout_is_switched_off(checkpoint, tmp_path):
    settings = {"attention_dropout": 0.3, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **settings)
    run = grpo.compose(
        *SMALL, run_dir=tmp_path, policy=(model, AutoTokenizer.from_pretrained(checkpoint)), reward=letters, data=ROWS
    )
    assert run.fit().module.policy.share_prompts  # scored twice alike, and as sampled, or the run would have ended


# ------------------------------------------------------------------------------------------- a module of one's own


def early(completions, prompts, completion_ids):
    """How many of the tokens are below 4."""
    return [sum(number < 4 for number in ids) / len(ids) for ids in completion_ids]


PLAIN = ("optimizer.lr=1e-2", "rollout.group_size=8", "rollout.max_new_tokens=8", "data.prompts_per_step=2")


@pytest.mark.slow
def test_a_plain_module_learns_from_prompts_of_token_ids(tmp_path):
    model = Own()
    run = grpo.compose(
        *PLAIN, "steps=40", run_dir=tmp_path, policy=(model, None), reward=early, data=[[1, 2, 3], [4, 5], [6], [7, 8]]
    )
    assert isinstance(run.module.policy, GenericPolicy)
    first = run.module.train_step([[1, 2, 3], [4, 5]])["reward/total"]
    assert first < 0.5
    run = grpo.compose(
        *PLAIN, "steps=40", run_dir=tmp_path / "fit", policy=model, reward=early, data=[[1, 2, 3], [4, 5], [6], [7, 8]]
    ).fit()
    assert run.metrics["reward/total"] > 0.9
    written = Own()
    written.load_state_dict(torch.load(tmp_path / "fit" / "export" / "model.pt", weights_only=True))
    assert torch.equal(written.head.weight, model.head.weight)


def test_a_plain_module_is_scored_as_it_was_sampled():
    """Prompts of several lengths, completions that end early: the recomputed log-probabilities are the sampler's."""

    class Text:
        eos_token_id, pad_token_id = 15, 0

        def encode(self, text):
            return [1 + ord(letter) % 13 for letter in text]

        def decode(self, ids):
            return "".join(chr(96 + number) for number in ids)

    policy = GenericPolicy(Own(), Text())
    sampling = grpo.Sampling(temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=12)
    sampled = generate(policy, ["abc", "a", "abcdef", [3, 4]], group_size=6, sampling=sampling, seed=1)
    lengths = sampled.mask.sum(-1)
    assert lengths.min() < lengths.max() == 12
    logprobs, entropy = policy.logprobs_and_entropy(sampled, temperature=0.7, entropy=True)
    assert (logprobs - sampled.logprobs).abs().max() < 1e-5
    assert (entropy - sampled.entropy).abs().max() < 1e-5
    # by hand, for one row: the whole row through the model, without padding
    row = 7
    ids = sampled.ids[row][sampled.attention_mask[row]]
    count = int(lengths[row])
    alone = (policy.model(ids[None])[0] / 0.7).log_softmax(-1)[:-1]
    expected = alone.gather(-1, ids[1:, None]).squeeze(-1)[-count:]
    torch.testing.assert_close(logprobs[row, :count], expected)
    assert all("o" not in text for text in sampled.texts)  # the end of sequence, 15, is no text
    again = generate(policy, ["abcdef"], group_size=6, sampling=sampling, seed=1, first_prompt=2)
    assert again.texts == sampled.texts[12:18]  # whatever is sampled beside it


def test_a_plain_module_may_have_a_tokenizer_of_transformers_and_a_reference(checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = Own(len(tokenizer))
    reference = copy.deepcopy(model)
    run = grpo.compose(
        *SMALL, "optimizer.lr=1e-2", run_dir=tmp_path, policy=(model, tokenizer), reference=reference, reward=letters,
        data=ROWS,
    )  # fmt: skip
    first = run.module.train_step(["one", "two"])
    assert first["policy/kl_divergence"] == 0.0
    assert run.module.train_step(["one", "two"])["policy/kl_divergence"] > 0.0
    assert run.module.reference.model is reference
    assert run.module.policy.uses_chat_template


@pytest.mark.slow
def test_a_module_that_gives_something_else_than_logits_is_named():
    run = grpo.compose(*PLAIN, policy=nn.Embedding(9, 4).requires_grad_(), reward=early, data=[[1], [2]])
    assert run.module.policy._logits(torch.ones(2, 3, dtype=torch.long)).shape == (2, 3, 4)

    class Pooled(Own):
        def forward(self, ids):
            return super().forward(ids).mean(1)

    run = grpo.compose(*PLAIN, policy=Pooled(), reward=early, data=[[1], [2]])
    with pytest.raises(ValueError, match=r"of Pooled gave \(16, 16\) for ids \(16, 1\): allowed are logits"):
        run.module.train_step([[1], [2]])
    with pytest.raises(ValueError, match=r"of Own failed on ids up to 99 in rows of 2: .*; allowed are ids"):
        grpo.compose(*PLAIN, policy=Own(), reward=early, data=[[1], [2]]).module.train_step([[1, 99], [2, 3]])
    with pytest.raises(ValueError, match="without a tokenizer allowed are token ids"):
        run.module.train_step(["words", "more"])


# ------------------------------------------------------------------------------------------ a loop of one's own


@pytest.mark.slow
def test_a_loop_of_ones_own_makes_the_steps_of_the_trainer(tmp_path):
    settings = [*SMALL[1:], "steps=3", "data.validation_size=4", "schedule=linear", "rollout.max_new_tokens=36"]
    trained = grpo.compose(*settings, run_dir=tmp_path).fit()
    run = grpo.compose(*settings, "validation.every=2", run_dir=tmp_path / "own")
    loader = run.module and run.data.train_dataloader()
    metrics = []
    for _ in range(2):  # each time up to a validation
        metrics += [run.module.train_step(prompts) for prompts in loader]
    assert len(metrics) == run.module.completed_steps == 3
    assert same(weights(run.module), weights(trained.module))
    assert metrics[-1]["reward/total"] == trained.metrics["reward/total"]
    assert metrics[-1]["optim/lr"] == trained.metrics["optim/lr"] < metrics[0]["optim/lr"]


@pytest.mark.slow
def test_a_validation_between_steps_of_ones_own_changes_nothing(tmp_path):
    settings = [*SMALL, "data.validation_size=4"]
    more = {"reward": letters, "data": ROWS}
    plain, measured = (grpo.compose(*settings, run_dir=tmp_path / name, **more) for name in ("a", "b"))
    for run in (plain, measured):
        run.module.train_step(["one", "two"])
    assert "val/pass@1" not in measured.metrics
    assert "val/pass@1" in measured.validate()
    for run in (plain, measured):
        run.module.train_step(["three", "four"])
    assert same(weights(plain.module), weights(measured.module))


@pytest.mark.slow
def test_a_loop_of_ones_own_computes_in_the_precision_of_the_settings(tmp_path):
    runs = [
        grpo.compose(*SMALL, f"trainer.precision={precision}", run_dir=tmp_path, reward=letters, data=ROWS)
        for precision in ("32-true", "bf16-mixed")
    ]
    norms = [run.module.train_step(["one", "two"])["optim/grad_norm"] for run in runs]
    assert norms[0] != norms[1]
    assert norms[0] == pytest.approx(norms[1], rel=0.3)


@pytest.mark.slow
def test_a_loop_of_ones_own_passes_columns_to_rewards(tmp_path):
    seen = []

    def right(completions, answer):
        seen.extend(answer)
        return [0.0] * (len(completions) - 1) + [1.0]

    run = grpo.compose(*SMALL, run_dir=tmp_path, reward=right, data=ROWS)
    run.module.train_step(["a b", "c d"], answer=["x", "y"])
    assert seen == ["x"] * 4 + ["y"] * 4


# ------------------------------------------------------------------------------------------ a trainer of one's own

OWN = """
import sys
import lightning, torch
import grpo_lightning as grpo

if __name__ == "__main__":
    kind, directory, *settings = sys.argv[1:]
    run = grpo.compose(*settings, run_dir=directory)
    several = {"strategy": kind, "devices": 2} if kind != "one" else {"devices": 1}
    trainer = lightning.Trainer(accelerator="cpu", logger=False, default_root_dir=directory, **several)
    trainer.fit(run.module, datamodule=run.data)
    if trainer.is_global_zero:
        torch.save([run.module.policy.state_dict(), run.module.metrics], f"{directory}/result.pt")
"""
SETTINGS = (
    "steps=5",
    "data.prompts_per_step=4",
    "rollout.group_size=4",
    "data.validation_size=6",
    "validation.every=2",
)


def _environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def own_trainer(directory: Path, kind: str):
    directory.mkdir()
    (directory / "script.py").write_text(OWN)
    command = [sys.executable, "script.py", kind, str(directory), *SETTINGS, "+optimizer.eps=1e-7"]
    done = subprocess.run(command, cwd=directory, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(directory / "result.pt", weights_only=True)


@pytest.mark.slow
def test_a_trainer_of_ones_own_gives_one_processs_weights(tmp_path):
    run = grpo.compose(*SETTINGS, "+optimizer.eps=1e-7", run_dir=tmp_path / "run").fit()
    alone, metrics = own_trainer(tmp_path / "one", "one")
    assert same(alone, weights(run.module))
    assert metrics["val/pass@1"] == run.metrics["val/pass@1"]
    found, metrics = own_trainer(tmp_path / "two", "ddp_find_unused_parameters_true")
    gap = torch.stack([(found[name] - alone[name]).norm() for name in alone]).norm()
    assert gap < 1e-6 * torch.stack([value.norm() for value in alone.values()]).norm()
    assert metrics["val/pass@1"] == run.metrics["val/pass@1"]


LATE = """
import sys, time
import grpo_lightning as grpo

if __name__ == "__main__":
    time.sleep(1.2)  # another second than that of the first process
    grpo.compose(*sys.argv[1:]).fit()
"""


@pytest.mark.slow
def test_processes_that_lightning_starts_write_into_one_new_directory(tmp_path):
    (tmp_path / "script.py").write_text(LATE)
    settings = [*SETTINGS, "steps=1", "logger=none", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    command = [sys.executable, "script.py", *settings]
    done = subprocess.run(command, cwd=tmp_path, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    [directory] = tmp_path.glob("runs/*/*")
    assert json.loads((directory / "summary.json").read_text())["status"] == "finished"


def test_a_directory_is_chosen_where_no_other_process_has_chosen_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("GRPO_LIGHTNING_RUN_DIRECTORIES", raising=False)
    assert grpo.compose(reward=letters, data=ROWS * 3).directory.parts[0] == "runs"


@pytest.mark.slow
def test_a_trainer_of_ones_own_resumes(tmp_path):
    plain = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    settings = [*SETTINGS, "schedule=constant"]
    whole = grpo.compose(*settings, run_dir=tmp_path / "a")
    lightning.Trainer(**plain, enable_checkpointing=False).fit(whole.module, datamodule=whole.data)
    part = grpo.compose(*settings, "steps=3", run_dir=tmp_path / "b")
    trainer = lightning.Trainer(**plain, enable_checkpointing=False)
    trainer.fit(part.module, datamodule=part.data)
    trainer.save_checkpoint(tmp_path / "at3.ckpt")
    rest = grpo.compose(*settings, run_dir=tmp_path / "c")
    trainer = lightning.Trainer(**plain, enable_checkpointing=False)
    trainer.fit(rest.module, datamodule=rest.data, ckpt_path=tmp_path / "at3.ckpt")
    assert rest.module.completed_steps == 5
    assert same(weights(rest.module), weights(whole.module))
    trainer = lightning.Trainer(**plain, enable_checkpointing=False)  # nothing is left to do
    done = grpo.compose(*settings, run_dir=tmp_path / "d")
    done.module.completed_steps = 5
    trainer.fit(done.module, datamodule=done.data)
    assert done.module.completed_steps == 5


def test_a_strategy_that_reads_checkpoints_itself_is_refused(tmp_path, monkeypatch):
    for name in ("LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):  # that Lightning sets, and leaves
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(ModelParallelStrategy, "setup_environment", lambda strategy: None)
    monkeypatch.setattr(ModelParallelStrategy, "load_checkpoint", lambda *_, **__: pytest.fail("it was read"))
    run = grpo.compose(*SETTINGS, run_dir=tmp_path)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, default_root_dir=tmp_path, strategy=ModelParallelStrategy()
    )
    for work in (trainer.fit, trainer.validate):
        with pytest.raises(ValueError, match="trainer.strategy=ModelParallelStrategy: allowed are a single device"):
            work(run.module, datamodule=run.data, ckpt_path=tmp_path)


def test_a_module_is_made_by_settings(tmp_path):
    torch.save({"step": {"completed": 1}}, tmp_path / "x.ckpt", _use_new_zipfile_serialization=False)
    with pytest.raises(TypeError, match=r"GRPOLightningModule.load_from_checkpoint: allowed is compose\('checkpoint=P"):
        grpo.GRPOLightningModule.load_from_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.slow
def test_a_look_at_two_batches_is_no_validation(tmp_path):
    class Watch(Callback):
        def on_train_start(self, trainer, module):
            self.seen = module.validated_at, "val/pass@1" in module.metrics

    watch = Watch()
    run = grpo.compose(*SETTINGS, "data.validation_batch_size=2", run_dir=tmp_path)
    plain = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(**plain, callbacks=[watch], default_root_dir=tmp_path, max_epochs=-1)
    trainer.fit(run.module, datamodule=run.data)
    assert watch.seen == (-1, False)
    assert run.module.validated_at == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 3}, "trainer.max_steps=3: allowed is -1"),
        ({"max_epochs": 2}, "trainer.max_epochs=2: allowed is -1, or at least 3: an epoch lasts from one validation"),
    ],
)
def test_a_trainer_that_would_end_early_is_refused(tmp_path, options, message):
    run = grpo.compose(*SETTINGS, run_dir=tmp_path)
    trainer = lightning.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        trainer.fit(run.module, datamodule=run.data)


def test_importing_the_package_needs_no_torch():
    code = "import sys, grpo_lightning, grpo_lightning.reward; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=_environment()).returncode == 0
    code = "import grpo_lightning.composition as c, grpo_lightning as g; assert c.compose is g.compose"
    assert subprocess.run([sys.executable, "-c", code], env=_environment()).returncode == 0


@pytest.mark.slow
def test_a_callback_is_switched_off_by_null(tmp_path):
    words = ("callbacks.samples=null", "+callbacks.own=null")
    run = grpo.compose(*SMALL, *words, data=ROWS, reward=letters, run_dir=tmp_path)
    run.fit()
    assert run.module.completed_steps == 2
    assert None not in run.trainer.callbacks
