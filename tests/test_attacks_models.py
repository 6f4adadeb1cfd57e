"""Model directories of strangers, and what other packages would make of their configuration."""

import json
from typing import Any

import pytest
from transformers import AutoConfig, AutoModel, GenerationConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grpo_lightning.policy import hf
from grpo_lightning.policy.weights import write_untied
from grpo_lightning.reward.model import RewardModel
from grpo_lightning.transformer.config_files import values_only
from grpo_lightning.transformer.strangers import only_data
from tests.support.checkpoints import write_checkpoint, write_reward_model
from tests.support.provocations import provocation

PLAIN: dict[str, Any] = {"dtype": "float32", "attn_implementation": "sdpa", "trust_remote_code": False}
REWARD: dict[str, Any] = {"dtype": "float32", "device": None, "quantization": None, "label": 0}
REWARD |= {"batch_tokens": 1000, "max_length": 16}
ASKED = ("policy.path", "model", "a model")
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
QUANTIZED = {
    "quant_method": "compressed-tensors",
    "dequantize": True,
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT8}},
    "ignore": ["re:.*lm_head"],
}
SPECULATORS = {
    "speculators_config": {
        "proposal_methods": [{"speculative_tokens": 1}],
        "verifier": {"name_or_path": "megatron/vm"},
    },
    "speculators_model_type": "ngram",
    "transformer_layer_config": {},
}


def edit(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@provocation(
    "`quantization_config: {format: evil.py:x}` in a model's `config.json`, which compressed-tensors would import",
    "refused in one sentence",
)
@pytest.mark.parametrize("name", ["evil.py:x", "bundle/EVIL.PY:x", "/tmp/evil.so:x", "evil.cpython-311.pyc :x"])
def test_a_configuration_names_no_file_of_code(name, tmp_path):
    model = write_checkpoint(tmp_path / "model", "llama", chat=True)
    edit(model, quantization_config=QUANTIZED | {"format": name})
    words = rf"^policy.path='.*model': config.json names {name}, a file of code, which could run; allowed without"
    with pytest.raises(ValueError, match=words):
        hf.load(str(model), **PLAIN)


@provocation(
    "`quantization_config: {quant_method: torchao, quant_type: …}`, of which torchao calls what it names",
    "refused in one sentence, with the kinds that are read",
)
@pytest.mark.parametrize("value", ["torchao", "quark", "unknown", ["fp8"], {"a": 1}])
def test_quantized_weights_are_of_kinds_that_hold_values(value, tmp_path):
    for told in ({"quantization_config": {"quant_method": value}}, {"text_config": {"x": [{"quant_method": value}]}}):
        with pytest.raises(
            ValueError, match=r"^policy.path: config.json gives quant_method the value .*, whose package "
        ):
            read(tmp_path, model_type="llama", **told)
    for value in ("gptq", "bitsandbytes", "fp8", None):
        assert (
            read(tmp_path, quantization_config={"quant_method": value})["quantization_config"]["quant_method"] == value
        )


def test_nor_does_that_of_a_reward_model(tmp_path):
    model = write_reward_model(tmp_path / "model", "llama", chat=True)
    edit(model, quantization_config=QUANTIZED | {"format": "evil.py:x"})
    reward = RewardModel(path=str(model), trust_remote_code=False, **REWARD)
    with pytest.raises(ValueError, match=r"^reward.model.function.path='.*model': config.json names evil.py:x, a file"):
        reward(["hi"], ["you"])


def read(directory, **values):
    """A configuration as transformers reads it, where code is not trusted."""
    (directory / "config.json").write_text(json.dumps(values))
    with values_only("policy.path"):
        return PreTrainedConfig.get_config_dict(str(directory))[0]


def test_values_of_a_quantization_name_no_code(tmp_path):
    named = {"format": "int-quantized", "ignore": ["re:.*lm_head", "model.layers.0"], "meta": {"by": "gptqmodel:2.0"}}
    told = {"quantization_config": QUANTIZED | named, "model_type": "llama"}
    assert read(tmp_path, **told) == told


@pytest.mark.slow
def test_what_transformers_writes_is_read(tmp_path):
    """The settings of every architecture, with all that they hold."""
    written = 0
    for kind in CONFIG_MAPPING:
        try:
            CONFIG_MAPPING[kind]().to_json_file(tmp_path / "config.json", use_diff=False)
        except Exception:  # a few cannot be made without arguments
            continue
        before, _ = PreTrainedConfig.get_config_dict(str(tmp_path))
        with values_only(kind) as left_out:
            assert PreTrainedConfig.get_config_dict(str(tmp_path))[0] == before
        assert left_out == []
        written += 1
    assert written > 500
    generation = GenerationConfig(temperature=0.5, eos_token_id=[1, 2])
    with values_only("policy.path"):
        assert GenerationConfig.from_dict(generation.to_dict()).to_dict() == generation.to_dict()


def test_labels_may_be_any_words(tmp_path):
    told = {"label2id": {"update": 0, "validate": 1}, "id2label": {"0": "update", "1": "validate"}}
    assert read(tmp_path, **told) == told


@provocation(
    "`attribute_map`, `sub_configs`, `to_dict`, `__dict__` or another name of transformers' own in a model's "
    "`config.json` or `generation_config.json`, after which its configuration is read otherwise than it is written",
    "refused in one sentence",
)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attribute_map", {"to_dict": "_get_generation_parameters"}),
        ("attribute_map", {"__dict__": "fake", "to_diff_dict": "__getstate__"}),
        ("sub_configs", {}),
        ("to_dict", "x"),
        ("__dict__", {}),
        ("__class__", "x"),
        ("_auto_class", "AutoModel"),
    ],
)
def test_a_configuration_decides_not_how_it_is_read(name, value, depth, tmp_path):
    model = write_checkpoint(tmp_path / "model", "llama", chat=True)
    told = {name: value}
    for _ in range(depth):
        told = {"text_config": {"list": [told]}}
    edit(model, **told)
    words = rf"^policy.path='.*model': config.json gives {name} a value, which decides how the rest is read; allowed"
    with pytest.raises(ValueError, match=words):
        hf.load(str(model), **PLAIN)
    edit(model, **{next(iter(told)): None})
    assert PreTrainedConfig.get_config_dict(str(model))[0][next(iter(told))] is None  # is read as ever afterwards


