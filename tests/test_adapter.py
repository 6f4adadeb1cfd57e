"""A LoRA adapter, whose base is the reference."""

import copy
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from grpo_lightning.callbacks.checkpoint import Export
from grpo_lightning.policy.loading import load
from grpo_lightning.reference import adapter_off
from grpo_lightning.types import Sampling
from tests.support.checkpoints import QUANTIZABLE, write_checkpoint
from tests.support.running import same, small_run, weights
from tests.support.sampling import generate

SETTINGS = {"dtype": "float32", "attn_implementation": "sdpa", "trust_remote_code": False}
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=4)
ADAPTER = "policy.adapter={r: 4, lora_alpha: 8, target_modules: all-linear}"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("base") / "model", "qwen2", chat=False))


def adapted(base, directory, *overrides):
    adapter = [] if any(word.startswith("policy.adapter=") for word in overrides) else [ADAPTER]
    words = ("policy=hf", f"policy.path={base}", *adapter, "reference=adapter_off", "rollout.max_new_tokens=10")
    return small_run(directory, *words, "optimizer.lr=0.02", *overrides)


@pytest.mark.slow
def test_the_reference_is_the_policy_without_its_adapter_and_the_export_has_it_merged(base, tmp_path):
    module = adapted(base, tmp_path / "one")
    assert module.metrics["policy/kl_divergence"] == 0  # a new adapter changes nothing
    assert module.metrics["loss/kl"] == 0
    assert not list(module.reference.parameters())
    module = adapted(base, tmp_path / "three", "steps=3")
    assert module.metrics["policy/kl_divergence"] > 1e-5
    trained = {name for name, parameter in module.policy.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    plain = load(base, **SETTINGS)
    rows = generate(module.policy, ["abc", "a longer one"], group_size=2, sampling=module.rollout.sampling, seed=1)
    expected = plain.logprobs(rows, temperature=1.0)
    assert_close(module.reference.logprobs(rows, temperature=1.0), expected, rtol=0, atol=1e-5)
    assert (module.policy.logprobs(rows, temperature=1.0) - expected).abs().max() > 1e-3
    base_model = module.policy.model.get_base_model().named_parameters()
    found = {name.replace(".base_layer.", "."): parameter for name, parameter in base_model}
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(found[name], parameter), name
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "three" / "export").eval()
    ids = torch.tensor([[5, 9, 7, 12]])
    with torch.no_grad():
        assert_close(exported(ids).logits, module.policy.model(ids).logits, rtol=1e-4, atol=1e-4)
    assert "lora_" not in "".join(name for name, _ in exported.named_parameters())


