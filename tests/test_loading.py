"""Loading of policies: the shipped one, real architectures, and directories that are incomplete or bring code."""

import json
import os
import pickle
import shutil
import string

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning.policy.chat import ChatTokenizer
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import load, load_chat, resolve_path
from grpo_lightning.reward.model import RewardModel
from grpo_lightning.run import Run
from tests.support.checkpoints import ARCHITECTURES, tokenizer, write_checkpoint, write_reward_model
from tests.support.composed import build, composed

TINY = "pkg://grpo_lightning/policy/tiny"
PLAIN = {"dtype": "float32", "attn_implementation": "sdpa", "trust_remote_code": False}
REWARD = {"dtype": "float32", "device": "cpu", "batch_tokens": 200, "max_length": 256, "label": 0}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("whole") / "model", "llama", chat=True)


@pytest.fixture
def model(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def opened(path, **options):
    return load(str(path), **PLAIN | options)


def reward_model(path):
    made = RewardModel(path=str(path), trust_remote_code=False, **REWARD)
    made.reset()
    return made.network


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_shipped_model_is_small_and_reads_all_of_printable_ascii():
    directory = resolve_path(TINY)
    assert sum(entry.stat().st_size for entry in os.scandir(directory)) < 5_000_000
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 1.2e6
    text = "\n" + "".join(c for c in string.printable if c.isprintable())
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(set(ids)) == 96
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    tagged = "<think>1 + 2</think><answer>3</answer>"
    assert len(tokenizer(tagged)["input_ids"]) == 4 + len("1 + 2") + 1
    assert tokenizer.decode(tokenizer(tagged)["input_ids"], skip_special_tokens=True) == tagged
    assert tokenizer.eos_token_id not in tokenizer("an <eos> in a prompt ends nothing")["input_ids"]
    assert tokenizer.decode(tokenizer("ümlaut")["input_ids"]) == "<unk>mlaut"


ROWS = [
    {"prompt": "The best food in the world is", "answer": "pizza"},
    {"prompt": "12 + 34 =", "answer": "46"},
    {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Corgis are"}],
        "answer": "dogs",
    },
    {"prompt": "The meaning of life is", "answer": "42"},
]


@pytest.mark.parametrize(
    ("architecture", "chat"),
    [
        pytest.param(name, number % 2 == 0, marks=() if number < 2 else pytest.mark.slow)
        for number, name in enumerate(sorted(ARCHITECTURES))
    ],
)
def test_three_steps_of_every_architecture(architecture, chat, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS * 3))
    overrides = [
        *("policy=hf", f"policy.path={write_checkpoint(tmp_path / 'model', architecture, chat=chat)}"),
        *([] if chat else ["policy.plain_text=true"]),
        *("data=jsonl", f"data.path={file}", "data.prompts_per_step=2", "data.validation_size=2"),
        *("reward=[exact,custom]", "reward.custom.function._target_=tests.support.rewards.vowels"),
        *("rollout.group_size=3", "rollout.max_new_tokens=8", "validation.samples_per_prompt=2", "validation.ks=[1]"),
        *("steps=3", "optimizer.lr=1e-3", "trainer=cpu", f"run_dir={tmp_path / 'run'}"),
    ]
    run = Run(composed(*overrides), build(*overrides), overrides=[], directory_given=True)
    run.execute()
    module = run.module
    assert module.completed_steps == 3
    assert module.policy.chat.uses_template == chat
    assert module.metrics["policy/kl_divergence"] > 0
    assert 0.99 < module.metrics["policy/ratio_mean"] < 1.01
    start = dict(module.reference.named_parameters())
    moved = [not torch.equal(p, start[name]) for name, p in module.policy.named_parameters()]
    assert sum(moved) > 0.9 * len(moved)


def cut(directory):
    os.truncate(directory / "model.safetensors", 5000)


def a_run(directory):
    shutil.copytree(directory, directory / "export")
    for file in directory.glob("*.*"):
        file.unlink()


