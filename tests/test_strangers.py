"""A model directory or a data set of a stranger runs no code: what tries to is refused, or does nothing."""

import codecs
import json
import logging
import os
import pickle
import shutil
import tarfile
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from io import BytesIO, StringIO
from pathlib import Path
from pickle import UnpicklingError

import bitsandbytes
import datasets
import numpy as np
import peft
import pyarrow as pa
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from transformers import AutoTokenizer, conversion_mapping, monkey_patching, tokenization_utils_tokenizers
from transformers.activations import ACT2FN
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.bitnet import BitLinear
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto import configuration_auto, modeling_auto, tokenization_auto
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from grpo_lightning.checkpoint import io as checkpoints
from grpo_lightning.data.hub import Hub
from grpo_lightning.data.jsonl import JsonLines
from grpo_lightning.distributed.reading import weights_only
from grpo_lightning.policy import hf
from grpo_lightning.reward.model import RewardModel
from grpo_lightning.transformer import strangers
from grpo_lightning.transformer.quantized import state_problem
from grpo_lightning.transformer.strangers import check_attention, lay_out, only_data
from tests.support.checkpoints import write_checkpoint, write_reward_model
from tests.support.provocations import provocation

PLAIN = {"dtype": "float32", "attn_implementation": "sdpa", "trust_remote_code": False, "quantization": None}
PLAIN |= {"gradient_checkpointing": False, "adapter": None, "system_prompt": None, "plain_text": False}
PLAIN |= {"template_kwargs": None, "share_prompts": True}
REWARD = {"dtype": "float32", "device": "cpu", "batch_tokens": 200, "max_length": 256, "quantization": None, "label": 0}
REWARD |= {"trust_remote_code": False}
REFUSED_CODE = r"it comes with code of its own; allowed is policy.trust_remote_code=true, if you have read that code"
A_PICKLE = r"its weights are a pickle that holds more than tensors, and could run code when it is read; allowed are"


