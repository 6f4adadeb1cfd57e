"""A LoRA adapter, whose base is the reference."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from grpo_lightning.policy.hf import load
from grpo_lightning.reference import adapter_off
from tests.checkpoints import write_checkpoint
from tests.running import small_run

SETTINGS = {"dtype": "float32", "attn_implementation": "sdpa", "trust_remote_code": False}
ADAPTER = "policy.adapter={r: 4, lora_alpha: 8, target_modules: all-linear}"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("base") / "model", "qwen2", chat=False))


def adapted(base, directory, *overrides):
    return small_run(
        directory,
        "policy=hf",
        f"policy.path={base}",
        ADAPTER,
        "reference=adapter_off",
        "rollout.max_new_tokens=10",
        "optimizer.lr=0.02",
        *overrides,
    )


def test_the_reference_is_the_policy_without_its_adapter_and_costs_nothing(base, tmp_path):
    module = adapted(base, tmp_path / "one")
    assert module.metrics["policy/kl_divergence"] < 1e-9  # a new adapter changes nothing
    assert not list(module.reference.parameters())
    module = adapted(base, tmp_path / "three", "steps=3")
    assert module.metrics["policy/kl_divergence"] > 1e-5
    trained = {name for name, parameter in module.policy.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    plain = load(base, **SETTINGS)
    rows = module.policy.sample(["abc", "a longer one"], group_size=2, sampling=module.collect.sampling, seed=1)
    expected = plain.logprobs(rows, temperature=1.0)
    assert_close(module.reference.logprobs(rows, temperature=1.0), expected, rtol=0, atol=1e-5)
    assert (module.policy.logprobs(rows, temperature=1.0) - expected).abs().max() > 1e-3
    base_model = module.policy.model.get_base_model().named_parameters()
    found = {name.replace(".base_layer.", "."): parameter for name, parameter in base_model}
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(found[name], parameter), name


def test_the_export_is_a_whole_model(base, tmp_path):
    module = adapted(base, tmp_path, "steps=3")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    ids = torch.tensor([[5, 9, 7, 12]])
    with torch.no_grad():
        assert_close(exported(ids).logits, module.policy.model(ids).logits, rtol=1e-4, atol=1e-4)
    assert "lora_" not in "".join(name for name, _ in exported.named_parameters())


def test_without_an_adapter_there_is_nothing_to_switch_off(base):
    with pytest.raises(ValueError, match=r"reference=adapter_off: allowed with an adapter only"):
        adapter_off(load(base, **SETTINGS))