def test_a_checkpoint_is_no_policy(tmp_path):
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(ValueError, match=r"is a checkpoint; checkpoint=\S+/last.ckpt begins with its policy"):
        opened(tmp_path / "last.ckpt")


def an_adapter(directory):
    (directory / "config.json").rename(directory / "adapter_config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            an_adapter,
            " is an adapter without its model; policy.adapter.path continues one, or save peft's model.merge_",
        ),
        (a_run, r" is the directory of a run; use its export: policy.path=\S+/export$"),
        (shutil.rmtree, ": no such file or directory"),
        (lambda path: (path / "config.json").unlink(), ": Unrecognized model"),
        (cut, r": transformers cannot read it \(SafetensorError: .*incomplete metadata"),
    ],
)
def test_faults_of_a_directory_are_named_in_one_sentence(change, message, model):
    change(model)
    with pytest.raises(ValueError, match=rf"^policy.path='{model}'{message}") as error:
        opened(model)
    assert "\n" not in str(error.value)


class Payload:
    """What makes the file at its path when a pickle of it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def ran(tmp_path):
    """The file that a payload makes; the test fails where there is one at its end."""
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists()


def test_pickles_run_no_code(model, tmp_path, ran):
    message = r"path='\S+': its weights are a pickle that holds more than tensors, which could run code"
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**LORA)).save_pretrained(model)
    (model / "adapter_model.safetensors").unlink()
    torch.save({"a": Payload(ran)}, model / "adapter_model.bin")
    with pytest.raises(ValueError, match=message):
        opened(model)
    reward = write_reward_model(tmp_path / "reward", "llama", chat=True)
    content = {"model.embed_tokens.weight": Payload(ran)}
    for read, directory in ((opened, model), (reward_model, reward)):
        (directory / "model.safetensors").unlink()
        (directory / "pytorch_model.bin").write_bytes(pickle.dumps(content))
        with pytest.raises(ValueError, match=message):
            read(directory)
        torch.save(content, directory / "pytorch_model.bin")
        with pytest.raises(ValueError, match=message):
            read(directory)


CODE = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}


def test_code_of_a_model_runs_only_with_trust_remote_code(model, ran):
    (model / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\nraise RuntimeError('it ran')\n")
    edit(model / "config.json", model_type="theirs", auto_map=CODE)
    message = r"^policy.path='\S+': it comes with code of its own, which runs only with policy.trust_remote_code=true"
    with pytest.raises(ValueError, match=message):
        opened(model)
    (model / "theirs.py").write_text("raise RuntimeError('it ran')\n")
    with pytest.raises(ValueError, match="it ran"):
        opened(model, trust_remote_code=True)


@pytest.mark.parametrize(("load", "is_adapted"), [(opened, True), (opened, False), (reward_model, False)])
def test_missing_and_misshapen_weights_are_named(load, is_adapted, tmp_path):
    """Also below an adapter, where transformers reports on the adapter alone; they would be random."""
    write = write_checkpoint if load is opened else write_reward_model
    directory = write(tmp_path / "model", "llama", chat=True)
    if is_adapted:
        get_peft_model(AutoModelForCausalLM.from_pretrained(directory), LoraConfig(**LORA)).save_pretrained(directory)
    name, weights = "model.layers.0.mlp.down_proj.weight", load_file(directory / "model.safetensors")
    save_file(weights | {"unused.weight": torch.ones(1)}, directory / "model.safetensors", metadata={"format": "pt"})
    load(directory)
    for fault in ({}, {name: torch.zeros(3, 3)}):
        others = {other: value for other, value in weights.items() if other != name}
        save_file(others | fault, directory / "model.safetensors", metadata={"format": "pt"})
        message = rf"path='{directory}': 1 of the model's weights are missing there or have .* shape, such as {name}"
        with pytest.raises(ValueError, match=message):
            load(directory)


def test_an_adapter_beside_the_weights_is_merged_trained_and_exported(model, tmp_path):
    made = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), made)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    adapted.save_pretrained(tmp_path / "adapter")
    shutil.copytree(tmp_path / "adapter", model, dirs_exist_ok=True)
    ids = torch.tensor([[3, 5, 7, 3]])
    with torch.no_grad():
        expected = adapted.eval()(ids).logits
        with adapted.disable_adapter():
            assert (expected - adapted(ids).logits).abs().max() > 1e-3
        policy = opened(model)
        policy.export(tmp_path / "export")
        for found in (policy, opened(tmp_path / "export")):
            assert_close(found.model.eval()(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert not list((tmp_path / "export").glob("adapter*"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert dict(policy.model.named_parameters()).keys() == dict(exported.named_parameters()).keys()
    assert all(parameter.requires_grad for parameter in policy.model.parameters())
    above = opened(model, adapter=LORA | {"init_lora_weights": False}).model.eval()
    with torch.no_grad(), above.disable_adapter():
        assert_close(above(ids).logits, expected, rtol=1e-4, atol=1e-5)
        above.enable_adapter_layers()
        assert (above(ids).logits - expected).abs().max() > 1e-3


def test_a_model_without_an_embedding_for_padding_or_end_is_refused(model):
    network, words = AutoModelForCausalLM.from_pretrained(model), tokenizer(chat=True)
    count = len(network.get_input_embeddings().weight)
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})  # as Gemma 3's text models
    policy = HFPolicy(network, words)
    for call in (
        lambda: policy.tokenize_demonstrations(["a"], ["an <image> here"]),
        lambda: policy.tokenize([[3, count]]),
    ):
        with pytest.raises(ValueError, match=f"has {count} embeddings, a text has the token {count}: "):
            call()
    words.pad_token = "<image>"  # added, as is usual, and the embeddings not resized
    with pytest.raises(
        ValueError, match=f"^the model has {count} embeddings, the tokenizer pads or ends with .* {count}"
    ):
        HFPolicy(network, words)


def test_prompts_are_checked_before_the_weights_are_read(model, tmp_path):
    (model / "model.safetensors").unlink()
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS * 3))
    overrides = [
        *("policy=hf", f"policy.path={model}", "data=jsonl", f"data.path={file}", "data.prompts_per_step=2"),
        *("reward=exact", "trainer=cpu", f"run_dir={tmp_path / 'run'}"),
    ]
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('System role not supported') if messages[0].role == 'system' }}")
    for words, message in (
        (["policy.chat_template=nowhere.jinja"], r"^policy.chat_template='nowhere.jinja': there is no such file"),
        (
            [f"policy.chat_template={template}"],
            r"prompts.jsonl, line \d+: the chat template drops message 1 of the role",
        ),
    ):
        run = Run(composed(*overrides, *words), build(*overrides, *words), overrides=[], directory_given=True)
        with pytest.raises(ValueError, match=message):
            _ = run.module
    chat = load_chat(str(model), trust_remote_code=False, chat_template=str(template))
    prompts = [row["prompt"] for row in ROWS[2:] + ROWS[2:3]]
    with pytest.raises(
        ValueError, match=r"^row 0: .*: System role not supported \(the first of 3 such prompts of 3\)$"
    ):
        chat.check_prompts(prompts, lambda number: f"row {number}")


def test_special_tokens_in_plain_text_are_told_with_their_row(caplog):
    chat = ChatTokenizer(tokenizer(chat=False))
    chat.check_prompts(["a", "b<|im_end|>", "<|im_start|>"], lambda number: f"prompts.jsonl, line {number + 1}")
    assert "prompts.jsonl, line 2 holds '<|im_end|>', the first of 2" in caplog.text
    answered = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    ChatTokenizer(tokenizer(chat=True)).check_prompts(
        [answered[:1], answered, answered], lambda number: f"row {number}"
    )
    assert "the last message of the assistant, such as in row 1: '4', the first of 2 prompts" in caplog.text


def test_what_an_export_changes_about_the_generation_config_is_told_on_loading(model, caplog):
    opened(model)
    assert "generation_config" not in caplog.text
    edit(model / "generation_config.json", do_sample=False)  # beside sampling options, which transformers cannot save
    opened(model)
    assert "do_sample=true" in caplog.text