class Payload:
    """What makes the file at its path when a pickle of it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def ran(tmp_path):
    """The file that a payload makes; the test fails where there is one at its end."""
    mark = tmp_path / "ran"
    yield mark
    assert not mark.exists()


@pytest.fixture
def model(tmp_path, ran):
    """A whole model, and beside it the code that its files may name."""
    directory = write_checkpoint(tmp_path / "model", "llama", chat=True)
    code = (
        f"import os\nos.system('touch {ran}')\n"
        "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Words\n"
        "def generate(*_, **__): pass\n"
    )
    for place in (directory, directory / "custom_generate"):
        place.mkdir(exist_ok=True)
        for name in ("evil.py", "generate.py", "modeling_llama.py", "__init__.py"):
            (place / name).write_text(code)
    return directory


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def of_pickle(directory, payload, name, *, raw):
    (directory / "model.safetensors").unlink()
    if raw:
        (directory / name).write_bytes(pickle.dumps(payload))
    else:
        torch.save({"model.embed_tokens.weight": payload}, directory / name)


@provocation("a model directory whose `pytorch_model.bin` is a pickle that runs a command", "refused in one sentence")
@pytest.mark.parametrize("raw", [True, False], ids=["pickle", "torch"])
def test_weights_are_tensors(raw, model, ran):
    of_pickle(model, Payload(ran), "pytorch_model.bin", raw=raw)
    told = (
        r"transformers cannot read a model there: a file of weights is a plain pickle, .* could run code"
        if raw
        else A_PICKLE
    )
    with pytest.raises(ValueError, match=r"^policy.path='.*model': " + told):
        hf.load(str(model), **PLAIN)


@provocation(
    "a model whose weights are parts as processes of transformers' write them, which say what they are parts of",
    "refused in one sentence: what no part holds would be what lay in memory before",
)
def test_parts_of_several_processes_are_not_read(model, monkeypatch):
    name = "shard-00000-model-00001-of-00001.safetensors"
    (model / "model.safetensors").rename(model / name)
    with pytest.raises(
        ValueError, match=rf"^policy.path='.*model': {name} is a part of weights that several processes"
    ):
        hf.load(str(model), **PLAIN)
    monkeypatch.setenv("HOME", str(model.parent))
    with pytest.raises(ValueError, match=rf"^policy.path='~/model': {name} is a part of weights"):
        hf.load("~/model", **PLAIN)
    (model / name).rename(model / f"{name}\n")  # which transformers takes for a part, too
    with pytest.raises(ValueError, match=rf"{name} is a part of weights that several processes"):
        hf.load(str(model), **PLAIN)


@provocation(
    "a model or checkpoint as torch wrote it before version 1.6, of which it does not look at views of memory",
    "refused in one sentence",
)
def test_old_files_of_torch_are_not_read(model, tmp_path):
    weights = safetensors.torch.load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert len(torch.load(model / "pytorch_model.bin", weights_only=True)) == len(weights)
    with pytest.raises(ValueError, match=r"a file of weights is a plain pickle, as torch wrote before version 1.6"):
        hf.load(str(model), **PLAIN)
    content = {"step": {"completed": 1}, "others": [torch.ones(2)]}
    torch.save(content, tmp_path / "new.ckpt")
    assert checkpoints.read(tmp_path / "new.ckpt")["step"] == {"completed": 1}
    torch.save(content, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    (tmp_path / "both.ckpt").write_bytes((tmp_path / "old.ckpt").read_bytes() + (tmp_path / "new.ckpt").read_bytes())
    for name in ("old.ckpt", "both.ckpt"):  # to Python the second one is an archive
        with pytest.raises(ValueError, match=rf"{name}' is no checkpoint \(\d+ bytes\)"):
            checkpoints.read(tmp_path / name)


@provocation(
    "a model whose `pytorch_model.bin` has a weight of many numbers at one place in memory, beyond which a fused "
    "optimizer would write; a sparse or nested one; or one with attributes of its own",
    "refused in one sentence",
)
@pytest.mark.parametrize("kind", ["model", "reward model"])
def test_weights_are_dense(kind, model, tmp_path):
    is_reward = kind == "reward model"
    directory = write_reward_model(tmp_path / "reward", "qwen3", chat=True) if is_reward else model
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    name = "model.layers.0.mlp.down_proj.weight"
    named = torch.ones(weights[name].shape)
    named.is_contiguous = OrderedDict
    dense = r"path='.*': transformers cannot read a .*model there: a file of weights holds a tensor that is overlapping"
    known = r"path='.*': its weights are a pickle that holds more than tensors, and could run code"

    def loaded(value):
        torch.save({**weights, name: value}, directory / "pytorch_model.bin")
        if is_reward:
            return RewardModel(path=str(directory), **REWARD).network
        return hf.load(str(directory), **PLAIN).model

    for value, told in (
        (torch.full((1,), 0.25).expand(weights[name].shape), dense),
        (torch.ones(weights[name].shape).to_sparse(), known),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), known),
        (named, known),
    ):
        with pytest.raises(ValueError, match=told):
            loaded(value)
    # What lies in memory in another order is put in order, for kernels that take a weight for one block.
    weight = dict(loaded(weights[name].T.contiguous().T).named_parameters())[name]
    assert weight.is_contiguous()
    assert torch.equal(weight, weights[name])


@provocation(
    "a quantized model with too few scales or numbers for its weights, beyond which kernels would read or write",
    "refused in one sentence; a whole one is read",
)
@pytest.mark.parametrize(
    ("bits", "part", "value", "told"),
    [
        (4, "absmax", torch.zeros(31, dtype=torch.uint8), "has not the scales of 2048 numbers"),
        (4, "absmax", torch.zeros(32), "has not the scales of 2048 numbers"),
        (4, "quant_map", torch.zeros(15), "has not the scales of 2048 numbers"),
        (4, "nested_absmax", torch.zeros(0), "has not the scales of 32 scales"),
        (4, "nested_quant_map", torch.zeros(255), "has not the scales of 32 scales"),
        (4, "blocksize", 128, "has not the scales of 2048 numbers"),
        (4, "nested_blocksize", 1, "has not the scales of 32 scales"),
        (4, "shape", [64, 64], "has fewer than 4096 numbers"),
        (8, "SCB", torch.zeros(31), "has other scales than rows"),
    ],
)
@pytest.mark.grid
def test_what_belongs_to_quantized_weights_fits_them(bits, part, value, told, tmp_path):
    source = write_checkpoint(tmp_path / "model", "llama", chat=True)
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    kind = transformers.BitsAndBytesConfig(**(four if bits == 4 else {"load_in_8bit": True}))
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=kind, device_map={"": "cpu"})
    plain.save_pretrained(source)
    loaded = hf.load(str(source), **PLAIN | {"adapter": {"r": 4}})
    assert not any(state_problem(weight) for weight in loaded.parameters())
    name = "model.layers.0.mlp.down_proj"
    weights = safetensors.torch.load_file(source / "model.safetensors")
    if isinstance(value, torch.Tensor):
        weights[f"{name}.weight.{part}" if bits == 4 else f"{name}.{part}"] = value
    else:
        key = f"{name}.weight.quant_state.bitsandbytes__nf4"
        said = json.loads(bytes(weights[key].tolist())) | {part: value}
        weights[key] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    safetensors.torch.save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"^policy.path='.*': its quantized weight \S*{name}.weight {told}"):
        hf.load(str(source), **PLAIN | {"adapter": {"r": 4}})


@provocation(
    "a model quantized to 4 bits whose configuration has it compute in uint8 or float64, of which bitsandbytes "
    "computes nothing, so that its weights are what memory held",
    "refused in one sentence, before it is run",
)
def test_quantized_layers_compute_in_types_that_there_are(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "model", "llama", chat=True)
    kind = transformers.BitsAndBytesConfig(load_in_4bit=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=kind, device_map={"": "cpu"})
    plain.save_pretrained(source)
    content = json.loads((source / "config.json").read_text())
    for name, is_refused in (("uint8", True), ("float64", True), ("bfloat16", False), (None, False)):
        content["quantization_config"]["bnb_4bit_compute_dtype"] = name
        (source / "config.json").write_text(json.dumps(content))
        told = rf"^policy.path='.*': its quantized layer \S*q_proj computes in torch.{name}; allowed are float16, bf"
        with pytest.raises(ValueError, match=told) if is_refused else nullcontext():
            hf.load(str(source), **PLAIN | {"adapter": {"r": 4}})
    peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules="all-linear")).save_pretrained(source)
    looked_at = []
    compare = strangers.layer_problem
    monkeypatch.setattr(strangers, "layer_problem", lambda one: looked_at.append(type(one).__module__) or compare(one))
    hf.load(str(source), **PLAIN | {"adapter": {"r": 4}})
    assert {"peft.tuners.lora.bnb", "bitsandbytes.nn.modules"} <= {*looked_at}  # an adapter beside weights in 4 bits


@provocation(
    "a model whose configuration has BitNet pack a layer of an odd size, so that attention has fewer keys than values",
    "refused in one sentence, before it is run",
)
def test_packed_layers_have_the_sizes_that_they_say():
    for size, is_refused in ((16, False), (18, True), (2, True)):
        network = torch.nn.Sequential(torch.nn.Linear(8, size), BitLinear(8, size, bias=False))
        told = rf"^policy.path=x: its quantized layer 1 has other weights than its sizes say, {size} x 8$"
        with pytest.raises(ValueError, match=told) if is_refused else nullcontext():
            lay_out(network, "policy.path=x")
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), BitLinear(8, 16, bias=False))
    network[1].in_features = 12
    with pytest.raises(ValueError, match=r"quantized layer 1 has other weights than its sizes say, 16 x 12$"):
        lay_out(network, "policy.path=x")


def test_a_models_own_tensors_are_dense():
    network = torch.nn.Linear(2, 3)
    network.register_buffer("mine", torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match=r"^policy.path=x: its weight mine is torch.sparse_coo; allowed are dense"):
        lay_out(network, "policy.path=x")


@provocation(
    "a model whose configuration has another package read a pickle (timm's `checkpoint_path`) by torch or numpy",
    "refused in one sentence; tensors are read",
)
def test_nobody_reads_pickles_of_a_model(tmp_path, ran):
    torch.save({"x": Payload(ran)}, tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", np.array([Payload(ran)], dtype=object), allow_pickle=True)
    torch.save({"x": torch.ones(2)}, tmp_path / "b.bin")
    readers = (
        lambda: torch.load(tmp_path / "a.bin", weights_only=False),
        lambda: np.load(tmp_path / "a.npy", allow_pickle=True),
        lambda: pickle.loads(pickle.dumps(Payload(ran))),
        lambda: pickle._loads(pickle.dumps(Payload(ran))),
    )
    for read in readers:
        with (
            pytest.raises(ValueError, match=rf"^policy.path='x': {A_PICKLE}"),
            only_data("policy.path", "x", "a model", trusted=False),
        ):
            read()
    with only_data("policy.path", "x", "a model", trusted=False):
        assert torch.load(tmp_path / "b.bin", weights_only=False)["x"].tolist() == [1, 1]
        assert pickle.loads(pickle.dumps({"a": [1]})) == {"a": [1]}
        with ThreadPoolExecutor(1) as others:  # such as the one that receives results of worker processes
            assert others.submit(pickle.loads, pickle.dumps(tmp_path)).result() == tmp_path
    assert pickle.loads(pickle.dumps(tmp_path)) == tmp_path


@provocation(
    "a tokenizer whose `tokenizer_config.json` has a `gguf_file`, which transformers would fetch from the repository "
    "that it names, into the `cache_dir` that it names, such as ~/.vim/plugin",
    "refused in one sentence, nothing is fetched; a `cache_dir` alone is no word of its",
)
def test_a_tokenizer_fetches_nothing(tmp_path, monkeypatch):
    fetched: list[tuple[object, ...]] = []
    source = write_checkpoint(tmp_path / "model", "gpt2", chat=True)
    place = source / "tokenizer_config.json"
    said = json.loads(place.read_text()) if place.exists() else {}
    more = {"name_or_path": "stranger/model", "cache_dir": str(tmp_path / "plugin")}
    more["extra_special_tokens"] = {"gguf_file": "a", "auto_map": "evil.Tok", "image_token": "<|im_end|>"}
    place.write_text(json.dumps(said | more))
    tokenizer = hf.load(str(source), **PLAIN).tokenizer
    tokenizer.save_pretrained(tmp_path / "export")
    handed_on = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert not {"cache_dir", "gguf_file", "auto_map"} & {*tokenizer.init_kwargs, *handed_on}
    assert handed_on["image_token"] == "<|im_end|>"
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate("abcdefg")}))
    (source / "merges.txt").write_text("#version: 0.2\n")
    settings = json.loads((source / "tokenizer_config.json").read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    place.write_text(json.dumps(json.loads(place.read_text()) | {"gguf_file": "evil.vim"}))
    monkeypatch.setattr(tokenization_utils_tokenizers, "cached_file", lambda *args, **_: fetched.append(args))
    with pytest.raises(ValueError, match=r"policy.path='.*: gguf_file='evil.vim' in its tokenizer's files; allowed"):
        hf.load(str(source), **PLAIN)
    assert not fetched


class Gated(transformers.LlamaConfig):
    """A configuration of the user's own, which runs what stands in it."""

    model_type = "gated"