def test_nor_does_that_of_the_generation(tmp_path):
    model = write_checkpoint(tmp_path / "model", "llama", chat=True)
    for name in ("to_dict", "__dict__"):
        (model / "generation_config.json").write_text(json.dumps({name: {}}))
        with pytest.raises(ValueError, match=rf"': generation_config.json gives {name} a value, which decides"):
            hf.load(str(model), **PLAIN)


@provocation(
    "`auto_map` in a part of a model's `config.json`, for which transformers asks on the terminal whether code may run",
    "left out, nothing is asked and nothing run",
)
def test_a_part_brings_no_code(tmp_path, monkeypatch):
    part = {"model_type": "siglip_text_model", "auto_map": {"AutoModel": "bundle--evil.P"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "fuyu", "text_config": part}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks"))
    with only_data(*ASKED, trusted=False):
        text = AutoConfig.from_pretrained(str(tmp_path)).text_config
    assert "auto_map" not in vars(text)
    text.auto_map = part["auto_map"]  # were it to come there by another way

    def build():
        with only_data(*ASKED, trusted=False):
            AutoModel.from_config(text)

    with pytest.raises(ValueError, match=r"^policy.path='model': it comes with code of its own; allowed is policy.tr"):
        build()


def test_kernels_of_the_hub_are_left_out(tmp_path):
    told = {"attn_implementation": {"": "sdpa", "text_config": "stranger/kernel"}, "model_type": "gemma3"}
    told["text_config"] = {"_attn_implementation": "stranger/kernel", "experts_implementation": "eager"}
    assert read(tmp_path, **told) == {"model_type": "gemma3", "text_config": {"experts_implementation": "eager"}}


@provocation(
    "`speculators_config` in a model's `config.json`, by which vLLM loads another model than the one that is trained, "
    "with what its own files name",
    "it is left out of what vLLM is given, and of what is exported",
)
def test_vllm_is_led_to_no_other_model(tmp_path):
    model = write_checkpoint(tmp_path / "model", "llama", chat=True)
    strange = {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "custom_pipelines": {"a": {"impl": "evil.P"}}}
    strange["fusion_config"] = {"norms": True}  # also one that a program has added
    strange["distributed_config"] = {"tp_size": 1}  # of another run's processes: transformers could not export it
    edit(model, **SPECULATORS, **strange, part=strange, parts=[strange])
    policy = hf.load(str(model), **PLAIN)
    policy.describe(tmp_path / "described")
    policy.export(tmp_path / "exported")
    for name in ("described", "exported"):
        told = (tmp_path / name / "config.json").read_text()
        assert '"model_type": "llama"' in told
        assert "vm" not in told
        assert "evil" not in told
    vars(policy.model.config).update(SPECULATORS)  # of a model that a program has loaded itself
    write_untied(policy.model, tmp_path / "untied")
    assert "vm" not in (tmp_path / "untied" / "config.json").read_text()
    assert policy.model.config.speculators_config == SPECULATORS["speculators_config"]
