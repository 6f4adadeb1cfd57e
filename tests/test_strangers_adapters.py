"""An adapter of a stranger imports no module that it names."""

import json
import shutil
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from grpo_lightning.policy import hf
from grpo_lightning.settings.targets import adapter_problems
from grpo_lightning.transformer.strangers import _ADAPTERS
from tests.support.checkpoints import write_checkpoint, write_reward_model
from tests.support.provocations import provocation
from tests.test_strangers import PLAIN, edit, reward_model

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
EVIL = {"megatron_config": {"a": 1}, "megatron_core": "megatron.evil"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, in which Python finds a package of the model directory's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    imported = [name for name in sys.modules if name.split(".")[0] == "megatron"]
    for name in imported:
        del sys.modules[name]
    assert not imported
    assert not (tmp_path / "ran").exists()


def with_adapter(directory, **settings):
    """An adapter as peft writes it beside whole weights, with other settings."""
    if not (directory / "base").exists():
        shutil.copytree(directory, directory / "base")
    model = AutoModelForCausalLM.from_pretrained(directory / "base")
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA)).save_pretrained(directory)
    assert json.loads((directory / "adapter_config.json").read_text())["megatron_core"] == "megatron.core"
    edit(directory / "adapter_config.json", **settings)
    (directory / "evil.py").write_text("open('ran', 'w').close()\n")
    return directory


@provocation(
    "a model directory whose `adapter_config.json` names a module with `megatron_core`", "refused in one sentence"
)
@pytest.mark.parametrize("settings", [EVIL, {"megatron_config": {}}, {"megatron_core": "evil"}])
def test_the_adapter_of_a_model_names_no_module(settings, here):
    directory = with_adapter(write_checkpoint(here / "megatron", "llama", chat=True), **settings)
    with pytest.raises(ValueError, match=r"^policy.path='.*': adapter_config.json.megatron_co.*: would import a") as e:
        hf.load(str(directory), **PLAIN)
    assert "\n" not in str(e.value)


@provocation(
    "a model or reward model with an adapter beside its weights, of which one is missing or has another shape: "
    "transformers tells of the adapter alone, and the weight would be random",
    "refused by the weight's name",
)
@pytest.mark.parametrize("is_adapted", [True, False], ids=["adapter", "none"])
@pytest.mark.parametrize("fault", ["missing", "shape"])
@pytest.mark.parametrize("what", ["model", "reward model"])
def test_weights_beside_an_adapter_are_whole(what, fault, is_adapted, here):
    is_model = what == "model"
    kind = AutoModelForCausalLM if is_model else AutoModelForSequenceClassification
    directory = (write_checkpoint if is_model else write_reward_model)(here / "whole", "llama", chat=True)
    if is_adapted:
        task = "CAUSAL_LM" if is_model else "SEQ_CLS"
        get_peft_model(kind.from_pretrained(directory), LoraConfig(task_type=task, **LORA)).save_pretrained(directory)
    load = (lambda: hf.load(str(directory), **PLAIN)) if is_model else (lambda: reward_model(directory)(["a"], ["b"]))
    load()
    name = "model.layers.0.mlp.down_proj.weight"
    weights = load_file(directory / "model.safetensors")
    del weights[name]
    if fault == "shape":
        weights[name] = torch.zeros(3, 3)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    lacks = f"weights are missing there, such as {name}"
    told = lacks if fault == "missing" else rf"another shape there, such as {name} \(3, 3\) instead of \(\d+, \d+\)"
    with pytest.raises(ValueError, match=told):
        load()


@provocation("a reward model's directory with such an adapter", "refused in one sentence")
def test_the_adapter_of_a_reward_model_names_no_module(here):
    directory = write_reward_model(here / "megatron", "llama", chat=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | LORA | EVIL))
    torch.save({}, directory / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"^reward.model.function.path='.*': adapter_config.json.megatron_config: wo"):
        reward_model(directory)(["hi"], ["there"])