class GatedModel(transformers.LlamaForCausalLM):
    config_class = Gated


@provocation(
    "a stranger's model whose `model_type` or `tokenizer_class` is that of a class which the user's own file has "
    "registered with transformers, and which is given what stands in the configuration",
    "refused in one sentence; with `trust_remote_code=true` it is read",
)
@pytest.mark.parametrize("kind", ["configuration", "model", "tokenizer"])
def test_a_model_leads_to_no_class_that_a_program_has_registered(kind, tmp_path, monkeypatch):
    model = write_checkpoint(tmp_path / "theirs", "llama", chat=True)
    file = model / ("tokenizer_config.json" if kind == "tokenizer" else "config.json")
    said = json.loads(file.read_text())
    plain = transformers.AutoTokenizer.from_pretrained(model)

    class Own(type(plain)):
        """A tokenizer of the user's own."""

    if kind == "configuration":
        monkeypatch.setitem(configuration_auto.CONFIG_MAPPING._extra_content, "gated", Gated)
        monkeypatch.setitem(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, Gated, GatedModel)
        file.write_text(json.dumps(said | {"model_type": "gated", "architectures": ["GatedModel"]}))
        name = "Gated"
    elif kind == "model":
        known = type(transformers.AutoConfig.from_pretrained(model))
        monkeypatch.setitem(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, known, GatedModel)
        name = "GatedModel"
    else:
        monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING._extra_content, Gated, Own)
        file.write_text(json.dumps(said | {"tokenizer_class": "Own"}))
        name = "Own"
    told = rf"{name} of \S+ is no class of transformers' own; allowed is policy\.trust_remote_code=true if you know"
    with pytest.raises(ValueError, match=told):
        hf.load(str(model), **PLAIN)
    if kind == "tokenizer":
        assert type(hf.load(str(model), **PLAIN | {"trust_remote_code": True}).tokenizer).__name__ == "Own"


def of_the_program(*args, **kwargs):
    raise AssertionError("it was called")


@provocation(
    "a stranger's model whose `hidden_act` or `rope_type` is that of a function which the user's own file has added to "
    "those of transformers",
    "an error of one sentence; with `trust_remote_code=true` it is read",
)
@pytest.mark.parametrize(
    ("functions", "said"),
    [
        (ACT2FN, {"hidden_act": "own"}),
        (ROPE_INIT_FUNCTIONS, {"rope_parameters": {"rope_type": "own", "log": "HIT"}}),
    ],
    ids=["hidden_act", "rope_type"],
)
def test_a_model_leads_to_no_function_that_a_program_has_registered(functions, said, tmp_path):
    model = write_checkpoint(tmp_path / "theirs", "llama", chat=True)
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    known = [*functions]
    functions["own"] = of_the_program
    try:
        with pytest.raises(ValueError, match=r"policy\.path='\S+': transformers cannot read a model there: .*own"):
            hf.load(str(model), **PLAIN)
        assert [*functions] == [*known, "own"]
        with pytest.raises(AssertionError, match="it was called"):
            hf.load(str(model), **PLAIN | {"trust_remote_code": True})
    finally:
        del functions["own"]


class OwnLayer(LlamaMLP):
    def __init__(self, config):
        raise AssertionError("it was called")


class OwnOperation(ConversionOps):
    def convert(self, *args, **kwargs):
        raise AssertionError("it was called")


