"""Model directories that are incomplete, damaged or bring code: one sentence each, and no code runs."""

import json
import os
import pickle
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

from grpo_lightning.policy import loading
from grpo_lightning.reward.model import RewardModel
from tests.support.checkpoints import QUANTIZABLE, write_checkpoint, write_reward_model

PLAIN = {"dtype": "float32", "attn_implementation": "sdpa", "trust_remote_code": False}
REWARD = {"dtype": "float32", "device": "cpu", "batch_tokens": 200, "max_length": 256, "quantization": None, "label": 0}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("whole") / "model", "llama", chat=True)


@pytest.fixture
def model(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def opened(path):
    return loading.load(str(path), **PLAIN)


def reward_model(path):
    made = RewardModel(path=str(path), trust_remote_code=False, **REWARD)
    made.reset()
    return made.network


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def without(*names):
    return lambda directory: [(directory / name).unlink() for name in names]


def cut(directory):
    os.truncate(directory / "model.safetensors", 5000)


def one_part_of_two(directory):
    names = dict.fromkeys(load_file(directory / "model.safetensors"), "model-00001-of-00002.safetensors")
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    names["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def a_run(directory):
    shutil.copytree(directory, directory / "export")
    for file in directory.glob("*.*"):
        file.unlink()


def set_config(**values):
    return lambda directory: edit(directory / "config.json", **values)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (a_run, r" is the directory of a run; use its export: policy.path=\S+/export$"),
        (shutil.rmtree, ": no such file or directory"),
        (without("config.json"), ": transformers cannot read a model there: Unrecognized model"),
        (lambda path: (path / "config.json").write_text("{"), ": transformers cannot .*config.json' is not a valid JS"),
        (set_config(model_type="brandnew"), ": transformers cannot read a model there: .* model type `brandnew` but"),
        (set_config(hidden_act="nope"), ": transformers cannot read a model there: KeyError: 'nope'"),
        (set_config(quantization_config={"quant_method": "gptq", "bits": 4}), ": a package is missing: .* optimum"),
        (without("tokenizer.json", "tokenizer_config.json"), ": transformers cannot read a tokenizer there: Couldn't"),
        (without("model.safetensors"), ": transformers cannot read .*no file named model.safetensors, or pytorch_mod"),
        (one_part_of_two, r": transformers cannot read a model there: .*model-00002-of-00002.safetensors"),
        (cut, r": a file of its weights is damaged or cut off \(.*incomplete metadata.*\); copy or download it again"),
    ],
)
def test_mistakes_of_users_are_told_in_one_sentence(change, told, model):
    change(model)
    with pytest.raises(ValueError, match=rf"^policy.path='{model}'{told}") as error:
        opened(model)
    assert "\n" not in str(error.value)


def test_a_model_that_is_neither_here_nor_on_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = r"^policy.path='no/such-model': no directory with a model in Hugging Face format, and the hub could not be"
    with pytest.raises(ValueError, match=told) as error:
        opened("no/such-model")
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


@pytest.mark.parametrize("raw", [True, False], ids=["pickle", "torch"])
@pytest.mark.parametrize("load", [opened, reward_model])
def test_pickles_of_weights_run_no_code(load, raw, model, tmp_path, ran):
    directory = model if load is opened else write_reward_model(tmp_path / "reward", "llama", chat=True)
    (directory / "model.safetensors").unlink()
    content = {"model.embed_tokens.weight": Payload(ran)}
    if raw:
        (directory / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, directory / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"its weights are a pickle that holds more than tensors, which could run code"
    ):
        load(directory)


def test_pickles_of_tensors_are_read(model):
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    name = "model.layers.0.mlp.down_proj.weight"
    torch.save(weights | {name: weights[name].T.contiguous().T}, model / "pytorch_model.bin")
    policy = opened(model)
    assert all(torch.equal(value, weights[name]) for name, value in policy.model.named_parameters())
    policy.export(model / "export")
    assert torch.equal(load_file(model / "export" / "model.safetensors")[name], weights[name])