@provocation(
    "a model directory with an adapter of the kind X-LoRA, which names directories of further adapters, such ones",
    "refused in one sentence",
)
def test_an_adapter_of_adapters_is_not_loaded(here):
    directory = with_adapter(write_checkpoint(here / "megatron", "llama", chat=True))
    shutil.copytree(directory, directory / "inner")
    edit(directory / "inner" / "adapter_config.json", **EVIL)
    for place in (directory, directory / "base"):
        edit(place / "config.json", use_cache=False)
    inner = {"0": str(directory / "inner")}
    kind = {
        "peft_type": "XLORA",
        "hidden_size": 16,
        "adapters": inner,
        "base_model_name_or_path": str(directory / "base"),
    }
    (directory / "adapter_config.json").write_text(json.dumps(kind))
    with pytest.raises(ValueError, match=r"^policy.path='.*': adapter_config.json.peft_type=XLORA: others may name"):
        hf.load(str(directory), **PLAIN)


@provocation(
    "adapters of kinds that name other models, tokenizers or files: Shadow, prompt tuning and the like",
    "refused in one sentence",
)
@pytest.mark.parametrize("kind", ["SHADOW", "CPT", "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "BOFT", "lora", []])
def test_only_adapters_that_name_nothing_are_loaded(kind, here):
    directory = with_adapter(write_checkpoint(here / "model", "llama", chat=True), peft_type=kind)
    with pytest.raises(ValueError, match=r"^policy.path='.*': adapter_config.json.peft_type=.*: others may name") as e:
        hf.load(str(directory), **PLAIN)
    assert str(e.value).endswith("OFT, TRAINABLE_TOKENS")


@provocation(
    "an `adapter_config.json` with letters that are other ones in other encodings: peft reads it in the user's own",
    "refused in one sentence; peft itself writes them as `\\u20ac`",
)
def test_adapters_are_described_in_ascii(here):
    directory = with_adapter(write_checkpoint(here / "model", "llama", chat=True), base_model_name_or_path="/modèle")
    hf.load(str(directory), **PLAIN)
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()), ensure_ascii=False), encoding="utf-8")
    with pytest.raises(ValueError, match=r"adapter_config.json: allowed are ASCII characters alone, as peft writes it"):
        hf.load(str(directory), **PLAIN)