@provocation(
    "a stranger's model of a kind for which the user's program has registered layers of its own with transformers "
    "(`register_patch_mapping`), or conversions of weights",
    "they are given nothing of it; with `trust_remote_code=true` they are",
)
@pytest.mark.parametrize("kind", ["layer", "conversion"])
def test_a_model_is_made_of_no_layers_that_a_program_has_registered(kind, model, monkeypatch, tmp_path):
    if kind == "layer":
        monkeypatch.setattr(monkey_patching, "_monkey_patch_mapping_cache", {})
        monkeypatch.setattr(modeling_llama, "LlamaMLP", LlamaMLP)  # which is not put back after an error
        monkey_patching.register_patch_mapping({"LlamaMLP": OwnLayer})
    else:
        monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
        monkeypatch.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set())
        norm = "model.norm.weight"
        own = WeightConverter(source_patterns=norm, target_patterns=norm, operations=[OwnOperation()])
        conversion_mapping.register_checkpoint_conversion_mapping("llama", [own], overwrite=True)
    for number in range(2):
        policy = hf.load(str(model), **PLAIN)
        whole = {f"model.{name}": value for name, value in policy.model.state_dict().items()}
        policy.export(tmp_path / f"{number}", whole if number else None)  # whole weights where they were sharded
        assert (tmp_path / f"{number}" / "model.safetensors").exists()
    vars(policy.model).pop("_weight_conversions", None)  # as where adapters beside the weights were merged
    assert {name for name, _ in policy.weights()} == {*policy.model.state_dict()}
    with pytest.raises((AssertionError, RuntimeError), match="it was called|CONVERSION"):
        hf.load(str(model), **PLAIN | {"trust_remote_code": True})


class MyLayer(LlamaMLP):
    """As transformers' own, but of a program."""


def test_a_trusted_model_is_exported_with_the_layers_that_it_has(monkeypatch, tmp_path):
    model = write_checkpoint(tmp_path / "mine", "llama", chat=True)
    monkeypatch.setattr(monkey_patching, "_monkey_patch_mapping_cache", {})
    monkey_patching.register_patch_mapping({"LlamaMLP": MyLayer})
    policy = hf.load(str(model), **PLAIN | {"trust_remote_code": True})
    assert any(isinstance(layer, MyLayer) for layer in policy.model.modules())
    made = []
    monkeypatch.setattr(MyLayer, "__init__", lambda self, config: made.append(1) or LlamaMLP.__init__(self, config))
    policy.export(tmp_path / "x", {f"model.{name}": value for name, value in policy.model.state_dict().items()})
    assert made


@provocation(
    "a reward model in 4 or 8 bits whose configuration has its layers give one another more than they have inputs: "
    "kernels of bitsandbytes would read behind the weights (SIGSEGV)",
    "an error of one sentence",
)
@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
def test_quantized_layers_compare_their_inputs(kind):
    layer = getattr(bitsandbytes.nn, kind)(64, 32, bias=False)
    model = nn.Sequential(layer.to("cpu"))  # which quantizes the weights
    for _ in range(2):
        lay_out(model, "policy.path='x'")
    assert len(layer._forward_pre_hooks) == 1
    assert model(torch.zeros(1, 64)).shape == (1, 32)
    for width in (63, 65, 4096):
        with pytest.raises(ValueError, match=rf"a quantized layer has 64 inputs, and is given {width}"):
            model(torch.zeros(1, width))


@provocation(
    "a tokenizer whose `special_tokens_map.json` names another file (`merges_file: ~/.ssh/id_rsa`), which transformers "
    "takes for its own, so that an export holds a copy; or a `gguf_file` and a `cache_dir`",
    "refused in one sentence; tokens are taken",
)
@pytest.mark.parametrize("name", ["merges_file", "vocab_file", "gguf_file", "cache_dir", "name_or_path", "auto_map"])
def test_a_map_of_tokens_names_tokens(name, model):
    place = model / "special_tokens_map.json"
    end = hf.load(str(model), **PLAIN).tokenizer.eos_token
    place.write_text(json.dumps({"eos_token": end, "additional_special_tokens": [end], "image_token": end}))
    assert hf.load(str(model), **PLAIN).tokenizer.eos_token == end
    place.write_text(json.dumps({"eos_token": end, name: "id_rsa"}))
    with pytest.raises(ValueError, match=rf"special_tokens_map\.json: '{name}' is no token; allowed are tokens"):
        hf.load(str(model), **PLAIN)


SECRET = "-----BEGIN KEY-----\nabc\n"