def test_without_an_adapter_above_its_base_there_is_nothing_to_switch_off_or_export(base, tmp_path):
    with pytest.raises(ValueError, match=r"reference=adapter_off needs an adapter"):
        adapter_off(policy := load(base, **SETTINGS))
    for call in (Export(tmp_path, adapter=True).setup, lambda *_: policy.export_adapter(tmp_path)):
        with pytest.raises(ValueError, match=r"callbacks.export.adapter=true needs an adapter"):
            call(None, SimpleNamespace(policy=policy), "fit")
    with pytest.raises(ValueError, match=r"init_lora_weights=pissa does not work with reference=adapter_off"):
        adapter_off(load(base, **SETTINGS, adapter={"target_modules": ["q_proj"], "init_lora_weights": "pissa"}))


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapter_only_and_names_its_base(base, tmp_path):
    adapter = "policy.adapter={r: 1, lora_alpha: 2, target_modules: [q_proj]}"
    module = adapted(base, tmp_path / "run", adapter, "steps=2", "callbacks.checkpoint.every=1")
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    assert content["state_dict"]
    assert all("lora_" in name for name in content["state_dict"])
    again = adapted(base, tmp_path / "run", adapter, "steps=3", "checkpoint=last")
    assert again.completed_steps == 3
    before, after = (dict(m.policy.named_parameters()) for m in (module, again))
    assert any(not torch.equal(before[name], after[name]) for name in before if "lora_" in name)
    assert all(torch.equal(before[name], after[name]) for name in before if "lora_" not in name)

    other = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[0, 0] += 1.0
    other.save_pretrained(tmp_path / "other")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{base}/{file}", tmp_path / "other" / file)
    with pytest.raises(ValueError, match="the checkpoint's adapter was trained on other base weights"):
        adapted(str(tmp_path / "other"), tmp_path / "new", adapter, "steps=3", f"checkpoint={path}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["use_rslora", "use_dora"])
def test_an_adapter_is_exported_and_continued(base, tmp_path, kind):
    words = [f"policy.adapter={{r: 4, lora_alpha: 8, target_modules: all-linear, {kind}: true}}", "steps=2"]
    first = adapted(base, tmp_path / "first", *words, "callbacks.export.adapter=true")
    adapter = tmp_path / "first" / "export"
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {p.name for p in adapter.iterdir()}
    assert not (adapter / "model.safetensors").exists()
    words[0] = f"policy.adapter={{path: {adapter}}}"
    assert same(weights(adapted(base, tmp_path / "none", *words, "steps=0")), weights(first))
    for name, expected in {"adapter_off": False, "frozen_copy": True}.items():
        module = adapted(base, tmp_path / name, *words, "steps=1", f"reference={name}")
        assert (module.metrics["policy/kl_divergence"] == 0) is expected
    again = adapted(base, tmp_path / name, *words, "steps=3", "reference=frozen_copy", "checkpoint=last")
    whole = adapted(base, tmp_path / "whole", *words, "steps=3", "reference=frozen_copy")
    assert same(weights(again), weights(whole))
    assert not same(weights(whole), weights(first))
    ids = torch.tensor([[5, 9, 7, 12]])
    last = f"checkpoint={tmp_path}/whole/checkpoints/last.ckpt"
    adapted(base, tmp_path / "adapter", *words, "mode=export", last, "callbacks.export.adapter=true")
    exported = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter" / "export")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "export")
    with torch.no_grad():
        expected = whole.policy.model.eval()(ids).logits
        assert torch.equal(exported.eval()(ids).logits, expected)
        assert_close(merged.eval()(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_adapters_that_cannot_be_continued(base, tmp_path, caplog):
    def saved(name, config, **sizes):
        model = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path / "m", "qwen2", chat=False, **sizes))
        get_peft_model(model, config).save_pretrained(tmp_path / name)
        return tmp_path / name

    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    run = saved("run/export", lora).parent
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    damaged = shutil.copytree(run / "export", tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"12345678")
    for path, message in {
        tmp_path / "absent": "no such file or directory",
        base: "an adapter beside policy.path's weights is merged into them",
        tmp_path: "Can't find 'adapter_config.json'",
        run: f"is the directory of a run; use its export: policy.adapter.path={run}/export",
        saved("prompts", prompts): "PROMPT_TUNING: only adapters of type LORA",
        damaged: "SafetensorError",
        saved("wide", lora, hidden_size=64): "not those of an adapter of policy.path: .*size mismatch",
        saved("deep", lora, num_hidden_layers=3): r"not those of an adapter of policy.path: .*layers\.2\.",
        saved("shallow", lora, num_hidden_layers=1): r"not those of an adapter of policy.path: .*layers\.1\.",
    }.items():
        with pytest.raises(ValueError, match=f"policy.adapter.path=.*{path}.*({message})"):
            load(base, **SETTINGS, adapter={"path": str(path)})
    caplog.clear()
    load(base, **SETTINGS, adapter={"path": str(run / "export")})
    assert f"was trained on {tmp_path}/m, which is not policy.path={base}" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_that_is_quantized_in_its_files(tmp_path, bits):
    """An adapter above it is trained, and exported in weights that are packed like those; nothing else is."""
    base = write_checkpoint(tmp_path / "model", "llama", chat=False, **QUANTIZABLE)
    kind = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    AutoModelForCausalLM.from_pretrained(base, quantization_config=kind, device_map="cpu").save_pretrained(base)
    module = adapted(str(base), tmp_path / "run")
    assert torch.cat([w.flatten() for name, w in module.policy.named_parameters() if "lora_B" in name]).abs().max() > 0
    merged = copy.deepcopy(module.policy.model).merge_and_unload().eval()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export", dtype=torch.float32).eval()
    assert exported.config.quantization_config.load_in_4bit is (bits == 4)
    for part in (*exported.modules(), *merged.modules()):
        part.support_avx512bf16_for_cpu = False  # bitsandbytes has two products of 4-bit weights
    ids = torch.tensor([[5, 9, 7, 12]])
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, merged(ids).logits)
    with pytest.raises(ValueError, match="vLLM needs weights that are not quantized"):
        list(module.policy.named_weights())
    with pytest.raises(ValueError, match="quantized weights cannot be trained"):
        adapted(str(base), tmp_path / "whole", "policy.adapter=null", "reference=frozen_copy")
    assert generate(load(str(base), **SETTINGS), ["abc"], group_size=1, sampling=SAMPLING, seed=1).texts


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_sampling_leaves_the_gradient_above_quantized_weights_as_it_is(tmp_path, quantization):
    base = write_checkpoint(tmp_path / "model", "llama", chat=False, **QUANTIZABLE)
    adapter = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    policy = load(str(base), **SETTINGS | {"dtype": "bfloat16"}, adapter=adapter, quantization=quantization)
    packed = torch.uint8 if quantization == "4bit" else torch.int8
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32, packed}  # what is not packed
    rows = policy.tokenize_demonstrations(["abc", "a longer one"], ["46", "pizza"])

    def gradient():
        policy.zero_grad()
        policy.logprobs(rows, temperature=1.0).sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad])

    expected = gradient()
    generate(policy, ["abc"], group_size=2, sampling=SAMPLING, seed=1)
    assert expected.abs().max() > 1e-3
    assert_close(gradient(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("key", ["target_modules", "modules_to_save"])
def test_a_module_that_is_not_there_is_named(base, key):
    adapter = {"r": 4, "target_modules": ["q_proj"]} | {key: ["up_proj", "query_key_value"]}
    with pytest.raises(
        ValueError, match=rf"adapter.{key}: the model has no module query_key_value; .* q_proj, up_proj"
    ):
        load(base, **SETTINGS, adapter=adapter)


@pytest.mark.filterwarnings("ignore:.*ti:UserWarning")  # peft warns of what is tied
@pytest.mark.parametrize(
    "layers",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ],
)
def test_an_adapter_on_tied_embeddings_is_exported_as_it_was_trained(base, tmp_path, layers):
    path = os.path.relpath(base)
    policy = load(path, **SETTINGS, adapter={"r": 4, "lora_alpha": 8, "init_lora_weights": False} | layers)
    assert policy.model.config.tie_word_embeddings
    ids = torch.tensor([[5, 9, 7, 12]])
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            weight += 0.1 * ("modules_to_save" in name)
        expected = policy.model.eval()(ids).logits
        policy.export(tmp_path / "export")
        policy.export(tmp_path / "of_a_checkpoint", policy.state_dict())
        policy.export_adapter(tmp_path / "adapter")
        policy.export_adapter(tmp_path / "adapter_of_a_checkpoint", policy.state_dict())
        assert torch.equal(policy.model(ids).logits, expected)
        for name in ("export", "of_a_checkpoint"):
            assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits, expected)
        assert (AutoModelForCausalLM.from_pretrained(base)(ids).logits - expected).abs().max() > 0.1
        for name in ("adapter", "adapter_of_a_checkpoint"):
            assert json.loads((tmp_path / name / "adapter_config.json").read_text())["base_model_name_or_path"] == base
            found = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / name).eval()
            assert torch.equal(found(ids).logits, expected)
            assert "base_layer" not in " ".join(load_file(tmp_path / name / "adapter_model.safetensors"))
            continued = load(base, **SETTINGS, adapter={"path": str(tmp_path / name)})
            assert torch.equal(continued.model.eval()(ids).logits, expected)
            trained = [[n for n, w in one.named_parameters() if w.requires_grad] for one in (policy, continued)]
            assert trained[0] == trained[1]