@pytest.mark.parametrize("kind", _ADAPTERS)
@pytest.mark.grid
def test_adapters_that_name_nothing_are_loaded(kind, here):
    directory = write_checkpoint(here / "model", "llama", chat=True)
    parts = {"LN_TUNING": ["norm"], "TRAINABLE_TOKENS": ["embed_tokens"], "FOURIERFT": ["mlp.up_proj"]}
    others = {"IA3": {"feedforward_modules": []}, "TRAINABLE_TOKENS": {"token_indices": [3]}}
    others |= {"FOURIERFT": {"n_frequency": 4}, "MISS": {"r": 4}}
    made = PEFT_TYPE_TO_CONFIG_MAPPING[kind](
        task_type="CAUSAL_LM", target_modules=parts.get(kind, ["q_proj"]), **others.get(kind, {})
    )
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(directory), made)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    adapted.save_pretrained(here / "adapter")
    shutil.copytree(here / "adapter", directory, dirs_exist_ok=True)
    ids = torch.tensor([[3, 5, 7, 3]])
    with torch.no_grad():
        plain, expected = adapted.get_base_model(), adapted.eval()(ids).logits
        with adapted.disable_adapter():
            before = plain(ids).logits
        policy = hf.load(str(directory), **PLAIN)
        torch.testing.assert_close(policy.model.eval()(ids).logits, expected, rtol=1e-4, atol=1e-5)
        assert (expected - before).abs().max() > 1e-3
        policy.export(here / "export")
        again = hf.load(str(here / "export"), **PLAIN)
        torch.testing.assert_close(again.model.eval()(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert not list((here / "export").glob("adapter*"))
    assert {name for name, _ in policy.model.named_parameters()} == {
        name for name, _ in AutoModelForCausalLM.from_pretrained(here / "export").named_parameters()
    }
    assert all(parameter.requires_grad for parameter in policy.model.parameters())


@pytest.mark.parametrize("content", ["[]", "{", '"megatron_core"'])
def test_settings_of_an_adapter_are_a_mapping(content, here):
    directory = write_checkpoint(here / "model", "llama", chat=True)
    (directory / "adapter_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"^policy.path='.*'"):
        hf.load(str(directory), **PLAIN)


def test_an_adapter_as_peft_writes_it_is_loaded(here):
    directory = with_adapter(write_checkpoint(here / "model", "llama", chat=True))
    policy = hf.load(str(directory), **PLAIN)
    assert not any("lora" in name for name, _ in policy.model.named_parameters())


@provocation(
    "`policy.adapter={megatron_config: …, megatron_core: megatron.evil}`, also in a checkpoint's own settings",
    "refused in one sentence",
)
@pytest.mark.parametrize("name", EVIL)
def test_settings_of_an_adapter_name_no_module(name, here):
    directory = write_checkpoint(here / "megatron", "llama", chat=True)
    adapter = LORA | {name: EVIL[name]}
    with pytest.raises(ValueError, match=rf"^policy.adapter.{name}: would import a module"):
        hf.load(str(directory), **PLAIN | {"adapter": adapter})
    assert list(adapter_problems({"adapter": adapter})) == [
        f"policy.adapter.{name}: unknown; no adapter may name a module that peft would import"
    ]


@provocation(
    "`tokenizer_class: LlamaForCausalLM` in `tokenizer_config.json` or config.json, a class that loads such an adapter "
    "in place of a tokenizer",
    "refused in one sentence",
)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "AutoModel", "pipeline"])
def test_a_tokenizer_is_a_tokenizer(name, file, here):
    directory = with_adapter(write_checkpoint(here / "megatron", "llama", chat=True), **EVIL)
    rewarding = write_reward_model(here / "reward", "llama", chat=True)
    for place in (directory, rewarding):
        for other in ("tokenizer_config.json", "config.json"):
            settings = json.loads((place / other).read_text())
            settings.pop("tokenizer_class", None)
            (place / other).write_text(json.dumps(settings | ({"tokenizer_class": name} if other == file else {})))
    said = rf"^{{}}.path='.*': transformers cannot read a.*: tokenizer_class='{name}': allowed are tokenizers"
    with pytest.raises(ValueError, match=said.format("policy")):
        hf.load(str(directory), **PLAIN)
    shutil.copy(directory / "adapter_config.json", rewarding)
    with pytest.raises(ValueError, match=said.format("reward.model.function")):
        reward_model(rewarding)(["hi"], ["there"])


@provocation(
    "a model of the kind RAG or encoder-decoder, whose inner directories name such a class", "refused in one sentence"
)
@pytest.mark.parametrize("is_inner", [False, True])
def test_a_tokenizer_of_tokenizers_has_tokenizers(is_inner, here):
    directory = with_adapter(write_checkpoint(here / "megatron", "llama", chat=True), **EVIL)
    inner = directory / "question_encoder_tokenizer"
    shutil.copytree(directory, inner, ignore=shutil.ignore_patterns("base"))
    edit(inner / "tokenizer_config.json", tokenizer_class="LlamaForCausalLM")
    llama = json.loads((directory / "config.json").read_text())
    rag = {"model_type": "rag", "question_encoder": llama, "generator": llama}
    both = {"model_type": "encoder-decoder", "is_encoder_decoder": True, "encoder": rag, "decoder": llama}
    (directory / "config.json").write_text(json.dumps(both if is_inner else rag))
    (directory / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"transformers cannot read a model there: tokenizer_class='LlamaForCausalLM'"):
        hf.load(str(directory), **PLAIN)