@provocation(
    "a tokenizer whose `tokenizer_config.json` names another file as its `vocab` or `vocab_file`, or in `init_inputs`, "
    "so that an export holds its lines",
    "refused in one sentence; files beside it are read",
)
@pytest.mark.parametrize("name", ["vocab", "vocab_file", "init_inputs"])
def test_a_tokenizer_names_no_file_elsewhere(name, model, tmp_path):
    (tmp_path / "id_rsa").write_text(SECRET)
    (model / "tokenizer.json").unlink()
    (model / "vocab.txt").write_text("<unk>\n<pad>\na\nb\n")
    tokens = {"tokenizer_class": "BertTokenizer", "unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "b"}
    file = model / "tokenizer_config.json"
    for inside in ({"init_inputs": []}, {"vocab_file": str(model / "vocab.txt")}, {"vocab_file": "/no/such/place"}):
        file.write_text(json.dumps(tokens | inside))
        with only_data("policy.path", str(model), "a model", trusted=False):
            if inside != {"vocab_file": "/no/such/place"}:
                assert AutoTokenizer.from_pretrained(str(model)).get_vocab()["a"] == 2
    (model / "own").mkdir()
    (model / "own" / "id_rsa").symlink_to(tmp_path / "id_rsa")
    for elsewhere in (str(tmp_path / "id_rsa"), str(model / "own" / "id_rsa")):
        file.write_text(json.dumps(tokens | {name: [elsewhere] if name == "init_inputs" else elsewhere}))
        with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {name}.*allowed (is \[\]|are those beside it)"):
            hf.load(str(model), **PLAIN)


@provocation(
    "a model's directory with a link to another file of the user's: `chat_template.jinja -> ~/.ssh/id_rsa`, of which "
    "an export would hold a copy",
    "refused in one sentence; links inside the directory, and those of the hub's cache, are followed",
)
@pytest.mark.parametrize("way", ["directory", "cache"])
def test_links_in_a_models_directory(way, model, tmp_path, monkeypatch):
    secret, told = tmp_path / "id_rsa", r"is a link to \S+id_rsa, of which an export would hold a copy"
    secret.write_text(SECRET)
    elsewhere = tmp_path / "weights" / "model.safetensors"
    elsewhere.parent.mkdir()
    (model / "model.safetensors").rename(elsewhere)
    (model / "model.safetensors").symlink_to(elsewhere)
    with pytest.raises(ValueError, match=r"model\.safetensors is a link to \S+weights/model\.safetensors, of which"):
        hf.load(str(model), **PLAIN)
    (model / "model.safetensors").unlink()
    elsewhere.rename(model / "weights.safetensors")
    (model / "model.safetensors").symlink_to("weights.safetensors")
    hf.load(str(model), **PLAIN)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(ValueError, match=rf"chat_template\.jinja {told}"):
        hf.load(str(model), **PLAIN)
    (model / "chat_template.jinja").unlink()
    more = model / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").symlink_to("/proc/self/environ")
    with pytest.raises(ValueError, match=r"tool_use\.jinja is a link to /proc/\S+, of which an export"):
        hf.load(str(model), **PLAIN)
    (more / "tool_use.jinja").unlink()
    (model / "model.safetensors").unlink()
    (model / "weights.safetensors").rename(model / "model.safetensors")
    cached, commit = tmp_path / "models--a--b", "0a1b" * 10
    (cached / "snapshots").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    (cached / "blobs").mkdir()
    snapshot = model.rename(cached / "snapshots" / commit)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        if file.is_file():
            file.rename(cached / "blobs" / str(number))
            file.symlink_to(Path("..", "..", "blobs", str(number)))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_OFFLINE", True)
    path = str(snapshot) if way == "directory" else "a/b"
    if way == "directory":
        assert hf.load(path, **PLAIN).tokenizer.eos_token is not None
    (cached / "blobs" / "x").symlink_to(secret)
    for target in (secret, "../../blobs/x", "../../blobs/../../id_rsa"):
        (snapshot / "chat_template.jinja").symlink_to(target)
        with pytest.raises(ValueError, match=rf"^policy\.path='{path}': \S+/chat_template\.jinja {told}"):
            hf.load(path, **PLAIN)
        (snapshot / "chat_template.jinja").unlink()
    (cached / "blobs").rename(tmp_path / "blobs")
    (cached / "blobs").symlink_to("../blobs")
    with pytest.raises(ValueError, match=r"__init__\.py is a link to "):
        hf.load(path, **PLAIN)


@provocation(
    "a list of weights (`model.safetensors.index.json`), or `transformers_weights` in `config.json`, that names "
    "files of other directories, of which an export would hold a copy",
    "refused in one sentence",
)
@pytest.mark.parametrize("name", ["/home/me/model.safetensors", "../model.safetensors", "own/x.safetensors", "..", 7])
def test_weights_lie_beside_their_list(name, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
    with pytest.raises(ValueError, match=r"config\.json names the weights .*, no file beside it; allowed without"):
        hf.load(str(model), **PLAIN)
    (model / "config.json").write_text(json.dumps(config))
    for kind in ("model.safetensors", "pytorch_model.bin"):
        file = model / f"{kind}.index.json"
        file.write_text(json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}))
        with pytest.raises(
            ValueError, match=rf"{kind}\.index\.json names the weights .*; allowed are names of files be"
        ):
            hf.load(str(model), **PLAIN)
        file.unlink()


@provocation(
    "a model whose `tokenizer.json` has a text for its `model.vocab` or `merges`, which some tokenizers take for a "
    "file: `~/.ssh/id_rsa`, of which an export would hold the lines",
    "refused in one sentence",
)
@pytest.mark.parametrize("part", ["vocab", "merges"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("WordPiece", "BertTokenizer"), ("BPE", "GPT2Tokenizer"), ("WordLevel", "BertTokenizer"), (None, "")],
)
def test_a_vocabulary_is_no_file(part, kind, name, model, tmp_path):
    (tmp_path / "id_rsa").write_text(SECRET)
    made = {"type": kind, "unk_token": "abc", "vocab": {"abc": 0}, "merges": []} | {part: str(tmp_path / "id_rsa")}
    content = json.loads((model / "tokenizer.json").read_text()) | {"model": made, "added_tokens": []}
    (model / "tokenizer.json").write_text(json.dumps(content))
    tokens = {"tokenizer_class": name, "unk_token": "abc", "pad_token": "abc", "eos_token": "abc"}
    (model / "tokenizer_config.json").write_text(json.dumps(tokens))
    with pytest.raises(
        ValueError, match=rf"tokenizer\.json: model\.{part}='\S+id_rsa' names a file, of which an export"
    ):
        hf.load(str(model), **PLAIN)


@provocation(
    "a tokenizer whose `fast_tokenizer_files` names a file of a folder, where a link to one of the user's would "
    "not be seen",
    "refused in one sentence; names beside it are read",
)
def test_a_tokenizer_chooses_files_beside_it(model, tmp_path):
    (model / "sub").mkdir()
    (model / "tokenizer.json").rename(tmp_path / "mine.json")
    shutil.copy(tmp_path / "mine.json", model / "tokenizer.json")
    (model / "sub" / "tokenizer.5.0.json").symlink_to(tmp_path / "mine.json")
    file = model / "tokenizer_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"fast_tokenizer_files": ["tokenizer.json"]}))
    hf.load(str(model), **PLAIN)
    for chosen in (["sub/tokenizer.5.0.json"], ["tokenizer.json", "../tokenizer.5.0.json"], "sub/x", {"a": 1}):
        file.write_text(json.dumps(said | {"fast_tokenizer_files": chosen}))
        with pytest.raises(ValueError, match=r"fast_tokenizer_files=.*: allowed are names of files beside it"):
            hf.load(str(model), **PLAIN)


@provocation(
    "a tokenizer whose `errors` is that of a handler which the user's own file has registered with Python's `codecs`",
    "refused in one sentence",
)
def test_errors_of_a_tokenizer_are_pythons_own(model):
    codecs.register_error("own", of_the_program)
    file = model / "tokenizer_config.json"
    said = json.loads(file.read_text())
    for errors, is_refused in (("replace", False), ("own", True), (["own"], True)):
        file.write_text(json.dumps(said | {"errors": errors}))
        with pytest.raises(ValueError, match=r"errors=.*own.*: allowed are strict, ") if is_refused else nullcontext():
            hf.load(str(model), **PLAIN)


