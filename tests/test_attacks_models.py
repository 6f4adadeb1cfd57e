"""Model directories of strangers, and what other packages would make of their configuration."""

import json
from typing import Any

import pytest

from grpo_lightning.policy import hf
from grpo_lightning.policy.weights import write_untied
from grpo_lightning.reward.model import RewardModel
from grpo_lightning.transformer.strangers import check_programs
from tests.support.checkpoints import write_checkpoint, write_reward_model
from tests.support.provocations import provocation

PLAIN: dict[str, Any] = {"dtype": "float32", "attn_implementation": "sdpa", "trust_remote_code": False}
REWARD: dict[str, Any] = {"dtype": "float32", "device": None, "quantization": None, "label": 0}
REWARD |= {"batch_tokens": 1000, "max_length": 16}
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


def test_nor_does_that_of_a_reward_model(tmp_path):
    model = write_reward_model(tmp_path / "model", "llama", chat=True)
    edit(model, quantization_config=QUANTIZED | {"format": "evil.py:x"})
    reward = RewardModel(path=str(model), trust_remote_code=False, **REWARD)
    with pytest.raises(ValueError, match=r"^reward.model.function.path='.*model': config.json names evil.py:x, a file"):
        reward(["hi"], ["you"])


def test_values_of_a_quantization_name_no_code(tmp_path):
    model = write_checkpoint(tmp_path / "model", "llama", chat=True)
    config = hf.load(str(model), **PLAIN).model.config
    named = {"format": "int-quantized", "ignore": ["re:.*lm_head", "model.layers.0"], "meta": {"by": "gptqmodel:2.0"}}
    config.quantization_config = QUANTIZED | named
    check_programs(config, "policy.path", trusted=False)
    config.quantization_config = QUANTIZED | {"format": "evil.py:x"}
    check_programs(config, "policy.path", trusted=True)


@provocation(
    "`speculators_config` in a model's `config.json`, by which vLLM loads another model than the one that is trained, "
    "with what its own files name",
    "it is left out of what vLLM is given, and of what is exported",
)
def test_vllm_is_led_to_no_other_model(tmp_path):
    model = write_checkpoint(tmp_path / "model", "llama", chat=True)
    edit(model, **SPECULATORS, auto_map={"AutoModelForCausalLM": "evil.Model"})
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