def test_a_pickle_of_an_adapter_runs_no_code(model, ran):
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**LORA)).save_pretrained(model)
    (model / "adapter_model.safetensors").unlink()
    torch.save({"a": Payload(ran)}, model / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"^policy.path='\S+': transformers cannot .*adapter_model.safetensors"):
        opened(model)


CODE = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"model_type": "theirs", "auto_map": CODE}),
        ("tokenizer_config.json", {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": [None, "theirs.Words"]}}),
    ],
)
def test_code_of_a_model_runs_only_with_trust_remote_code(file, values, model, ran, tmp_path):
    (model / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\nraise RuntimeError('it ran')\n")
    edit(model / file, **values)
    told = r"^policy.path='\S+': it comes with code of its own, which runs only with policy.trust_remote_code=true"
    with pytest.raises(ValueError, match=told):
        opened(model)
    (model / "theirs.py").write_text("raise RuntimeError('it ran')\n")
    with pytest.raises(RuntimeError, match="it ran"):
        loading.load(str(model), **PLAIN | {"trust_remote_code": True})


def test_code_of_a_model_that_transformers_knows_is_not_needed(model, ran):
    (model / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\n")
    edit(model / "config.json", auto_map=CODE)
    assert type(opened(model).model).__module__.startswith("transformers.")


@pytest.mark.parametrize(
    "template",
    ["{{ lipsum.__globals__['os'].system('touch RAN') }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"],
)
def test_chat_templates_run_in_a_sandbox(template, model, ran):
    (model / "chat_template.jinja").write_text(template.replace("RAN", str(ran)))
    policy = opened(model)
    with pytest.raises(Exception, match=r"unsafe|undefined"):
        policy.render("hi")


@pytest.mark.parametrize("is_adapted", [True, False], ids=["adapter", "none"])
@pytest.mark.parametrize("load", [opened, reward_model])
def test_missing_and_misshapen_weights_are_named(load, is_adapted, tmp_path):
    """Also below an adapter, where transformers reports on the adapter alone; they would be random."""
    write = write_checkpoint if load is opened else write_reward_model
    directory = write(tmp_path / "model", "llama", chat=True)
    if is_adapted:
        kind = AutoModelForCausalLM if load is opened else AutoModelForSequenceClassification
        get_peft_model(kind.from_pretrained(directory), LoraConfig(**LORA)).save_pretrained(directory)
    load(directory)
    name, weights = "model.layers.0.mlp.down_proj.weight", load_file(directory / "model.safetensors")
    for fault, told in (
        ({}, rf"1 of the model's weights are missing there, such as {name}"),
        ({name: torch.zeros(3, 3)}, rf"1 of the model's weights has another shape there, such as {name} \(3, 3\) inst"),
    ):
        others = {other: value for other, value in weights.items() if other != name}
        save_file(others | fault, directory / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"path='{directory}': {told}"):
            load(directory)


def test_weights_of_another_shape_are_named_where_they_are_quantized_in_the_files(tmp_path):
    base = write_checkpoint(tmp_path / "model", "llama", chat=False, **QUANTIZABLE)
    kind = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(base, quantization_config=kind, device_map="cpu").save_pretrained(base)
    edit(base / "config.json", intermediate_size=64)
    with pytest.raises(ValueError, match=r": 6 .*, such as \S+\.down_proj\.weight \(64, 128\) instead of \(64, 64\)"):
        opened(base)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LORA", {"target_modules": ["q_proj"]}),
        ("IA3", {"target_modules": ["q_proj"], "feedforward_modules": []}),
        ("LN_TUNING", {"target_modules": ["norm"]}),
        ("TRAINABLE_TOKENS", {"target_modules": ["embed_tokens"], "token_indices": [3]}),
    ],
)
def test_an_adapter_beside_the_weights_is_merged_trained_and_exported(kind, settings, model, tmp_path):
    made = PEFT_TYPE_TO_CONFIG_MAPPING[kind](task_type="CAUSAL_LM", **settings)
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
            torch.testing.assert_close(found.model.eval()(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert not list((tmp_path / "export").glob("adapter*"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert dict(policy.model.named_parameters()).keys() == dict(exported.named_parameters()).keys()
    assert all(parameter.requires_grad for parameter in policy.model.parameters())