@provocation(
    "a model whose `attn_implementation` is an attention function that the user's own file has registered with "
    "transformers",
    "left out: transformers' own is used, which the settings name",
)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_functions_of_a_model_are_transformers_own(key, model):
    file = model / "config.json"
    said = json.loads(file.read_text())
    for value in ("own", {"": "own"}, {"text_config": "own"}, "kernels/x", ["own"], 7):
        file.write_text(json.dumps(said | {key: value}))
        with only_data("policy.path", str(model), "a model", trusted=False):
            config = transformers.AutoConfig.from_pretrained(str(model))
        assert "own" not in str(config.to_dict().get(key)) + str(config._attn_implementation)
    file.write_text(json.dumps(said | {key: "eager"}))
    with only_data("policy.path", str(model), "a model", trusted=False) as _:
        config = transformers.AutoConfig.from_pretrained(str(model))
    assert key == "experts_implementation" or config._attn_implementation == "eager"


@provocation(
    "`policy.path: pkg://grpo_lightning/../theirs/model` in brought settings or in a checkpoint, which no check "
    "of a directory would look at",
    "refused in one sentence",
)
def test_a_packages_folder_lies_inside_of_it(tmp_path):
    there = os.path.relpath(tmp_path, Path(hf.__file__).parents[1])
    for folder in (there, "policy/../policy/tiny", str(tmp_path)):
        path = f"pkg://grpo_lightning/{folder}"
        with pytest.raises(ValueError, match=r"allowed is pkg://PACKAGE/FOLDER with an installed package"):
            hf.load(path, **PLAIN)


class Memory:
    """A pickle of it has memory made that no file holds."""

    def __reduce__(self):
        return torch.UntypedStorage, (4096,)


def held():
    """How torch says of which memory in a file a tensor is made."""
    return torch._utils._rebuild_tensor_v2, (torch.zeros(1).storage(), 0, (1,), (1,), False, OrderedDict())


class Emptied:
    """A pickle of it gives a tensor memory of its own, which can grow."""

    def __reduce__(self):
        return (*held(), ())


class Grown:
    """A pickle of it has that grow."""

    def __reduce__(self):
        return (*held(), (Emptied(), 0, (64, 64), (64, 1)))


class GrownParameter:
    """The same by a parameter."""

    def __reduce__(self):
        return torch._utils._rebuild_parameter, (Emptied(), True, OrderedDict()), (Emptied(), 0, (64, 64), (64, 1))


@provocation(
    "a file of weights, or a checkpoint, whose tensors lie in memory that it only asks for: they would hold what the "
    "process had there before, such as settings, and an export would hold it, too",
    "refused in one sentence",
)
def test_tensors_lie_in_memory_that_the_file_holds(tmp_path):
    file = tmp_path / "weights.bin"
    whole = {
        "a": torch.tensor([1, 2, 3], dtype=torch.uint16),
        "b": torch.ones(2, dtype=torch.bfloat16),
        "c": torch.eye(2),
    }
    torch.save(whole | {"step": {"completed": 1}}, file)
    with weights_only():
        assert all(torch.equal(torch.load(file)[name], value) for name, value in whole.items())
    assert torch.equal(checkpoints.read(file)["a"], whole["a"])
    assert checkpoints.read(file, map_location="meta")["a"].is_meta
    for one in (Memory(), Emptied(), Grown(), GrownParameter()):
        torch.save(whole | {"step": {"completed": 1}, "d": one}, file)
        with weights_only(), pytest.raises(UnpicklingError, match="holds other objects than dense tensors"):
            torch.load(file)
        with pytest.raises(ValueError, match="holds other objects than tensors and plain values"):
            checkpoints.read(file)
    assert torch.zeros(2).set_().numel() == 0  # as it was


@pytest.mark.parametrize(
    ("offset", "size", "fits"), [(0, (4,), True), (1, (4,), False), (4, (0, 9), True), (0, (5,), False)]
)
def test_a_tensor_lies_inside_of_its_memory(offset, size, fits):
    """Also in memory that can grow, as that of a GPU to which a file is read."""
    memory = torch.zeros(4)
    with weights_only(), nullcontext() if fits else pytest.raises(UnpicklingError, match="memory that no file holds"):
        torch.empty(0).set_(memory, offset, size, (1,) * len(size))
    assert memory.untyped_storage().nbytes() == 16


@provocation(
    "`tokenizer_class: BertJapaneseTokenizer` with `sudachi_kwargs` that name a file with plug-ins in C",
    "refused in one sentence",
)
@pytest.mark.parametrize("name", [f"BertJapaneseTokenizer{more}" for more in ("", "Fast", "FastFast")])
def test_a_tokenizer_hands_its_settings_to_nobody(name, model):
    file = model / "tokenizer_config.json"
    settings = {
        "tokenizer_class": name,
        "word_tokenizer_type": "sudachi",
        "sudachi_kwargs": {"a": "b"},
    }
    file.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"tokenizer_class=BertJapanese\w+: hands its settings to other programs"):
        hf.load(str(model), **PLAIN)


def test_weights_outside_the_directory_are_tensors_too(model, tmp_path, ran):
    of_pickle(model, Payload(ran), "../elsewhere.bin", raw=False)
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "../elsewhere.bin"}}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json names the weights '\.\./elsewhere\.bin'; allowed are names of"):
        hf.load(str(model), **PLAIN)


AUTO = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}


@provocation(
    "`auto_map` in `config.json` or `tokenizer_config.json`", "not run without `policy.trust_remote_code=true`"
)
@pytest.mark.parametrize(
    "file, values",
    [
        ("config.json", {"model_type": "evil", "auto_map": AUTO}),
        ("tokenizer_config.json", {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": [None, "evil.Words"]}}),
    ],
)
def test_code_of_a_model_does_not_run_unless_asked_for(file, values, model, ran):
    edit(model / file, **values)
    with pytest.raises(ValueError, match=rf"^policy.path='.*model': {REFUSED_CODE}"):
        hf.load(str(model), **PLAIN)


@pytest.mark.parametrize(
    "file, values",
    [
        ("config.json", {"auto_map": AUTO}),  # of a type that transformers knows
        ("config.json", {"attn_implementation": "stranger/kernel", "use_kernels": True}),
        ("config.json", {"kernel_config": {"kernel_mapping": {"RMSNorm": "stranger/kernel:RMSNorm"}}}),
        ("generation_config.json", {"custom_generate": "custom_generate"}),
        ("tokenizer_config.json", {"tokenizer_class": "os.system"}),
        ("tokenizer_config.json", {"auto_map": {"AutoProcessor": "evil.Words"}}),
    ],
)
def test_what_could_name_code_does_nothing(file, values, model, ran):
    edit(model / file, **values)
    for name in ("training_args.bin", "optimizer.pt", "adapter_model.bin"):
        (model / name).write_bytes(pickle.dumps(Payload(ran)))
    assert hf.load(str(model), **PLAIN).render("hi").startswith("<|im_start|>user\nhi")


@provocation("a model directory with a pickled `adapter_model.bin`", "refused in one sentence")
def test_an_adapter_is_tensors(model, ran):
    lora = {"peft_type": "LORA", "r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    parent = {"auto_mapping": {"base_model_class": "Model", "parent_library": "evil"}}
    (model / "adapter_config.json").write_text(json.dumps(lora | parent | {"base_model_name_or_path": str(model)}))
    torch.save({"a": Payload(ran)}, model / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"^policy.path='.*model': neither a directory with a model"):
        hf.load(str(model), **PLAIN)


@provocation("`policy.attn_implementation={…}`", "one sentence")
def test_an_attention_function_is_named_by_a_text():
    for name in ({"a": 1}, ["sdpa"], 3):
        with pytest.raises(
            ValueError, match=r"^policy.attn_implementation=.*: allowed is a text, such as sdpa or eager"
        ):
            check_attention(name, "policy.attn_implementation", trusted=True)
    check_attention(None, "policy.attn_implementation", trusted=False)


@provocation(
    "a model's directory with escape sequences in the names of its weights", "they are escaped on the terminal"
)
def test_names_in_a_model_do_not_reach_the_terminal_raw(model):
    weights = safetensors.torch.load_file(model / "model.safetensors")
    safetensors.torch.save_file(weights | {"evil\x1b[2J.weight": torch.ones(1)}, model / "model.safetensors")
    shown = StringIO()
    handler, log = logging.StreamHandler(shown), logging.getLogger("transformers")
    log.addHandler(handler)
    try:
        hf.load(str(model), **PLAIN)
    finally:
        log.removeHandler(handler)
    assert "evil\\x1b[2J.weight" in shown.getvalue()
    assert "\x1b" not in shown.getvalue()


@provocation("`policy.attn_implementation=stranger/kernel`, code of the hub", "refused without `trust_remote_code`")
def test_kernels_of_the_hub_are_code(model, tmp_path, ran):
    with pytest.raises(ValueError, match=r"^policy.attn_implementation=stranger/kernel: a kernel of the hub"):
        hf.load(str(model), **PLAIN | {"attn_implementation": "stranger/kernel"})


@provocation(
    "a model's config.json with `attn_implementation: stranger/kernel`, or that of one of its parts",
    "left out: transformers' own attention is used",
)
@pytest.mark.parametrize("name", ["kernels-community/flash-attn2", {"": "sdpa", "text_config": "stranger/kernel"}])
def test_kernels_in_a_configuration_are_not_used(name, tmp_path):
    rewarding = write_reward_model(tmp_path / "reward", "llama", chat=True)
    before = reward_model(rewarding)(["hi"], ["there"])
    edit(rewarding / "config.json", attn_implementation=name)
    reward = reward_model(rewarding)
    reward.reset()
    assert reward(["hi"], ["there"]) == before
    assert reward.network.config._attn_implementation == "grouped_sdpa"


def reward_model(path):
    sizes = {"batch_tokens": 99, "max_length": 99, "label": 0}
    return RewardModel(
        path=str(path), dtype="float32", device=None, quantization=None, trust_remote_code=False, **sizes
    )


@provocation("a reward model whose weights are a pickle that runs a command", "refused in one sentence")
def test_a_reward_model_is_tensors(tmp_path, ran):
    directory = write_reward_model(tmp_path / "reward", "llama", chat=True)
    of_pickle(directory, Payload(ran), "pytorch_model.bin", raw=False)
    with pytest.raises(ValueError, match=r"^reward.model.function.path='.*reward': " + A_PICKLE):
        reward_model(directory)(["hi"], ["there"])


@provocation("a chat template that reaches for Python's own attributes", "Jinja's sandbox refuses it")
@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ lipsum.__globals__['os'].system('touch RAN') }}",
        "{{ cycler.__init__.__globals__.os.system('touch RAN') }}",
        "{{ strftime_now.__globals__['__builtins__']['__import__']('os').system('touch RAN') }}",
        "{{ raise_exception.__globals__['__builtins__']['__import__']('os').system('touch RAN') }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{% for message in messages %}{{ message.update({'role': 'system'}) }}{% endfor %}",
        "{{ (messages | map(attribute='__class__') | first).__mro__ }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_only_makes_text(template, model, ran):
    (model / "chat_template.jinja").write_text(template.replace("RAN", str(ran)))
    policy = hf.load(str(model), **PLAIN)
    with pytest.raises(Exception, match=r"unsafe|undefined|no loader") as error:
        policy.render("hi")
    assert type(error.value).__name__ in ("SecurityError", "UndefinedError", "TypeError")


def a_script(place, ran):
    (place / f"{place.name}.py").write_text(f"import os\nos.system('touch {ran}')\n")
    (place / "data.jsonl").write_text('{"prompt": "a"}\n')


def a_card(place, ran):
    (place / "data.jsonl").write_text('{"prompt": "a"}\n')
    dtype = f"!!python/object/apply:os.system ['touch {ran}']"
    (place / "README.md").write_text(f"---\ndataset_info:\n  features:\n  - name: prompt\n    dtype: {dtype}\n---\n")


def an_archive(place, ran):
    with tarfile.open(place / "train-0.tar", "w") as archive:
        for ending in ("txt", "pyd", "pickle", "pth", "npy"):
            content = pickle.dumps(Payload(ran))
            member = tarfile.TarInfo(f"0001.{ending}")
            member.size = len(content)
            archive.addfile(member, BytesIO(content))


def a_saved_set(place, ran):
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(place)
    edit(place / "dataset_info.json", features={"prompt": {"_type": "os.system", "dtype": f"touch {ran}"}})


def pickles(place, ran):
    for name in ("train.pkl", "train.pickle", "train.pt"):
        (place / name).write_bytes(pickle.dumps(Payload(ran)))
    np.save(place / "train.npy", np.array([Payload(ran)], dtype=object), allow_pickle=True)


@provocation("a data set with a loading script, pickles, YAML tags or types of its own", "refused in one sentence")
@pytest.mark.parametrize("fill", [a_script, a_card, an_archive, a_saved_set, pickles])
def test_a_data_set_runs_nothing(fill, tmp_path, ran):
    place = tmp_path / "data"
    place.mkdir()
    fill(place, ran)
    with pytest.raises(ValueError, match=r"^data.path='.*data', data.split='train': ") as error:
        Hub(str(place), "train")
    assert "\n" not in str(error.value)


@provocation(
    "a parquet or arrow file with a pickled extension type", "refused in one sentence; nothing is read from its bytes"
)
def test_types_of_a_table_run_nothing(tmp_path, ran):
    content = pickle.dumps(Payload(ran))
    own = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": content}
    schema = pa.schema([("prompt", pa.string()), pa.field("odd", pa.binary(), metadata=own)])
    table = pa.table({"prompt": ["a", "b"], "odd": [content, content]}, schema=schema)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        stream.write_table(table)
    for read in (
        lambda: JsonLines(str(tmp_path / "a.parquet")),
        lambda: Hub(str(tmp_path / "a.parquet"), "train"),
        lambda: Hub(str(tmp_path / "a.arrow"), "train"),
    ):
        with pytest.raises(
            ValueError, match=r"the column 'odd' has the extension type 'arrow\.py_extension_type', who"
        ):
            read()
    assert not ran.exists()


def test_columns_with_names_of_pythons_own_are_data(tmp_path, ran):
    row = {"prompt": "a", "_target_": "os.system", "__class__": "x", "__reduce__": f"touch {ran}", "py/reduce": [1]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert JsonLines(str(tmp_path / "a.jsonl"))[0] == ("a", {k: v for k, v in row.items() if k != "prompt"})


@provocation("`policy.path=RUN`, the directory of a run", "its export is named")
def test_a_run_is_no_model(tmp_path):
    write_checkpoint(tmp_path / "run" / "export", "llama", chat=True)
    told = (
        f"^policy.path='{tmp_path}/run': the directory of a run; allowed is its export, policy.path={tmp_path}/run/exp"
    )
    with pytest.raises(ValueError, match=told):
        hf.load(str(tmp_path / "run"), **PLAIN)
    hf.load(str(tmp_path / "run" / "export"), **PLAIN)


@pytest.mark.parametrize("value", [[True], "yes", 1, {"x": 1}, None], ids=str)
def test_only_a_boolean_trusts_the_code_of_a_model(value, tmp_path):
    """A column of a data set may have the name of the argument."""
    with pytest.raises(ValueError, match=r"policy.trust_remote_code=.*: allowed is true or false"):
        hf.load(str(tmp_path), **PLAIN | {"trust_remote_code": value})


@provocation(
    "`policy.path=org/model policy.trust_remote_code=true`, by which the user means a model of the hub, where a "
    "stranger's folder lies at ./org/model",
    "refused in one sentence; `./org/model` is taken",
)
def test_a_folder_is_not_trusted_in_place_of_the_hub(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "org" / "model", "llama", chat=True)
    monkeypatch.chdir(tmp_path)
    trusting = PLAIN | {"trust_remote_code": True}
    told = r"^policy.trust_remote_code=true: org/model is a directory here, .*; allowed is ./org/model, if you mean"
    with pytest.raises(ValueError, match=told):
        hf.load("org/model", **trusting)
    hf.load("org/model", **PLAIN)
    hf.load("./org/model", **trusting)
    mine = write_checkpoint(tmp_path / "mine", "llama", chat=True)  # with the hub's code, as save_pretrained says it
    edit(mine / "config.json", model_type="own", auto_map={"AutoConfig": "org/model--modeling.C"})
    (tmp_path / "org" / "model" / "modeling.py").write_text("open('HIT', 'w')\n")
    with pytest.raises(ValueError, match=r"^policy.path='./mine': trust_remote_code=true: org/model is a directory"):
        hf.load("./mine", **trusting)
    (tmp_path / "gpt2").write_text(
        json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "./org/model--modeling.C"}})
    )
    with pytest.raises(
        ValueError, match=r"^policy.trust_remote_code=true: gpt2 is a file here, whose code would run in"
    ):
        hf.load("gpt2", **trusting)
    own = transformers.generation.utils.get_cached_module_file  # of generate's, which was imported before
    with only_data("a", "b", "c", trusted=True):
        checked = transformers.generation.utils.get_cached_module_file
        with pytest.raises(ValueError, match="org/model is a directory here"):
            checked("org/model", "modeling.py")
    (tmp_path / "outputs" / "sft" / "merged").mkdir(parents=True)
    for theirs in ("outputs/sft/merged", "./org/model", str(tmp_path / "org" / "model")):
        edit(mine / "config.json", model_type="own", auto_map={"AutoConfig": f"{theirs}--modeling.C"})
        with pytest.raises(ValueError, match=f"its files name code in {theirs}, which is here, and which you have not"):
            hf.load("./mine", **trusting)
    assert transformers.generation.utils.get_cached_module_file is own
    assert not (tmp_path / "HIT").exists()
    (package := tmp_path / "package_with_a_model").mkdir()
    (package / "__init__.py").touch()
    lines = "from transformers import LlamaConfig\nopen('HIT', 'w')\n\n\nclass C(LlamaConfig):\n    pass\n"
    monkeypatch.syspath_prepend(str(tmp_path))
    for path, place in (("./mine", mine), (f"pkg://{package.name}/mine", package / "mine")):
        mine.rename(place)
        edit(place / "config.json", model_type="own", auto_map={"AutoConfig": "modeling.C"})
        (place / "modeling.py").write_text(lines)
        with pytest.raises(ValueError, match="Unrecognized configuration class"):  # its own code, of a configuration
            hf.load(path, **trusting)
    assert (tmp_path / "HIT").exists()
    sizes = {"batch_tokens": 99, "max_length": 99, "label": 0, "quantization": None}
    with pytest.raises(ValueError, match=r"^reward.model.function.trust_remote_code=true: org/model is a directory"):
        RewardModel(path="org/model", dtype="float32", device=None, trust_remote_code=True, **sizes)
